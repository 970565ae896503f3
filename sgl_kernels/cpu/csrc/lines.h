// Decoding lines of codes: 16 lanes at a time, one vector of floats per contraction index.
#pragma once

#include "layout.h"
#include "vec.h"

namespace csa2 {

// Where one block of 16 lanes of a coded matrix lies. A group is a line of 16 dwords; a last group of at most half the
// indices is a half line of 16 words.
struct LineBlock {
  const uint8_t* full;
  int64_t stride;  // bytes from group to group
  int num_full;
  const uint8_t* half;  // or null
};

inline LineBlock line_block(const uint8_t* codes, int64_t kind, int contraction, int lane_blocks, int block) {
  const int width = 32 / code_bits(kind), halves = (2 * contraction + width - 1) / width;
  const int full = halves / 2;
  const int64_t stride = static_cast<int64_t>(lane_blocks) * kLineBytes;
  const uint8_t* end = codes + full * stride;
  return {codes + block * kLineBytes, stride, full, halves % 2 ? end + block * kLineBytes / 2 : nullptr};
}

// Bytes of `lane_blocks` blocks.
inline int64_t line_bytes(int64_t kind, int contraction, int lane_blocks) {
  const int width = 32 / code_bits(kind), halves = (2 * contraction + width - 1) / width;
  return static_cast<int64_t>(halves) * lane_blocks * kLineBytes / 2;
}

#if defined(__AVX512F__)

// Values of the codes in the low bits of each dword; what lies above a code of 2 or 4 bits does not matter.
template <int64_t kBits>
inline __m512 code_value(__m512i x, __m512 table) {
  if constexpr (kBits != 8) return _mm512_permutexvar_ps(x, table);
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
  const __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
  const __m512 subnormal = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(1.0f / 512));
  const __mmask16 small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
  const __m512 value = _mm512_mask_blend_ps(small, _mm512_castsi512_ps(normal), subnormal);
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
}

template <int64_t kBits>
inline void decode_block_bits(const LineBlock& block, const float* values, float* out) {
  constexpr int kFields = 8 / kBits;
  const __m512 table = _mm512_loadu_ps(values);
  for (int g = 0; g < block.num_full; ++g, out += 4 * kFields * kLanes) {
    const __m512i x = _mm512_loadu_si512(block.full + g * block.stride);
#pragma GCC unroll 4
    for (int j = 0; j < kFields; ++j)
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b)
        _mm512_store_ps(out + (4 * j + b) * kLanes, code_value<kBits>(_mm512_srli_epi32(x, 8 * b + kBits * j), table));
  }
  if (block.half) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.half)));
    for (int j = 0; j < kFields; ++j)
      for (int b = 0; b < 2; ++b)
        _mm512_store_ps(out + (2 * j + b) * kLanes,
                        code_value<kBits>(_mm512_srl_epi32(x, _mm_cvtsi32_si128(8 * b + kBits * j)), table));
  }
}

#else

template <int64_t kBits>
inline void decode_block_bits(const LineBlock& block, const float* values, float* out) {
  constexpr int kFields = 8 / kBits;
  constexpr uint8_t kMask = static_cast<uint8_t>((1 << kBits) - 1);
  for (int g = 0; g < block.num_full; ++g, out += 4 * kFields * kLanes) {
    const uint8_t* line = block.full + g * block.stride;
    for (int j = 0; j < kFields; ++j)
      for (int b = 0; b < 4; ++b)
        for (int lane = 0; lane < kLanes; ++lane)
          out[(4 * j + b) * kLanes + lane] = values[(line[4 * lane + b] >> (kBits * j)) & kMask];
  }
  if (block.half)
    for (int j = 0; j < kFields; ++j)
      for (int b = 0; b < 2; ++b)
        for (int lane = 0; lane < kLanes; ++lane)
          out[(2 * j + b) * kLanes + lane] = values[(block.half[2 * lane + b] >> (kBits * j)) & kMask];
}

#endif

// Values (contraction, 16) of one block, without their scales; up to 15 more rows are overwritten.
inline void decode_block(const uint8_t* codes, int64_t kind, int contraction, int lane_blocks, int block, float* out) {
  const LineBlock where = line_block(codes, kind, contraction, lane_blocks, block);
  const float* values = code_values(kind);
  if (kind == kE4M3)
    decode_block_bits<8>(where, values, out);
  else if (kind == kLloyd2)
    decode_block_bits<2>(where, values, out);
  else
    decode_block_bits<4>(where, values, out);
}

}  // namespace csa2
