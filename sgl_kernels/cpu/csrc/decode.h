// One new token: attention straight from the bytes of a page, nothing opened. AVX-512 with VNNI and BF16.
//
// Codes of 2 and 4 bits meet an int8 query and uint8 weights in vpdpbusd; E4M3 and bf16 meet bf16 in vdpbf16ps. Queries are
// quantised once per row, weights once per page relative to the largest of that page: against the running maximum one
// attention sink would leave nothing of all others. Softmax scale, key means and biases stay in fp32.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

#include <algorithm>
#include <cmath>

#include "open.h"
#include "softmax.h"

namespace csa2 {

constexpr int kDecodeRows = 16;     // query heads of a group
constexpr int kDecodeEntries = 128;  // entries of a page
constexpr int kRowGroup = 4;         // rows that share a load of codes

// Codes as bytes: value = unit * (byte - zero).
struct ByteCode {
  __m128i keys;    // table of unsigned bytes
  __m128i values;  // table of signed bytes
  float key_unit, key_zero, value_unit;
};

inline const ByteCode& byte_code(int64_t kind) {
  auto make = [](int64_t k) {
    alignas(16) uint8_t u[16];
    alignas(16) int8_t s[16];
    ByteCode code{};
    const float* value = code_values(k);
    // Keys: E2M1 2 v + 12, integers the code itself, Lloyd-Max levels on 0..255. Values: 2 v, code - 8, levels on -127..127.
    const float key_unit = k == kE2M1 ? 0.5f : (k == kLloyd2 ? 3.02f / 255 : 1.0f);
    const float key_zero = k == kE2M1 ? 12.0f : (k == kLloyd2 ? 127.5f : (k == kInt4 ? 8.0f : 7.5f));
    const float value_unit = k == kE2M1 || k == kInt4A ? 0.5f : (k == kLloyd2 ? 1.51f / 127 : 1.0f);
    for (int i = 0; i < 16; ++i) {
      u[i] = static_cast<uint8_t>(std::lrint(value[i] / key_unit + key_zero));
      s[i] = static_cast<int8_t>(std::lrint(value[i] / value_unit));
    }
    code.keys = _mm_load_si128(reinterpret_cast<const __m128i*>(u));
    code.values = _mm_load_si128(reinterpret_cast<const __m128i*>(s));
    code.key_unit = key_unit;
    code.key_zero = key_zero;
    code.value_unit = value_unit;
    return code;
  };
  static const ByteCode codes[] = {make(kE2M1), make(kInt4), make(kInt4A), make(kLloyd2)};
  return codes[kind - kE2M1];
}

// The codes of bit field `j` of a line, one a byte.
template <int kBits>
inline __m512i field(__m512i line, int j) {
  return _mm512_and_si512(_mm512_srli_epi16(line, kBits * j), _mm512_set1_epi8((1 << kBits) - 1));
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// acc[block][row] of `NB` blocks of 16 lanes += sum over all indices of code x query. `steps` dwords of each row.
template <int kBits, int R, int NB>
inline void dot_codes(const uint8_t* codes, int64_t ahead, int64_t stride, int groups, __m128i table16, const uint32_t* query,
                      int64_t ldq, __m512i acc[][kRowGroup]) {
  constexpr int kFields = 8 / kBits;
  const __m512i table = _mm512_broadcast_i32x4(table16);
  __m512i sum[NB][R];  // local, so that it stays in registers
#pragma GCC unroll 4
  for (int b = 0; b < NB; ++b)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[b][r] = acc[b][r];
  for (int g = 0; g < groups; ++g, codes += stride, query += kFields) {
    __m512i line[NB];
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
      line[b] = _mm512_loadu_si512(codes + b * kLineBytes);
      prefetch(codes + ahead + b * kLineBytes);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kFields; ++j)
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) {
        const __m512i code = _mm512_shuffle_epi8(table, field<kBits>(line[b], j));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sum[b][r] = _mm512_dpbusd_epi32(sum[b][r], code, _mm512_set1_epi32(static_cast<int>(query[r * ldq + j])));
      }
  }
#pragma GCC unroll 4
  for (int b = 0; b < NB; ++b)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[b][r] = sum[b][r];
}

// The same with the weights of entries as unsigned bytes, and signed codes.
template <int kBits, int R, int NB>
inline void weigh_codes(const uint8_t* codes, int64_t ahead, int64_t stride, int groups, __m128i table16,
                        const uint32_t* weights, int64_t ldw, __m512i acc[][kRowGroup]) {
  constexpr int kFields = 8 / kBits;
  const __m512i table = _mm512_broadcast_i32x4(table16);
  __m512i sum[NB][R];  // local, so that it stays in registers
#pragma GCC unroll 4
  for (int b = 0; b < NB; ++b)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[b][r] = acc[b][r];
  for (int g = 0; g < groups; ++g, codes += stride, weights += kFields) {
    __m512i line[NB];
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
      line[b] = _mm512_loadu_si512(codes + b * kLineBytes);
      prefetch(codes + ahead + b * kLineBytes);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kFields; ++j) {
      __m512i weight[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) weight[r] = _mm512_set1_epi32(static_cast<int>(weights[r * ldw + j]));
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) {
        const __m512i code = _mm512_shuffle_epi8(table, field<kBits>(line[b], j));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[b][r] = _mm512_dpbusd_epi32(sum[b][r], weight[r], code);
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < NB; ++b)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[b][r] = sum[b][r];
}

// Two bf16 pairs of a line of E4M3: bytes 0, 1 and bytes 2, 3 of each dword.
inline void e4m3_pairs(__m512i line, __m512i& low, __m512i& high) {
  const __m512i first = _mm512_broadcast_i32x4(_mm_set_epi8(-1, 13, -1, 12, -1, 9, -1, 8, -1, 5, -1, 4, -1, 1, -1, 0));
  const __m512i second = _mm512_broadcast_i32x4(_mm_set_epi8(-1, 15, -1, 14, -1, 11, -1, 10, -1, 7, -1, 6, -1, 3, -1, 2));
  alignas(64) static constexpr uint16_t kSubnormal[32] = {0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
                                                          0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
                                                          0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
                                                          0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i table = _mm512_load_si512(kSubnormal);
  auto widen = [&](__m512i bytes) {
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    return _mm512_or_si512(sign, _mm512_mask_permutexvar_epi16(normal, small, magnitude, table));
  };
  low = widen(_mm512_shuffle_epi8(line, first));
  high = widen(_mm512_shuffle_epi8(line, second));
}

template <int R, int NB>
inline void dot_e4m3(const uint8_t* codes, int64_t ahead, int64_t stride, int groups, const uint32_t* pairs, int64_t ldp,
                     __m512 acc[][kRowGroup]) {
  __m512 sum[NB][R];
#pragma GCC unroll 4
  for (int b = 0; b < NB; ++b)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[b][r] = acc[b][r];
  for (int g = 0; g < groups; ++g, codes += stride, pairs += 2) {
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
      __m512i low, high;
      e4m3_pairs(_mm512_loadu_si512(codes + b * kLineBytes), low, high);
      prefetch(codes + ahead + b * kLineBytes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        sum[b][r] = _mm512_dpbf16_ps(sum[b][r], (__m512bh)low, (__m512bh)_mm512_set1_epi32(static_cast<int>(pairs[r * ldp])));
        sum[b][r] =
            _mm512_dpbf16_ps(sum[b][r], (__m512bh)high, (__m512bh)_mm512_set1_epi32(static_cast<int>(pairs[r * ldp + 1])));
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < NB; ++b)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[b][r] = sum[b][r];
}

// A last group of at most half the indices, 16 lanes of one word, as lines whose upper bytes are code 0.
inline void widen_half(const uint8_t* half, int blocks, uint8_t* lines) {
  for (int b = 0; b < blocks; ++b)
    _mm512_store_si512(lines + b * kLineBytes,
                       _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(half + b * kLineBytes / 2))));
}

// Calls f<R>() with the number of rows as a constant.
template <class F>
inline void with_rows(int rows, F f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    default: return f(std::integral_constant<int, 4>{});
  }
}
// Calls f<NB>(first block) over `blocks` blocks, four, two or one at a time.
template <class F>
inline void over_blocks(int blocks, F f) {
  int b = 0;
  for (; b + 4 <= blocks; b += 4) f(std::integral_constant<int, 4>{}, b);
  if (b + 2 <= blocks) {
    f(std::integral_constant<int, 2>{}, b);
    b += 2;
  }
  if (b < blocks) f(std::integral_constant<int, 1>{}, b);
}

}  // namespace csa2

#endif
