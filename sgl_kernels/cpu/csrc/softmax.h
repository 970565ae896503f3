// Blocked online softmax over a chunk: rows of queries against a block of entries, output and mass kept per row.
#pragma once

#include "workspace.h"

namespace csa2 {

// What is kept for each row: unnormalised output (row, pad), largest logit and sum of exp relative to it, log2 units.
struct RowState {
  float* out;
  float* top;
  float* mass;
  int pad;  // floats of an output row, multiple of 16
};

constexpr float kNothing = -1e30f;  // the largest logit of no logits; finite, so that differences are never NaN

inline void scale_row(float* row, int pad, float factor) {
  const vf f = vset1(factor);
  for (int c = 0; c < pad; c += kLanes) vstore(row + c, vmul(vload(row + c), f));
}

inline void add_scaled(float* row, const float* other, int pad, float factor) {
  const vf f = vset1(factor);
  for (int c = 0; c < pad; c += kLanes) vstore(row + c, vfma(f, vload(other + c), vload(row + c)));
}

inline float dot_row(const float* a, const float* b, int pad) {
  vf acc = vmul(vload(a), vload(b));
  for (int c = kLanes; c < pad; c += kLanes) acc = vfma(vload(a + c), vload(b + c), acc);
  return vsum(acc);
}

inline void store_weights(float* p, vf x) { vstore(p, x); }
inline void store_weights(bf16_t* p, vf x) { vstore_bf16(p, x); }

// One row of logits `s` (n, multiple of 16) over entries `from` .. of the chunk -> weights `p`, and the state of the row.
// `limit`: entries of the block this row may see. `mean_row`: the query in fp32, for the page means.
template <class Elem, bool kCoded, bool kLimited>
inline void softmax_row(float* s, Elem* p, int n, int from, int limit, const float* mean_row, float scale_log2,
                        const Chunk& chunk, const RowState& state, int64_t row) {
  vf best = vset1(kNothing);
  float shift = 0.0f;
  for (int i = 0; i < n; i += kLanes) {
    if (kCoded && (from + i) % chunk.page_entries == 0) {
      const int page = (from + i) / chunk.page_entries;
      shift = dot_row(mean_row, chunk.kmean + static_cast<int64_t>(page) * state.pad, state.pad) * scale_log2;
    }
    vf x = vfma(vload(s + i), vload(chunk.kmul + from + i), vload(chunk.kadd + from + i));
    if (kCoded) x = vadd(x, vset1(shift));
    if (kLimited) x = vkeep_first(x, limit - i, -__builtin_inff());
    vstore(s + i, x);
    best = vmax(best, x);
  }
  const float block_top = vtop(best), old_top = state.top[row];
  float* out = state.out + row * state.pad;
  if (block_top > old_top) {
    float factor[kLanes];
    vstore(factor, vexp2(vset1(old_top - block_top)));
    scale_row(out, state.pad, factor[0]);
    state.mass[row] *= factor[0];
    state.top[row] = block_top;
  }
  const vf top = vset1(state.top[row]);
  vf sum = vset1(0.0f);
  if (!kCoded) {
    for (int i = 0; i < n; i += kLanes) {
      const vf e = vexp2(vsub(vload(s + i), top));
      sum = vadd(sum, e);
      store_weights(p + i, e);
    }
    state.mass[row] += vsum(sum);
    return;
  }
  for (int i = 0; i < n;) {
    const int page = (from + i) / chunk.page_entries;
    const int end = i + chunk.page_entries < n ? i + chunk.page_entries : n;
    vf part = vset1(0.0f);
    for (; i < end; i += kLanes) {
      const vf e = vexp2(vsub(vload(s + i), top));
      part = vadd(part, e);
      store_weights(p + i, vmul(e, vload(chunk.vmul + from + i)));
    }
    const float page_mass = vsum(part);
    if (chunk.value_means)
      add_scaled(out, chunk.vmean + static_cast<int64_t>(page) * state.pad, state.pad, page_mass);
    state.mass[row] += page_mass;
  }
}

}  // namespace csa2
