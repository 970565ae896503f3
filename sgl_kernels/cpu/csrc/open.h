// Opening pages of one (layer, head) into a chunk.
#pragma once

#include "lines.h"
#include "workspace.h"

namespace csa2 {

struct PageSource {
  const uint8_t* arena;
  const HeadPiece* piece;
  Dtype dtype;
  int head_dim;
  float scale_log2;  // softmax scale * log2(e)
};

// `count` rows of which `valid` count, from `first`, into entries `at` .. of the chunk. Rows are padded to 16 entries.
template <class Step>
inline int open_rows(const Rows& keys, const Rows& values, int64_t first, int valid, int count, int head_dim, float scale_log2,
                     int at, Chunk& chunk) {
  const int entries = round_up(count, kLanes);
  for (int e = 0; e < entries; e += kLanes)
    pack_keys<Step>(keys, first + e, valid - e, head_dim,
                    chunk.keys + static_cast<int64_t>((at + e) / kLanes) * chunk.key_steps);
  pack_values<Step>(values, first, valid, entries, head_dim, chunk.values + at / Step::kPer, chunk.value_stride);
  for (int e = 0; e < entries; ++e) {
    chunk.kmul[at + e] = scale_log2;
    chunk.kadd[at + e] = e < valid ? 0.0f : -__builtin_inff();
  }
  return entries;
}

// A plain page: keys then values of every head.
template <class Step>
inline void open_plain(const PageSource& source, const PageRef& page, int at, Chunk& chunk) {
  const HeadPiece& piece = *source.piece;
  const char* base = reinterpret_cast<const char*>(source.arena) + page.offset;
  const int64_t stride = source.head_dim * dtype_bytes(source.dtype);
  const Rows keys{base + piece.k_codes, stride, source.dtype}, values{base + piece.v_codes, stride, source.dtype};
  open_rows<Step>(keys, values, 0, static_cast<int>(page.length), static_cast<int>(piece.entries), source.head_dim,
                  source.scale_log2, at, chunk);
}

// fp32 of 16 scale bytes, `count` of which are there.
inline vf load_scales(const uint8_t* bytes, int count) {
#if defined(__AVX512F__)
  if (count >= kLanes) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(112 << 3)), 20))};
  }
#endif
  float tmp[kLanes] = {};
  for (int i = 0; i < kLanes && i < count; ++i) tmp[i] = code_tables().ue5m3[bytes[i]];
  return vload(tmp);
}

inline void decode_scales(const uint8_t* bytes, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = code_tables().ue5m3[bytes[i]];
}

inline void decode_means(const uint8_t* bytes, int n, int padded, float* out) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= n; i += kLanes) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)));
    _mm512_storeu_ps(out + i, code_value<8>(x, _mm512_setzero_ps()));
  }
#endif
  const float* table = code_tables().e4m3;
  for (; i < n; ++i) out[i] = table[bytes[i]];
  for (; i < padded; ++i) out[i] = 0.0f;
}

// Rows (contraction, 16) of floats -> lines of `Step`; rows from `n` to the end of the last line count as zero.
template <class Step>
inline void pack_rows(float* rows, int n, int steps, Line* out) {
  for (int i = n; i < steps * Step::kPer; ++i) vstore(rows + i * kLanes, vset1(0.0f));
  if constexpr (Step::kPer == 1) {
    std::memcpy(out, rows, sizeof(Line) * steps);
  } else {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                             8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(kInterleave);
    for (int i = 0; i < steps; ++i) {
      const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(rows + (2 * i + 1) * kLanes),
                                                        _mm512_load_ps(rows + 2 * i * kLanes));
      _mm512_store_si512(out + i, _mm512_permutexvar_epi16(order, pair));
    }
#endif
  }
}

// Keys of 16 entries as rows (C, 16). A scale per entry of a single class is left to `kmul`; others are multiplied in.
inline void decode_keys(const HeadPiece& piece, const uint8_t* base, int block, float* rows) {
  const int entries = static_cast<int>(piece.entries), blocks = (entries + kLanes - 1) / kLanes;
  int channel = 0;
  for (int c = 0; c < piece.num_classes; ++c) {
    const int n = static_cast<int>(piece.class_channels[c]);
    float* out = rows + channel * kLanes;
    decode_block(base + piece.class_offset[c], piece.class_kind[c], n, blocks, block, out);
    if (piece.channel_scales) {
      for (int i = 0; i < n; ++i)
        vstore(out + i * kLanes, vmul(vload(out + i * kLanes), vset1(code_tables().ue5m3[base[piece.k_scales + channel + i]])));
    } else if (piece.num_classes > 1) {
      const vf scale = load_scales(base + piece.k_scales + c * entries + block * kLanes, entries - block * kLanes);
      for (int i = 0; i < n; ++i) vstore(out + i * kLanes, vmul(vload(out + i * kLanes), scale));
    }
    channel += n;
  }
}

// A coded page into entries `at` .. of the chunk, as page number `page` of it.
template <class Step>
inline void open_coded(const PageSource& source, int64_t offset, int at, int page, Scratch& scratch, Chunk& chunk) {
  const HeadPiece& piece = *source.piece;
  const uint8_t* base = source.arena + offset;
  const int d = source.head_dim, pad = round_up(d, kLanes);
  const int entries = static_cast<int>(piece.entries), padded = round_up(entries, kLanes);
  float* rows = scratch.get<float>((round_up(std::max(d, padded), Step::kPadK) + kLanes) * kLanes);
  const bool scaled = piece.channel_scales || piece.num_classes > 1;
  for (int e = 0; e < padded; e += kLanes) {
    const int valid = entries - e;
    decode_keys(piece, base, e / kLanes, rows);
    pack_rows<Step>(rows, static_cast<int>(piece.channels), chunk.key_steps,
                    chunk.keys + static_cast<int64_t>((at + e) / kLanes) * chunk.key_steps);
    vf kmul = vset1(source.scale_log2), kadd = vset1(0.0f);
    if (!scaled) kmul = vmul(kmul, load_scales(base + piece.k_scales + e, valid));
    if (piece.bias >= 0) {
      float bias[kLanes] = {};
      for (int i = 0; i < kLanes && i < valid; ++i) bias[i] = base[piece.bias + e + i] * (kBiasStep * kLog2E);
      kadd = vload(bias);
    }
    vstore(chunk.kmul + at + e, kmul);
    vstore(chunk.kadd + at + e, vkeep_first(kadd, valid, -__builtin_inff()));
    vstore(chunk.vmul + at + e, vkeep_first(load_scales(base + piece.v_scales + e, valid), valid, 0.0f));
  }
  for (int b = 0; b < pad / kLanes; ++b) {
    decode_block(base + piece.v_codes, piece.v_kind, entries, pad / kLanes, b, rows);
    pack_rows<Step>(rows, entries, padded / Step::kPer, chunk.values + b * chunk.value_stride + at / Step::kPer);
  }
  decode_means(base + piece.k_mean, d, pad, chunk.kmean + page * pad);
  if (piece.v_mean >= 0) decode_means(base + piece.v_mean, d, pad, chunk.vmean + page * pad);
}

}  // namespace csa2
