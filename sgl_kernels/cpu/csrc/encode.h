// Numbers -> codes, and codes -> lines, 16 lanes at a time: what `sgl_kernels/codes.py` and `sgl_kernels/lines.py` specify.
// Plain loops over lanes, which the compiler turns into vectors of any instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "lines.h"

namespace csa2 {

constexpr float kE4M3Max = 448.0f;
constexpr float kSaturation = 32768.0f;  // largest magnitude that a sealed page keeps
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float at_most(float x, float top) { return x < top ? x : top; }
inline float at_least(float x, float bottom) { return x > bottom ? x : bottom; }

// To nearest even, saturating; finite input.
inline uint32_t encode_e4m3(float value) {
  const float x = at_least(at_most(value, kE4M3Max), -kE4M3Max);
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);  // whose ulp is the step 2^-9
  return (magnitude < (121u << 23) ? subnormal : normal) | sign;
}

// Nearest unsigned E5M3, or the next one above; clamped to its range.
inline uint8_t encode_ue5m3(float scale, bool round_up) {
  const float clamped = at_most(at_least(scale, 1.0f / 32768), 1.875f * 65536);
  const uint32_t bits = bits_of(clamped) + (round_up ? (1u << 20) - 1 : 1u << 19);
  return static_cast<uint8_t>(std::min(255u, (bits >> 20) - (112u << 3)));
}

inline float decode_ue5m3(uint8_t code) { return float_of((code + (112u << 3)) << 20); }

// Largest magnitude of a kind of code; a scale is the largest value over it. Two bits are scaled by the root mean square.
inline float code_top(int64_t kind) {
  return kind == kE4M3 ? kE4M3Max : (kind == kE2M1 ? 6.0f : (kind == kInt4A ? 7.5f : 7.0f));
}

template <int64_t kKind>
inline uint32_t encode_one(float y) {
  if constexpr (kKind == kE4M3) return encode_e4m3(y);
  if constexpr (kKind == kE2M1) {
    // Steps of 1/2 up to 2, of 1 up to 4, of 2 beyond: the least of the three counts is the code. Ties away from zero.
    const float m = at_most(y < 0 ? -y : y, 6.0f);
    const float count = at_most(at_most(m * 2 + 0.5f, m + 2.5f), m * 0.5f + 4.5f);
    return static_cast<uint32_t>(static_cast<int32_t>(count)) | (y < 0 ? 8u : 0u);
  }
  if constexpr (kKind == kInt4) return bits_of(at_least(at_most(y, 7.0f), -7.0f) + (kRounder + 8)) & 15u;
  if constexpr (kKind == kInt4A) return bits_of(at_least(at_most(y + 7.5f, 15.0f), 0.0f) + kRounder) & 15u;
  return (y > -0.9816f ? 1u : 0u) + (y > 0.0f ? 1u : 0u) + (y > 0.9816f ? 1u : 0u);
}

// One block of 16 lanes: rows (contraction, 16), `stride` floats apart and divided by their scales -> lines. Lanes from
// `valid` on and indices from `contraction` on are code 0.
template <int64_t kKind>
inline void pack_codes_of(const float* rows, int64_t stride, int contraction, int valid, int lane_blocks, int block,
                          uint8_t* out) {
  constexpr int kBits = code_bits(kKind), kFields = 8 / kBits, kWidth = 4 * kFields;
  const int halves = (2 * contraction + kWidth - 1) / kWidth, full = halves / 2;
  for (int g = 0; g < full; ++g) {
    uint32_t line[kLanes] = {};
    for (int j = 0; j < kFields; ++j)
      for (int b = 0; b < 4; ++b) {
        const int i = g * kWidth + 4 * j + b;
        if (i >= contraction) continue;
        const float* y = rows + i * stride;
        for (int lane = 0; lane < kLanes; ++lane) line[lane] |= encode_one<kKind>(y[lane]) << (8 * b + kBits * j);
      }
    for (int lane = valid; lane < kLanes; ++lane) line[lane] = 0;
    std::memcpy(out + (static_cast<int64_t>(g) * lane_blocks + block) * kLineBytes, line, kLineBytes);
  }
  if (halves % 2 == 0) return;
  uint32_t words[kLanes] = {};
  for (int j = 0; j < kFields; ++j)
    for (int b = 0; b < 2; ++b) {
      const int i = full * kWidth + 2 * j + b;
      if (i >= contraction) continue;
      const float* y = rows + i * stride;
      for (int lane = 0; lane < kLanes; ++lane) words[lane] |= encode_one<kKind>(y[lane]) << (8 * b + kBits * j);
    }
  uint8_t* half = out + static_cast<int64_t>(full) * lane_blocks * kLineBytes + block * kLineBytes / 2;
  for (int lane = 0; lane < valid && lane < kLanes; ++lane) {
    const uint16_t word = static_cast<uint16_t>(words[lane]);
    std::memcpy(half + 2 * lane, &word, 2);
  }
}

inline void pack_codes(int64_t kind, const float* rows, int64_t stride, int contraction, int valid, int lane_blocks, int block,
                       uint8_t* out) {
  switch (kind) {
    case kE4M3: return pack_codes_of<kE4M3>(rows, stride, contraction, valid, lane_blocks, block, out);
    case kE2M1: return pack_codes_of<kE2M1>(rows, stride, contraction, valid, lane_blocks, block, out);
    case kInt4: return pack_codes_of<kInt4>(rows, stride, contraction, valid, lane_blocks, block, out);
    case kInt4A: return pack_codes_of<kInt4A>(rows, stride, contraction, valid, lane_blocks, block, out);
    default: return pack_codes_of<kLloyd2>(rows, stride, contraction, valid, lane_blocks, block, out);
  }
}

}  // namespace csa2
