// Vectors of 16 fp32 lanes for every instruction set: one AVX-512 register, two AVX2 or four SSE registers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace csa2 {

constexpr int kLanes = 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

using bf16_t = uint16_t;

inline float bf16_to_float(bf16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline bf16_t float_to_bf16(float x) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16_t>((bits >> 16) | 0x40);
  return static_cast<bf16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Coefficients of 2^f on [0, 1), relative error below 2e-7 (fitted with the ends fixed to 1 and 2).
constexpr float kExp2C1 = 0.69315174f, kExp2C2 = 0.24015927f, kExp2C3 = 0.05581868f, kExp2C4 = 0.00899100f,
                kExp2C5 = 0.00187932f;

#if defined(__AVX512F__)

struct vf {
  __m512 x;
};

inline vf vset1(float a) { return {_mm512_set1_ps(a)}; }
inline vf vload(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void vstore(float* p, vf a) { _mm512_storeu_ps(p, a.x); }
inline vf vadd(vf a, vf b) { return {_mm512_add_ps(a.x, b.x)}; }
inline vf vsub(vf a, vf b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline vf vmul(vf a, vf b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline vf vdiv(vf a, vf b) { return {_mm512_div_ps(a.x, b.x)}; }
inline vf vfma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline vf vmax(vf a, vf b) { return {_mm512_max_ps(a.x, b.x)}; }
inline float vsum(vf a) { return _mm512_reduce_add_ps(a.x); }
inline float vtop(vf a) { return _mm512_reduce_max_ps(a.x); }

// Lanes at or beyond `count` become `other`.
inline vf vkeep_first(vf a, int count, float other) {
  const int n = count < 0 ? 0 : (count > kLanes ? kLanes : count);
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1), _mm512_set1_ps(other), a.x)};
}

// 2^a; exactly 0 for -inf and anything below the smallest float.
inline vf vexp2(vf a) {
  const __m512 f = _mm512_reduce_ps(a.x, 0x01);  // a - floor(a)
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(kExp2C5), f, _mm512_set1_ps(kExp2C4));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2C3));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2C2));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2C1));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return {_mm512_scalef_ps(p, a.x)};
}

inline vf vload_bf16(const bf16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline void vstore_bf16(bf16_t* p, vf a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.x));
#else
  float tmp[kLanes];
  vstore(tmp, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(tmp[i]);
#endif
}

#else

#if defined(__AVX2__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
typedef float part_t __attribute__((vector_size(kPart * 4)));
typedef int32_t ipart_t __attribute__((vector_size(kPart * 4)));

// Members and not an array: only those stay in registers.
#if defined(__AVX2__)
struct vf {
  part_t a, b;
};
#define CSA2_EACH(F) F(a) F(b)
#else
struct vf {
  part_t a, b, c, d;
};
#define CSA2_EACH(F) F(a) F(b) F(c) F(d)
#endif
#define CSA2_INLINE inline __attribute__((always_inline))

CSA2_INLINE vf vset1(float s) {
  vf r;
#define F(m) r.m = part_t{} + s;
  CSA2_EACH(F)
#undef F
  return r;
}
CSA2_INLINE vf vload(const float* p) {
  vf r;
#define F(m)                                                    \
  std::memcpy(&r.m, p, sizeof r.m);                             \
  p += kPart;
  CSA2_EACH(F)
#undef F
  return r;
}
CSA2_INLINE void vstore(float* p, vf x) {
#define F(m)                                                    \
  std::memcpy(p, &x.m, sizeof x.m);                             \
  p += kPart;
  CSA2_EACH(F)
#undef F
}
CSA2_INLINE vf vadd(vf x, vf y) {
#define F(m) x.m += y.m;
  CSA2_EACH(F)
#undef F
  return x;
}
CSA2_INLINE vf vsub(vf x, vf y) {
#define F(m) x.m -= y.m;
  CSA2_EACH(F)
#undef F
  return x;
}
CSA2_INLINE vf vmul(vf x, vf y) {
#define F(m) x.m *= y.m;
  CSA2_EACH(F)
#undef F
  return x;
}
CSA2_INLINE vf vdiv(vf x, vf y) {
#define F(m) x.m /= y.m;
  CSA2_EACH(F)
#undef F
  return x;
}
CSA2_INLINE vf vfma(vf x, vf y, vf z) {
#define F(m) z.m = x.m * y.m + z.m;
  CSA2_EACH(F)
#undef F
  return z;
}
CSA2_INLINE vf vmax(vf x, vf y) {
#define F(m) x.m = x.m > y.m ? x.m : y.m;
  CSA2_EACH(F)
#undef F
  return x;
}
inline float vsum(vf x) {
  part_t all = part_t{};
#define F(m) all += x.m;
  CSA2_EACH(F)
#undef F
  float s = 0;
  for (int i = 0; i < kPart; ++i) s += all[i];
  return s;
}
inline float vtop(vf x) {
  part_t all = x.a;
#define F(m) all = all > x.m ? all : x.m;
  CSA2_EACH(F)
#undef F
  float s = all[0];
  for (int i = 1; i < kPart; ++i) s = all[i] > s ? all[i] : s;
  return s;
}
inline vf vkeep_first(vf a, int count, float other) {
  float tmp[kLanes];
  vstore(tmp, a);
  for (int i = count < 0 ? 0 : count; i < kLanes; ++i) tmp[i] = other;
  return vload(tmp);
}
CSA2_INLINE part_t exp2_part(part_t x) {
  x = x > -127.0f ? x : part_t{} - 127.0f;  // exponent field 0: the result is exactly 0
  x = x < 127.0f ? x : part_t{} + 127.0f;
  ipart_t n = __builtin_convertvector(x, ipart_t);
  n += (__builtin_convertvector(n, part_t) > x);  // truncation to floor; a comparison is -1
  const part_t f = x - __builtin_convertvector(n, part_t);
  part_t p = kExp2C5 * f + kExp2C4;
  p = p * f + kExp2C3;
  p = p * f + kExp2C2;
  p = p * f + kExp2C1;
  p = p * f + 1.0f;
  const ipart_t power = (n + 127) << 23;
  part_t two_n;
  std::memcpy(&two_n, &power, sizeof two_n);
  return p * two_n;
}
CSA2_INLINE vf vexp2(vf x) {
#define F(m) x.m = exp2_part(x.m);
  CSA2_EACH(F)
#undef F
  return x;
}
inline vf vload_bf16(const bf16_t* p) {
  float tmp[kLanes];
  for (int i = 0; i < kLanes; ++i) tmp[i] = bf16_to_float(p[i]);
  return vload(tmp);
}
inline void vstore_bf16(bf16_t* p, vf a) {
  float tmp[kLanes];
  vstore(tmp, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(tmp[i]);
}
#undef CSA2_EACH
#endif

// IEEE half to float, without F16C.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t bits = static_cast<uint32_t>(h & 0x7fffu) << 13;
  float out;
  if ((h & 0x7c00u) == 0x7c00u) {
    bits = sign | 0x7f800000u | (bits & 0x7fffffu);
    std::memcpy(&out, &bits, 4);
    return out;
  }
  std::memcpy(&out, &bits, 4);
  out *= 5.192296858534828e33f;  // 2^112 moves the exponent bias, denormals included
  uint32_t moved;
  std::memcpy(&moved, &out, 4);
  moved |= sign;
  std::memcpy(&out, &moved, 4);
  return out;
}

inline uint16_t float_to_half(float x) {  // to nearest even, saturating to infinity
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t mag = bits & 0x7fffffffu;
  if (mag > 0x7f800000u) return sign | 0x7e00u;
  if (mag >= 0x47800000u) return sign | 0x7c00u;
  if (mag < 0x38800000u) {  // denormal half: let the adder round
    float a;
    std::memcpy(&a, &mag, 4);
    a += 0.5f;
    uint32_t r;
    std::memcpy(&r, &a, 4);
    return sign | static_cast<uint16_t>(r - 0x3f000000u);
  }
  const uint32_t rounded = mag + 0xfffu + ((mag >> 13) & 1) - 0x38000000u;
  return sign | static_cast<uint16_t>(rounded >> 13);
}

}  // namespace csa2
