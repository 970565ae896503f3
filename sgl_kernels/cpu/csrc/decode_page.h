// Pages of one head against the query rows of one token.
#pragma once

#include <type_traits>
#include <vector>

#include "decode.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

namespace csa2 {

// Query rows quantised for one piece: for every class what its codes meet, in the order in which they are read.
class DecodeOperand {
 public:
  // `query` (rows, ld) fp32 in the basis of the piece; `factors` multiply its channels, or null.
  void prepare(const HeadPiece& piece, const float* query, int64_t ld, int rows, const float* factors) {
    int channel = 0;
    stride = 0;
    for (int c = 0; c < piece.num_classes; ++c) {
      start[c] = stride;
      const int bits = code_bits(piece.class_kind[c]), width = 32 / bits, n = static_cast<int>(piece.class_channels[c]);
      const int halves = (2 * n + width - 1) / width;
      stride += (halves + 1) / 2 * (8 / bits) * (bits == 8 ? 2 : 1);
    }
    dwords_.assign(static_cast<size_t>(stride) * rows, 0);
    for (int c = 0; c < piece.num_classes; ++c) {
      const int n = static_cast<int>(piece.class_channels[c]);
      for (int r = 0; r < rows; ++r) {
        float values[256];
        for (int i = 0; i < n; ++i) values[i] = query[r * ld + channel + i] * (factors ? factors[channel + i] : 1.0f);
        uint32_t* out = dwords_.data() + static_cast<size_t>(r) * stride + start[c];
        if (piece.class_kind[c] == kE4M3)
          as_bf16(values, n, out);
        else
          as_int8(piece.class_kind[c], values, n, out, scale[c][r], offset[c][r]);
      }
      channel += n;
    }
  }

  const uint32_t* rows(int c, int first_row) const { return dwords_.data() + static_cast<size_t>(first_row) * stride + start[c]; }

  int stride = 0;  // dwords of a row
  int start[kMaxClasses];
  float scale[kMaxClasses][kDecodeRows];   // logit = scale * (sum of byte products + offset)
  float offset[kMaxClasses][kDecodeRows];

 private:
  static void as_bf16(const float* values, int n, uint32_t* out) {
    auto* words = reinterpret_cast<bf16_t*>(out);
    for (int i = 0; i < n; ++i) words[i] = float_to_bf16(values[i]);
  }

  // Index W g + 4 j + b in byte b of dword (g, j); in a half group 2 j + b.
  static void as_int8(int64_t kind, const float* values, int n, uint32_t* out, float& scale, float& offset) {
    const int bits = code_bits(kind), fields = 8 / bits, width = 32 / bits;
    const ByteCode& code = byte_code(kind);
    float top = 0.0f;
    for (int i = 0; i < n; ++i) top = std::max(top, std::fabs(values[i]));
    const float step = top > 0.0f ? 127.0f / top : 0.0f;
    const int halves = (2 * n + width - 1) / width, full = halves / 2;
    auto* bytes = reinterpret_cast<int8_t*>(out);
    int sum = 0;
    for (int i = 0; i < n; ++i) {
      const int q = static_cast<int>(std::lrint(values[i] * step));
      sum += q;
      const int g = i / width, rest = i % width;
      const int at = g < full ? i : 4 * (fields * full + rest / 2) + rest % 2;
      bytes[at] = static_cast<int8_t>(q);
    }
    scale = step > 0.0f ? code.key_unit / step : 0.0f;
    offset = -code.key_zero * static_cast<float>(sum);
  }

  std::vector<uint32_t> dwords_;
};

struct DecodeBuffers {
  alignas(64) float logits[kDecodeRows][kDecodeEntries];
  alignas(64) uint8_t weights[kDecodeRows][2 * kDecodeEntries];  // unsigned bytes, or bf16
  alignas(64) float top[kLanes], sum[kLanes], range[kLanes];     // of each row: largest logit, sum of exp, largest weight
  alignas(64) float factor[kDecodeRows];                         // of a row's weights, when they meet the output
  alignas(64) float mass[kDecodeRows];                           // in units of the running top
};

// Row-wise softmax of a page by itself: `weights` relative to the largest logit of the page, in bytes relative to the largest
// weight. `value_scales`: of each entry, or null. `bytes`: unsigned byte weights instead of bf16.
inline void page_softmax(DecodeBuffers& buf, int rows, int entries, const vf* value_scales, bool bytes) {
  for (int i = rows; i < kLanes; ++i) buf.top[i] = kNothing, buf.sum[i] = 0.0f, buf.range[i] = 0.0f;
  for (int r = 0; r < rows; ++r) {
    float* x = buf.logits[r];
    vf top = vload(x);
    for (int e = kLanes; e < entries; e += kLanes) top = vmax(top, vload(x + e));
    buf.top[r] = vtop(top);
    const vf limit = vset1(buf.top[r]);
    vf sum = vset1(0.0f), range = vset1(0.0f);
    for (int e = 0; e < entries; e += kLanes) {
      vf p = vexp2(vsub(vload(x + e), limit));
      sum = vadd(sum, p);
      if (value_scales) p = vmul(p, value_scales[e / kLanes]);
      range = vmax(range, p);
      vstore(x + e, p);
    }
    buf.sum[r] = vsum(sum);
    if (bytes) {
      buf.range[r] = vtop(range);
      const vf step = vset1(255.0f / buf.range[r]);
      for (int e = 0; e < entries; e += kLanes)
        _mm_store_si128(reinterpret_cast<__m128i*>(buf.weights[r] + e),
                        _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(vmul(vload(x + e), step).x)));
    } else {
      for (int e = 0; e < entries; e += kLanes) vstore_bf16(reinterpret_cast<bf16_t*>(buf.weights[r]) + e, vload(x + e));
    }
  }
}

// Brings the rows and `count` pages to the largest logit of all; afterwards `weights` are ready for the values.
inline void join_pages(DecodeBuffers* buf, int count, int rows, bool bytes, const RowState& state) {
  const vf old_top = vload(state.top);
  vf top = old_top;
  for (int p = 0; p < count; ++p) top = vmax(top, vload(buf[p].top));
  const vf shrink = vexp2(vsub(old_top, top));
  vf mass = vmul(vload(state.mass), shrink);
  for (int p = 0; p < count; ++p) {
    const vf share = vexp2(vsub(vload(buf[p].top), top)), page_mass = vmul(vload(buf[p].sum), share);
    vstore(buf[p].mass, page_mass);
    vstore(buf[p].factor, bytes ? vmul(share, vmul(vload(buf[p].range), vset1(1.0f / 255))) : share);
    mass = vadd(mass, page_mass);
  }
  vstore(state.mass, mass);
  vstore(state.top, top);
  const __mmask16 raised = _mm512_cmp_ps_mask(top.x, old_top.x, _CMP_GT_OQ);
  if (raised) {
    alignas(64) float by[kLanes];
    vstore(by, shrink);
    for (int r = 0; r < rows; ++r)
      if (raised >> r & 1) scale_row(state.out + r * state.pad, state.pad, by[r]);
  }
}

// Adds factor * unit * acc to 16 channels of the output rows.
template <int R, int NB, class Acc>
inline void add_output(const Acc acc[][kRowGroup], const float* factor, float unit, float* out, int pad) {
  for (int r = 0; r < R; ++r) {
    const vf f = vset1(factor[r] * unit);
    for (int b = 0; b < NB; ++b) {
      vf x;
      if constexpr (std::is_same_v<Acc, __m512i>)
        x = {_mm512_cvtepi32_ps(acc[b][r])};
      else
        x = {acc[b][r]};
      float* at = out + r * pad + b * kLanes;
      vstore(at, vfma(f, x, vload(at)));
    }
  }
}

// Logits of one coded page, log2 units. `ahead`: bytes from this page to the one that is read `kDecodePages` later.
// `mean_rows` (rows, pad): the query in the basis of the key mean.
inline void page_logits(const HeadPiece& piece, const uint8_t* base, int64_t ahead, const DecodeOperand& query,
                        const float* mean_rows, int head_dim, int pad, int rows, float scale_log2, DecodeBuffers& buf) {
  const int entries = static_cast<int>(piece.entries), blocks = entries / kLanes;
  alignas(64) uint8_t widened[16 * kLineBytes];
  // Codes of the later page are fetched line by line beside those of this one; its scales, means and biases here.
  const int64_t end = piece.bias >= 0 ? piece.bias + entries : piece.v_mean + head_dim;
  for (int64_t at = piece.k_scales; ahead && at < end; at += kLineBytes) prefetch(base + ahead + at);
  for (int c = 0; c < piece.num_classes; ++c) {
    const int64_t kind = piece.class_kind[c];
    const int bits = code_bits(kind), width = 32 / bits, dwords = (8 / bits) * (bits == 8 ? 2 : 1);
    const int halves = (2 * static_cast<int>(piece.class_channels[c]) + width - 1) / width, full = halves / 2;
    const int64_t stride = static_cast<int64_t>(blocks) * kLineBytes;
    const uint8_t* codes = base + piece.class_offset[c];
    if (halves % 2) widen_half(codes + full * stride, blocks, widened);
    for (int first = 0; first < rows; first += kRowGroup) {
      const uint32_t* q = query.rows(c, first);
      with_rows(std::min(kRowGroup, rows - first), [&](auto rows_constant) {
        constexpr int R = decltype(rows_constant)::value;
        over_blocks(blocks, [&](auto blocks_constant, int block) {
          constexpr int NB = decltype(blocks_constant)::value;
          __m512 logit[NB][R];
          if (kind == kE4M3) {
            __m512 acc[NB][kRowGroup] = {};
            dot_e4m3<R, NB>(codes + block * kLineBytes, ahead, stride, full, q, query.stride, acc);
            if (halves % 2) dot_e4m3<R, NB>(widened + block * kLineBytes, 0, stride, 1, q + full * dwords, query.stride, acc);
            for (int b = 0; b < NB; ++b)
              for (int r = 0; r < R; ++r) logit[b][r] = acc[b][r];
          } else {
            __m512i acc[NB][kRowGroup] = {};
            const __m128i table = byte_code(kind).keys;
            const uint8_t* at = codes + block * kLineBytes;
            const uint8_t* half = widened + block * kLineBytes;
            if (bits == 4) {
              dot_codes<4, R, NB>(at, ahead, stride, full, table, q, query.stride, acc);
              if (halves % 2) dot_codes<4, R, NB>(half, 0, stride, 1, table, q + full * dwords, query.stride, acc);
            } else {
              dot_codes<2, R, NB>(at, ahead, stride, full, table, q, query.stride, acc);
              if (halves % 2) dot_codes<2, R, NB>(half, 0, stride, 1, table, q + full * dwords, query.stride, acc);
            }
            for (int r = 0; r < R; ++r) {
              const __m512 scale = _mm512_set1_ps(query.scale[c][first + r]), offset = _mm512_set1_ps(query.offset[c][first + r]);
              for (int b = 0; b < NB; ++b)
                logit[b][r] = _mm512_mul_ps(scale, _mm512_add_ps(_mm512_cvtepi32_ps(acc[b][r]), offset));
            }
          }
          for (int b = 0; b < NB; ++b) {
            const int e = (block + b) * kLanes;
            const vf scale = piece.channel_scales ? vset1(1.0f) : load_scales(base + piece.k_scales + c * entries + e, kLanes);
            for (int r = 0; r < R; ++r) {
              float* at = buf.logits[first + r] + e;
              const vf x = vmul({logit[b][r]}, scale);
              vstore(at, c ? vadd(vload(at), x) : x);
            }
          }
        });
      });
    }
  }
  vf bias[kDecodeEntries / kLanes];
  for (int b = 0; b < blocks; ++b) {
    bias[b] = vset1(0.0f);
    if (piece.bias >= 0) {
      const __m128i steps = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + piece.bias + b * kLanes));
      bias[b] = vmul({_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(steps))}, vset1(kBiasStep * kLog2E));
    }
  }
  alignas(64) float mean[256];
  decode_means(base + piece.k_mean, head_dim, pad, mean);
  for (int r = 0; r < rows; ++r) {
    const vf shift = vset1(dot_row(mean_rows + r * pad, mean, pad) * scale_log2);
    for (int b = 0; b < blocks; ++b) {
      float* at = buf.logits[r] + b * kLanes;
      vstore(at, vfma(vload(at), vset1(scale_log2), vadd(shift, bias[b])));
    }
  }
}

// Adds the values of one coded page, weighted, to the output.
inline void add_page_values(const HeadPiece& piece, const uint8_t* base, int64_t ahead, int head_dim, int rows,
                            const DecodeBuffers& buf, const RowState& state) {
  const int entries = static_cast<int>(piece.entries), pad = state.pad;
  const bool bytes = piece.v_kind != kE4M3;
  alignas(64) float mean[256];
  decode_means(base + piece.v_mean, head_dim, pad, mean);
  const int bits = code_bits(piece.v_kind), groups = entries / (32 / bits), lane_blocks = pad / kLanes;
  const int64_t stride = static_cast<int64_t>(lane_blocks) * kLineBytes;
  const uint8_t* codes = base + piece.v_codes;
  for (int first = 0; first < rows; first += kRowGroup) {
    const auto* weights = reinterpret_cast<const uint32_t*>(buf.weights[first]);
    constexpr int64_t kWeightStride = sizeof(buf.weights[0]) / 4;
    with_rows(std::min(kRowGroup, rows - first), [&](auto rows_constant) {
      constexpr int R = decltype(rows_constant)::value;
      over_blocks(lane_blocks, [&](auto blocks_constant, int block) {
        constexpr int NB = decltype(blocks_constant)::value;
        const uint8_t* at = codes + block * kLineBytes;
        float* out = state.out + static_cast<int64_t>(first) * pad + block * kLanes;
        if (!bytes) {
          __m512 acc[NB][kRowGroup] = {};
          dot_e4m3<R, NB>(at, ahead, stride, groups, weights, kWeightStride, acc);
          add_output<R, NB>(acc, buf.factor + first, 1.0f, out, pad);
          return;
        }
        __m512i acc[NB][kRowGroup] = {};
        const ByteCode& code = byte_code(piece.v_kind);
        if (bits == 4)
          weigh_codes<4, R, NB>(at, ahead, stride, groups, code.values, weights, kWeightStride, acc);
        else
          weigh_codes<2, R, NB>(at, ahead, stride, groups, code.values, weights, kWeightStride, acc);
        add_output<R, NB>(acc, buf.factor + first, code.value_unit, out, pad);
      });
    });
  }
  for (int r = 0; r < rows; ++r) add_scaled(state.out + r * pad, mean, pad, buf.mass[r]);
}

constexpr int kDecodePages = 4;
// Up to so many coded pages of one layout, stage by stage: each stage is a chain of dependent steps, and those of several
// pages overlap.
inline void decode_coded_pages(const HeadPiece& piece, const uint8_t* const* bases, const int64_t* ahead, int count,
                               const DecodeOperand& query, const float* mean_rows, int head_dim, int rows, float scale_log2,
                               DecodeBuffers* buf, const RowState& state) {
  const int entries = static_cast<int>(piece.entries);
  const bool bytes = piece.v_kind != kE4M3;
  for (int p = 0; p < count; ++p)
    page_logits(piece, bases[p], ahead[p], query, mean_rows, head_dim, state.pad, rows, scale_log2, buf[p]);
  for (int p = 0; p < count; ++p) {
    vf value_scales[kDecodeEntries / kLanes];
    for (int e = 0; e < entries; e += kLanes) value_scales[e / kLanes] = load_scales(bases[p] + piece.v_scales + e, kLanes);
    page_softmax(buf[p], rows, entries, value_scales, bytes);
  }
  join_pages(buf, count, rows, bytes, state);
  for (int p = 0; p < count; ++p) add_page_values(piece, bases[p], ahead[p], head_dim, rows, buf[p], state);
}

// Whether pages of this piece can be read by `decode_coded_pages`.
inline bool decodes_directly(const HeadPiece& piece) { return piece.entries % kLanes == 0 && piece.entries <= kDecodeEntries; }

// A plain page of bf16 rows, `valid` of them. `pairs` (rows, steps): the query as pairs of bf16.
inline void decode_plain_page(const uint8_t* keys, const uint8_t* values, int valid, int64_t ahead, int head_dim,
                              const uint32_t* pairs, int64_t ldp, int rows, float scale_log2, DecodeBuffers& buf,
                              const RowState& state) {
  const int entries = round_up(valid, kLanes), pad = state.pad;
  const int64_t row_bytes = 2 * head_dim;
  for (int e = 0; e < entries; e += kLanes) {
    __m512 acc[kDecodeRows];
    for (int r = 0; r < rows; ++r) acc[r] = _mm512_setzero_ps();
    for (int c0 = 0; c0 < head_dim; c0 += 32) {
      const __mmask32 mask = head_dim - c0 >= 32 ? 0xffffffffu : (1u << (head_dim - c0)) - 1;
      __m512i line[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const uint8_t* at = keys + (e + i) * row_bytes + 2 * c0;
        line[i] = e + i < valid ? _mm512_maskz_loadu_epi16(mask, at) : _mm512_setzero_si512();
        prefetch(at + ahead);
      }
      transpose16(line);
      for (int first = 0; first < rows; first += kRowGroup)
        with_rows(std::min(kRowGroup, rows - first), [&](auto rows_constant) {
          constexpr int R = decltype(rows_constant)::value;
          const uint32_t* q = pairs + first * ldp + c0 / 2;
          __m512 sum[R];
          for (int r = 0; r < R; ++r) sum[r] = acc[first + r];
          const int steps = std::min(16, (head_dim - c0 + 1) / 2);
#pragma GCC unroll 16
          for (int i = 0; i < 16; ++i) {
            if (i >= steps) break;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
              sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)line[i], (__m512bh)_mm512_set1_epi32(static_cast<int>(q[r * ldp + i])));
          }
          for (int r = 0; r < R; ++r) acc[first + r] = sum[r];
        });
    }
    for (int r = 0; r < rows; ++r)
      vstore(buf.logits[r] + e, vkeep_first(vmul({acc[r]}, vset1(scale_log2)), valid - e, -__builtin_inff()));
  }
  page_softmax(buf, rows, entries, nullptr, false);
  join_pages(&buf, 1, rows, false, state);

  // Two entries at a time: unpacking words gives pairs of (channels 0-3, 8-11, ...) and of (4-7, 12-15, ...).
  const __m512i low_order = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high_order = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  for (int c0 = 0; c0 < head_dim; c0 += 32) {
    const __mmask32 mask = head_dim - c0 >= 32 ? 0xffffffffu : (1u << (head_dim - c0)) - 1;
    for (int first = 0; first < rows; first += kRowGroup)
      with_rows(std::min(kRowGroup, rows - first), [&](auto rows_constant) {
        constexpr int R = decltype(rows_constant)::value;
        __m512 low[R], high[R];
        for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
        for (int e = 0; e < valid; e += 2) {
          const uint8_t* at = values + e * row_bytes + 2 * c0;
          const __m512i one = _mm512_maskz_loadu_epi16(mask, at);
          const __m512i two = e + 1 < valid ? _mm512_maskz_loadu_epi16(mask, at + row_bytes) : _mm512_setzero_si512();
          prefetch(at + ahead);
          prefetch(at + row_bytes + ahead);
          const __m512i a = _mm512_unpacklo_epi16(one, two), b = _mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const auto p = (__m512bh)_mm512_set1_epi32(static_cast<int>(reinterpret_cast<const uint32_t*>(buf.weights[first + r])[e / 2]));
            low[r] = _mm512_dpbf16_ps(low[r], (__m512bh)a, p);
            high[r] = _mm512_dpbf16_ps(high[r], (__m512bh)b, p);
          }
        }
        for (int r = 0; r < R; ++r) {
          const vf f = vset1(buf.factor[first + r]);
          float* out = state.out + static_cast<int64_t>(first + r) * pad + c0;
          const vf x = {_mm512_permutex2var_ps(low[r], low_order, high[r])};
          vstore(out, vfma(f, x, vload(out)));
          if (c0 + kLanes < pad) {
            const vf y = {_mm512_permutex2var_ps(low[r], high_order, high[r])};
            vstore(out + kLanes, vfma(f, y, vload(out + kLanes)));
          }
        }
      });
  }
}

}  // namespace csa2

#endif
