// Opening pages of one (layer, head) into a chunk.
#pragma once

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

inline void decode_means(const uint8_t* bytes, int n, int padded, float* out) {
  const float* table = code_tables().e4m3;
  for (int i = 0; i < n; ++i) out[i] = table[bytes[i]];
  for (int i = n; i < padded; ++i) out[i] = 0.0f;
}

// Codes in row order, channels in order, as floats of (entries, D).
inline void decode_rows(const uint8_t* codes, int64_t kind, int64_t values, float* out) {
  const float* table = code_values(kind);
  if (kind == kE4M3) {
    for (int64_t i = 0; i < values; ++i) out[i] = table[codes[i]];
  } else {
    for (int64_t i = 0; i < values / 2; ++i) {
      out[2 * i] = table[codes[i] & 15];
      out[2 * i + 1] = table[codes[i] >> 4];
    }
  }
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

// Codes as elements, without their scales: every code is exact in bf16.
inline void decode_rows_exact(const uint8_t* codes, int64_t kind, int64_t values, float* out) {
  decode_rows(codes, kind, values, out);
}

#if defined(__AVX512BF16__)
// E4M3 -> bf16: move sign, exponent and mantissa; the eight subnormal magnitudes come from a table.
inline __m512i e4m3_to_bf16(__m512i bytes, __m512i subnormals) {
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
  const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  return _mm512_or_si512(sign, _mm512_mask_permutexvar_epi16(normal, small, magnitude, subnormals));
}

// 32 bf16 from the first `n` entries of a table of values, repeated.
inline __m512i bf16_table(const float* values, int n) {
  alignas(64) bf16_t table[32];
  for (int i = 0; i < 32; ++i) table[i] = float_to_bf16(values[i % n]);
  return _mm512_load_si512(table);
}

inline void decode_rows_exact(const uint8_t* codes, int64_t kind, int64_t values, bf16_t* out) {
  const __m512i table = bf16_table(code_values(kind), kind == kE4M3 ? 8 : 16);
  int64_t i = 0;
  if (kind == kE4M3) {
    for (; i + 32 <= values; i += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
      _mm512_storeu_si512(out + i, e4m3_to_bf16(_mm512_cvtepu8_epi16(bytes), table));
    }
  } else {
    for (; i + 32 <= values; i += 32) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
      const __m512i pair = _mm512_cvtepu8_epi32(bytes);
      // Low nibble to the low word, high nibble to the high one; the table repeats, so bit 4 of an index does not matter.
      const __m512i index = _mm512_or_si512(pair, _mm512_slli_epi32(_mm512_srli_epi32(pair, 4), 16));
      _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(index, table));
    }
  }
  float rest[32];
  decode_rows(codes + (kind == kE4M3 ? i : i / 2), kind, values - i, rest);
  narrow(rest, values - i, out + i);
}
#endif

// A coded page in row order into entries `at` .. of the chunk, as page number `page` of it.
template <class Step>
inline void open_coded_rows(const PageSource& source, int64_t offset, int at, int page, Scratch& scratch, Chunk& chunk) {
  using Elem = typename Step::elem;
  const HeadPiece& piece = *source.piece;
  const CodeTables& tables = code_tables();
  const uint8_t* base = source.arena + offset;
  const int d = source.head_dim, entries = static_cast<int>(piece.entries), pad = round_up(d, kLanes);
  const int64_t n = static_cast<int64_t>(entries) * d;
  float* wide = scratch.get<float>(2 * n + d);
  Elem* rows = reinterpret_cast<Elem*>(wide + n);
  const Rows view{reinterpret_cast<const char*>(rows), static_cast<int64_t>(d * sizeof(Elem)),
                  sizeof(Elem) == 2 ? kBf16 : kFp32};

  const uint8_t* k_scales = base + piece.k_scales;
  if (piece.basis == kIdentity) {
    decode_rows(base + piece.k_codes, piece.class_kind[0], n, wide);
    for (int64_t i = 0; i < n; ++i) wide[i] *= tables.ue5m3[k_scales[i % d]];
    narrow(wide, n, rows);
    for (int e = 0; e < entries; ++e) chunk.kmul[at + e] = source.scale_log2;
  } else {
    decode_rows_exact(base + piece.k_codes, piece.class_kind[0], n, rows);
    for (int e = 0; e < entries; ++e) chunk.kmul[at + e] = source.scale_log2 * tables.ue5m3[k_scales[e]];
  }
  for (int e = 0; e < entries; e += kLanes)
    pack_keys<Step>(view, e, entries - e, d, chunk.keys + static_cast<int64_t>((at + e) / kLanes) * chunk.key_steps);
  decode_rows_exact(base + piece.v_codes, piece.v_kind, n, rows);
  pack_values<Step>(view, 0, entries, entries, d, chunk.values + at / Step::kPer, chunk.value_stride);
  for (int e = 0; e < entries; ++e) {
    chunk.kadd[at + e] = 0.0f;
    chunk.vmul[at + e] = tables.ue5m3[base[piece.v_scales + e]];
  }
  decode_means(base + piece.k_mean, d, pad, chunk.kmean + page * pad);
  decode_means(base + piece.v_mean, d, pad, chunk.vmean + page * pad);
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

}  // namespace csa2
