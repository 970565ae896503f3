// Numbers -> codes, and codes -> lines, 16 lanes at a time: what `sgl_kernels/codes.py` and `sgl_kernels/lines.py` specify.
#pragma once

#include <algorithm>
#include <cmath>

#include "lines.h"

namespace csa2 {

constexpr float kE4M3Max = 448.0f;
constexpr float kSaturation = 32768.0f;  // largest magnitude that a sealed page keeps
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// Vectors of the compiler, for integer work on lanes: it splits them where the registers are shorter.
#pragma GCC diagnostic ignored "-Wpsabi"
typedef float lanes_f __attribute__((vector_size(64)));
typedef int32_t lanes_i __attribute__((vector_size(64)));
typedef uint32_t lanes_u __attribute__((vector_size(64)));
#define CSA2_ALWAYS inline __attribute__((always_inline))

template <class To, class From>
CSA2_ALWAYS To bits_as(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

CSA2_ALWAYS lanes_f load_lanes(const float* p) {
  lanes_f x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// For a number and for lanes of numbers.
template <class F>
CSA2_ALWAYS F clamped(F x, float low, float high) {
  x = x < F{} + high ? x : F{} + high;
  return x > F{} + low ? x : F{} + low;
}

// To nearest even, saturating; finite input. U: what holds the codes, as many of them as F has numbers.
template <class U, class F>
CSA2_ALWAYS U encode_e4m3(F value) {
  const U bits = bits_as<U>(clamped(value, -kE4M3Max, kE4M3Max)), magnitude = bits & 0x7fffffffu;
  const U normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
  const U subnormal = bits_as<U>(bits_as<F>(magnitude) + 16384.0f) - bits_as<uint32_t>(16384.0f);  // whose ulp is 2^-9
  return (magnitude < U{} + (121u << 23) ? subnormal : normal) | (bits >> 24 & 0x80u);
}

// Nearest unsigned E5M3, or the next one above; clamped to its range.
inline uint8_t encode_ue5m3(float scale, bool round_up) {
  const uint32_t bits = bits_as<uint32_t>(clamped(scale, 1.0f / 32768, 1.875f * 65536)) + (round_up ? (1u << 20) - 1 : 1u << 19);
  return static_cast<uint8_t>(std::min(255u, (bits >> 20) - (112u << 3)));
}

inline float decode_ue5m3(uint8_t code) { return bits_as<float>((code + (112u << 3)) << 20); }

// Largest magnitude of a kind of code; a scale is the largest value over it. Two bits are scaled by the root mean square.
inline float code_top(int64_t kind) {
  return kind == kE4M3 ? kE4M3Max : (kind == kE2M1 ? 6.0f : (kind == kInt4A ? 7.5f : 7.0f));
}

template <int64_t kKind>
CSA2_ALWAYS lanes_u encode_lanes(lanes_f y) {
  if constexpr (kKind == kE4M3) return encode_e4m3<lanes_u>(y);
  if constexpr (kKind == kE2M1) {
    // Steps of 1/2 up to 2, of 1 up to 4, of 2 beyond: the least of the three counts is the code. Ties away from zero.
    const lanes_f m = clamped(y < 0.0f ? -y : y, 0.0f, 6.0f), small = m * 2.0f + 0.5f, middle = m + 2.5f, large = m * 0.5f + 4.5f;
    const lanes_f some = small < middle ? small : middle, count = some < large ? some : large;
    return (lanes_u)__builtin_convertvector(count, lanes_i) | ((lanes_u)(y < 0.0f) & 8u);
  }
  if constexpr (kKind == kInt4) return bits_as<lanes_u>(clamped(y, -7.0f, 7.0f) + (kRounder + 8)) & 15u;
  if constexpr (kKind == kInt4A) return bits_as<lanes_u>(clamped(y + 7.5f, 0.0f, 15.0f) + kRounder) & 15u;
  return -(lanes_u)((y > -0.9816f) + (y > 0.0f) + (y > 0.9816f));  // a comparison that holds is -1
}

// The codes of kBytes x 8 / bits rows from `first` on, in fields of each lane; rows from `contraction` on are code 0.
template <int64_t kKind, int kBytes>
CSA2_ALWAYS lanes_u code_fields(const float* rows, int64_t stride, int first, int contraction) {
  constexpr int kBits = code_bits(kKind);
  lanes_u fields = {};
  for (int j = 0; j < 8 / kBits; ++j)
    for (int b = 0; b < kBytes; ++b) {
      const int i = first + kBytes * j + b;
      if (i < contraction) fields |= encode_lanes<kKind>(load_lanes(rows + i * stride)) << (8 * b + kBits * j);
    }
  return fields;
}

// One block of 16 lanes: rows (contraction, 16), `stride` floats apart and divided by their scales -> lines. Lanes from
// `valid` on and indices from `contraction` on are code 0.
template <int64_t kKind>
inline void pack_codes_of(const float* rows, int64_t stride, int contraction, int valid, int lane_blocks, int block,
                          uint8_t* out) {
  constexpr int kWidth = 32 / code_bits(kKind);
  const int halves = (2 * contraction + kWidth - 1) / kWidth, full = halves / 2;
  lanes_u keep;
  for (int lane = 0; lane < kLanes; ++lane) keep[lane] = lane < valid ? ~0u : 0u;
  for (int g = 0; g < full; ++g) {
    const lanes_u line = code_fields<kKind, 4>(rows, stride, g * kWidth, contraction) & keep;
    std::memcpy(out + (static_cast<int64_t>(g) * lane_blocks + block) * kLineBytes, &line, kLineBytes);
  }
  if (halves % 2 == 0) return;
  const lanes_u words = code_fields<kKind, 2>(rows, stride, full * kWidth, contraction) & keep;
  uint8_t* half = out + static_cast<int64_t>(full) * lane_blocks * kLineBytes + block * kLineBytes / 2;
  for (int lane = 0; lane < kLanes; ++lane) {
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
