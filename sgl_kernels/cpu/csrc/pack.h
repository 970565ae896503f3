// Rows of channels -> lines for `matmul`: keys with the entry in the lane, values with the channel in the lane.
#pragma once

#include "matmul.h"

namespace csa2 {

enum Dtype : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// Rows in memory, for example the entries of a plain page or of the new tokens.
struct Rows {
  const char* base;
  int64_t stride_bytes;
  Dtype dtype;
  const char* row(int64_t i) const { return base + i * stride_bytes; }
};

inline float load_scalar(const char* row, Dtype dtype, int i) {
  if (dtype == kFp32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t x = reinterpret_cast<const uint16_t*>(row)[i];
  return dtype == kBf16 ? bf16_to_float(x) : half_to_float(x);
}

inline void store_scalar(char* row, Dtype dtype, int i, float x) {
  if (dtype == kFp32)
    reinterpret_cast<float*>(row)[i] = x;
  else
    reinterpret_cast<uint16_t*>(row)[i] = dtype == kBf16 ? float_to_bf16(x) : float_to_half(x);
}

inline int64_t dtype_bytes(Dtype dtype) { return dtype == kFp32 ? 4 : 2; }

inline void to_float(const char* row, Dtype dtype, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = load_scalar(row, dtype, i);
}

template <class Elem>
inline void narrow(const float* in, int64_t n, Elem* out);
template <>
inline void narrow<float>(const float* in, int64_t n, float* out) {
  std::memcpy(out, in, n * sizeof(float));
}
template <>
inline void narrow<bf16_t>(const float* in, int64_t n, bf16_t* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) vstore_bf16(out + i, vload(in + i));
  for (; i < n; ++i) out[i] = float_to_bf16(in[i]);
}

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Lines of the keys of 16 entries with D channels.
template <class Step>
inline int key_steps(int d) {
  return round_up(d, Step::kPadK) / Step::kPer;
}

// Up to 16 rows -> `key_steps` lines. Rows at or beyond `valid` are zero, whatever lies in memory.
template <class Step>
inline void pack_keys(const Rows& rows, int64_t first, int valid, int d, Line* out) {
  // fp32, one channel per line
  std::memset(out, 0, sizeof(Line) * key_steps<Step>(d));
  for (int e = 0; e < (valid < kLanes ? valid : kLanes); ++e) {
    const char* row = rows.row(first + e);
    for (int c = 0; c < d; ++c) {
      const float x = load_scalar(row, rows.dtype, c);
      std::memcpy(&out[c].lane[e], &x, 4);
    }
  }
}

// `entries` rows (a multiple of 16, those beyond `valid` zero) -> for every 16 channels entries / kPer lines, `stride` apart.
template <class Step>
inline void pack_values(const Rows& rows, int64_t first, int valid, int entries, int d, Line* out, int64_t stride) {
  for (int c0 = 0; c0 < d; c0 += kLanes, out += stride) {
    const int n = d - c0 < kLanes ? d - c0 : kLanes;
    for (int e = 0; e < entries; ++e) {
      float tmp[kLanes] = {};
      if (e < valid)
        for (int c = 0; c < n; ++c) tmp[c] = load_scalar(rows.row(first + e), rows.dtype, c0 + c);
      std::memcpy(&out[e], tmp, sizeof tmp);
    }
  }
}

#if defined(__AVX512BF16__)

inline void transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

template <>
inline void pack_keys<StepBf16>(const Rows& rows, int64_t first, int valid, int d, Line* out) {
  const int steps = key_steps<StepBf16>(d);
  for (int c0 = 0; c0 < 2 * steps; c0 += 32) {
    const int n = d - c0;
    const __mmask32 mask = n >= 32 ? 0xffffffffu : (n <= 0 ? 0 : (1u << n) - 1);
    __m512i r[16];
#pragma GCC unroll 16
    for (int e = 0; e < 16; ++e)
      r[e] = e < valid ? _mm512_maskz_loadu_epi16(mask, rows.row(first + e) + 2 * c0) : _mm512_setzero_si512();
    transpose16(r);
    const int lines = steps - c0 / 2 < 16 ? steps - c0 / 2 : 16;
    if (lines == 16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + c0 / 2 + i, r[i]);
    } else {
      for (int i = 0; i < lines; ++i) _mm512_store_si512(out + c0 / 2 + i, r[i]);
    }
  }
}

template <>
inline void pack_values<StepBf16>(const Rows& rows, int64_t first, int valid, int entries, int d, Line* out,
                                  int64_t stride) {
  for (int c0 = 0; c0 < d; c0 += kLanes, out += stride) {
    const int n = d - c0;
    const __mmask16 mask = n >= 16 ? 0xffff : (1u << n) - 1;
    const __m512i zero = _mm512_setzero_si512();
    auto wide = [&](int e) {
      if (e >= valid) return zero;
      return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, rows.row(first + e) + 2 * c0));
    };
    for (int e = 0; e < entries; e += 2)
      _mm512_store_si512(out + e / 2, _mm512_or_si512(wide(e), _mm512_slli_epi32(wide(e + 1), 16)));
  }
}

#endif

}  // namespace csa2
