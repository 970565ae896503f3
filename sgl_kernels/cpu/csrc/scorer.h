// The learned correction of what entries are worth: `csa2/codec/scorer.py` specifies it.
#pragma once

#include "entries.h"
#include "kernels.h"
#include "softmax.h"

namespace csa2 {

// Floats that `correct_scores` needs: hidden units of keys and of values, for each entry.
inline int64_t hidden_floats(const ScorerArgs& scorer, int padded) { return 2 * scorer.rows * padded; }

// Multiplies `importance` (padded,) of the entries of one head by exp(f).
//
// `keys` and `values` are columns (padded E / 16, pad, 16), `share` (padded,) the attention that each entry draws.
inline void correct_scores(const ScorerArgs& scorer, int head, const float* keys, const float* values, const float* share,
                           int entries, int dim, int pad, float* hidden, float* importance) {
  const int rows = static_cast<int>(scorer.rows), blocks = round_up(entries, kLanes) / kLanes, features = 2 * dim + 4;
  const float* weights = scorer.weights + static_cast<int64_t>(head) * rows * features;
  const float* offsets = scorer.offsets + static_cast<int64_t>(head) * rows;
  const float* outer = scorer.outer + static_cast<int64_t>(head) * (rows - 1);
  float* of_values = hidden + static_cast<int64_t>(blocks) * rows * kLanes;
  for (int b = 0; b < blocks; ++b) {
    const int64_t from = static_cast<int64_t>(b) * pad * kLanes, to = static_cast<int64_t>(b) * rows * kLanes;
    times_columns(weights, features, rows, dim, keys + from, hidden + to);
    times_columns(weights + dim, features, rows, dim, values + from, of_values + to);
  }
  // Keys count relative to their mean, so their products do too.
  float constant[kMostScorerRows];
  for (int r = 0; r < rows; ++r) {
    float sum = 0.0f;
    for (int b = 0; b < blocks; ++b)
      sum += vsum(vkeep_first(vload(hidden + (static_cast<int64_t>(b) * rows + r) * kLanes), entries - b * kLanes, 0.0f));
    constant[r] = offsets[r] - sum / static_cast<float>(entries);
  }
  for (int b = 0; b < blocks; ++b) {
    const float *key = keys + static_cast<int64_t>(b) * pad * kLanes, *value = values + static_cast<int64_t>(b) * pad * kLanes;
    vf key_size = vset1(0.0f), value_size = vset1(0.0f);
    for (int c = 0; c < dim; ++c) {
      const vf k = vload(key + c * kLanes), v = vload(value + c * kLanes);
      key_size = vfma(k, k, key_size);
      value_size = vfma(v, v, value_size);
    }
    float sizes[2][kLanes], scalars[4][kLanes];
    vstore(sizes[0], key_size);
    vstore(sizes[1], value_size);
    for (int i = 0; i < kLanes; ++i) {
      const int e = b * kLanes + i;
      scalars[0][i] = std::log(std::max(share[e], scorer.share_floor) * static_cast<float>(entries));
      scalars[1][i] = std::sqrt(sizes[0][i]);
      scalars[2][i] = std::log(std::max(std::sqrt(sizes[1][i]), scorer.size_floor));
      scalars[3][i] = entries > 1 ? 2.0f * static_cast<float>(e) / static_cast<float>(entries - 1) - 1.0f : -1.0f;
    }
    vf f = vset1(0.0f);
    for (int r = 0; r < rows; ++r) {
      const int64_t at = (static_cast<int64_t>(b) * rows + r) * kLanes;
      vf x = vadd(vadd(vload(hidden + at), vload(of_values + at)), vset1(constant[r]));
      const float* of_scalars = weights + static_cast<int64_t>(r) * features + 2 * dim;
      for (int s = 0; s < 4; ++s) x = vfma(vload(scalars[s]), vset1(of_scalars[s]), x);
      if (r == 0) {
        f = x;
        continue;
      }
      const vf gate = vadd(vset1(1.0f), vexp2(vmul(x, vset1(-kLog2E))));
      f = vfma(vdiv(x, gate), vset1(outer[r - 1]), f);
    }
    float logs[kLanes];
    vstore(logs, f);
    for (int i = 0; i < kLanes; ++i) logs[i] = std::max(std::min(logs[i], scorer.limit), -scorer.limit);
    float* out = importance + b * kLanes;
    vstore(out, vmul(vload(out), vexp2(vmul(vload(logs), vset1(kLog2E)))));
  }
}

}  // namespace csa2
