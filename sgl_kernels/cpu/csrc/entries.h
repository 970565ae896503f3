// The entries of one page and head in the model's own basis, as rows (entry, channel) and as columns: for every block of 16
// entries one vector per channel.
#pragma once

#include "encode.h"
#include "open.h"

namespace csa2 {

// The fixed matrices, row-major fp32.
struct BasisRows {
  const float* flat;  // (D, D), symmetric and orthonormal
  bool hadamard;      // whether it is Sylvester's matrix, so that additions do
  const float *reduced, *reduced_t;  // (sets x L x G, D, C) and (sets x L x G, C, D), or null
  int64_t reduced_channels;
};

inline void transpose_block(const float* rows, int64_t stride, float* columns) {
#if defined(__AVX512BF16__)
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(rows + i * stride);
  transpose16(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(columns + i * kLanes, r[i]);
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) columns[j * kLanes + i] = rows[i * stride + j];
#endif
}

// Rows (entries, pad) -> columns (blocks, pad, 16); both multiples of 16.
inline void to_columns(const float* rows, int entries, int pad, float* columns) {
  for (int e = 0; e < entries; e += kLanes)
    for (int c = 0; c < pad; c += kLanes)
      transpose_block(rows + static_cast<int64_t>(e) * pad + c, pad, columns + static_cast<int64_t>(e) * pad + c * kLanes);
}

inline void to_rows(const float* columns, int entries, int pad, float* rows) {
  for (int e = 0; e < entries; e += kLanes)
    for (int c = 0; c < pad; c += kLanes) {
      const float* block = columns + static_cast<int64_t>(e) * pad + c * kLanes;
      float tile[kLanes * kLanes];
      transpose_block(block, kLanes, tile);
      for (int i = 0; i < kLanes; ++i)
        vstore(rows + static_cast<int64_t>(e + i) * pad + c, vload(tile + i * kLanes));
    }
}

// out (rows, 16) = matrix (rows, n) times columns (n, 16); `out` must not be `columns`.
inline void times_columns(const float* matrix, int64_t stride, int rows, int n, const float* columns, float* out) {
  matmul_vector<StepF32>(reinterpret_cast<const uint32_t*>(matrix), stride, rows, reinterpret_cast<const Line*>(columns), 0, n,
                         1, out, kLanes, false);
}

// Orthonormal Hadamard transform along the channels of columns (d, 16), d a power of two: two levels a pass.
inline void hadamard_columns(float* x, int d) {
  int h = 1;
  for (; 4 * h <= d; h *= 4)
    for (int base = 0; base < d; base += 4 * h)
      for (int i = base; i < base + h; ++i) {
        float* at = x + i * kLanes;
        const int64_t step = static_cast<int64_t>(h) * kLanes;
        const vf a = vload(at), b = vload(at + step), c = vload(at + 2 * step), e = vload(at + 3 * step);
        const vf s = vadd(a, b), t = vsub(a, b), u = vadd(c, e), v = vsub(c, e);
        vstore(at, vadd(s, u));
        vstore(at + step, vadd(t, v));
        vstore(at + 2 * step, vsub(s, u));
        vstore(at + 3 * step, vsub(t, v));
      }
  if (h < d)
    for (int i = 0; i < h; ++i) {
      float *low = x + i * kLanes, *high = low + static_cast<int64_t>(h) * kLanes;
      const vf a = vload(low), b = vload(high);
      vstore(low, vadd(a, b));
      vstore(high, vsub(a, b));
    }
  const vf unit = vset1(1.0f / std::sqrt(static_cast<float>(d)));
  for (int i = 0; i < d; ++i) vstore(x + i * kLanes, vmul(vload(x + i * kLanes), unit));
}

// Columns (blocks, pad, 16) of d channels to the flat basis and, as it is its own inverse, back. `spare` holds (d, 16).
inline void through_flat(float* columns, int entries, int pad, int d, const BasisRows& bases, float* spare) {
  for (int e = 0; e < entries; e += kLanes) {
    float* block = columns + static_cast<int64_t>(e) * pad;
    if (bases.hadamard) {
      hadamard_columns(block, d);
      continue;
    }
    times_columns(bases.flat, d, d, d, block, spare);
    std::memcpy(block, spare, sizeof(float) * d * kLanes);
  }
}

// Not finite -> 0, and nothing beyond what a page holds; `n` is a multiple of 16.
inline void make_finite(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const lanes_f value = load_lanes(x + i);
    const lanes_i broken = (bits_as<lanes_u>(value) & 0x7f800000u) == 0x7f800000u;
    const lanes_f kept = clamped(broken ? lanes_f{} : value, -kSaturation, kSaturation);
    std::memcpy(x + i, &kept, sizeof kept);
  }
}

// Keys or values of a plain page as rows (entries, pad); what pads them is zero.
inline void plain_rows(const uint8_t* from, Dtype dtype, int entries, int d, int pad, float* rows) {
  const int64_t bytes = d * dtype_bytes(dtype);
  for (int e = 0; e < entries; ++e) {
    const char* row = reinterpret_cast<const char*>(from) + e * bytes;
    float* out = rows + static_cast<int64_t>(e) * pad;
    int c = 0;
    if (dtype == kBf16)
      for (; c + kLanes <= d; c += kLanes) vstore(out + c, vload_bf16(reinterpret_cast<const bf16_t*>(row) + c));
    for (; c < d; ++c) out[c] = load_scalar(row, dtype, c);
    for (; c < pad; ++c) out[c] = 0.0f;
  }
  std::memset(rows + static_cast<int64_t>(entries) * pad, 0, sizeof(float) * (round_up(entries, kLanes) - entries) * pad);
}

// Keys of a coded piece as columns in the model's own basis. `spare` holds (pad + 16, 16) twice.
inline void coded_keys(const HeadPiece& piece, const uint8_t* base, int d, int pad, const BasisRows& bases,
                       float* spare, float* columns) {
  const int entries = static_cast<int>(piece.entries), channels = static_cast<int>(piece.channels);
  float mean[256];
  decode_means(base + piece.k_mean, d, d, mean);
  float* wide = spare + (pad + kLanes) * kLanes;
  for (int e = 0; e < entries; e += kLanes) {
    float* block = columns + static_cast<int64_t>(e) * pad;
    decode_keys(piece, base, e / kLanes, spare);
    if (!piece.channel_scales && piece.num_classes == 1) {
      const vf scale = load_scales(base + piece.k_scales + e, entries - e);
      for (int c = 0; c < channels; ++c) vstore(spare + c * kLanes, vmul(vload(spare + c * kLanes), scale));
    }
    const float* x = spare;
    if (piece.basis == kReduced) {
      const float* rows = bases.reduced + piece.basis_row * d * bases.reduced_channels;
      times_columns(rows, bases.reduced_channels, d, channels, spare, wide);
      x = wide;
    }
    for (int c = 0; c < d; ++c) vstore(block + c * kLanes, vadd(vload(x + c * kLanes), vset1(mean[c])));
    for (int c = d; c < pad; ++c) vstore(block + c * kLanes, vset1(0.0f));
  }
  if (piece.basis == kFlat) through_flat(columns, round_up(entries, kLanes), pad, d, bases, spare);
}

// Values of a coded piece as columns in the model's own basis. `rows` (entries + 16, pad) and `spare` are overwritten.
inline void coded_values(const HeadPiece& piece, const uint8_t* base, int d, int pad, const BasisRows& bases, float* spare,
                         float* rows, float* columns) {
  const int entries = static_cast<int>(piece.entries), padded = round_up(entries, kLanes);
  float mean[256];
  decode_means(base + piece.v_mean, d, pad, mean);
  for (int b = 0; b < pad / kLanes; ++b) {
    decode_block(base + piece.v_codes, piece.v_kind, entries, pad / kLanes, b, spare);
    const vf add = vload(mean + b * kLanes);
    for (int e = 0; e < entries; ++e) {
      const vf scale = vset1(code_tables().ue5m3[base[piece.v_scales + e]]);
      vstore(rows + static_cast<int64_t>(e) * pad + b * kLanes, vfma(vload(spare + e * kLanes), scale, add));
    }
  }
  std::memset(rows + static_cast<int64_t>(entries) * pad, 0, sizeof(float) * (padded - entries) * pad);
  to_columns(rows, padded, pad, columns);
  through_flat(columns, padded, pad, d, bases, spare);
}

}  // namespace csa2
