// Scoring the entries of a page, and merging them into groups around the most important ones: the torch code in
// `csa2/codec/importance.py` and `merging.py` specifies both.
#pragma once

#include <cfloat>

#include "entries.h"
#include "kernels.h"
#include "softmax.h"

namespace csa2 {

// Mean over the rows of softmax(logits + bias): `share` (padded,), zero from `entries` on. `spare` holds (padded,).
inline void mean_softmax(const float* logits, int64_t stride, int rows, const float* bias, int entries, float* spare,
                         float* share) {
  const int padded = round_up(entries, kLanes);
  for (int e = 0; e < padded; e += kLanes) vstore(share + e, vset1(0.0f));
  for (int r = 0; r < rows; ++r) {
    const float* row = logits + r * stride;
    vf top = vset1(-FLT_MAX);
    for (int e = 0; e < padded; e += kLanes) {
      const vf x = vkeep_first(vadd(vload(row + e), vload(bias + e)), entries - e, -FLT_MAX);
      vstore(spare + e, x);
      top = vmax(top, x);
    }
    const vf limit = vset1(vtop(top));
    vf sum = vset1(0.0f);
    for (int e = 0; e < padded; e += kLanes) {
      const vf p = vexp2(vmul(vsub(vload(spare + e), limit), vset1(kLog2E)));
      vstore(spare + e, p);
      sum = vadd(sum, p);
    }
    const vf part = vset1(1.0f / (vsum(sum) * static_cast<float>(rows)));
    for (int e = 0; e < padded; e += kLanes) vstore(share + e, vfma(vload(spare + e), part, vload(share + e)));
  }
}

inline float norm_of(const float* row, int pad) { return std::sqrt(dot_row(row, row, pad)); }

// What to expect without a sample: softmax over how much smaller each key is than the others, in standard deviations.
inline void share_by_size(const float* keys, int pad, const float* bias, int entries, float equal_sizes, float* spare,
                          float* share) {
  float mean = 0.0f, variance = 0.0f;
  for (int e = 0; e < entries; ++e) mean += share[e] = norm_of(keys + static_cast<int64_t>(e) * pad, pad);
  mean /= static_cast<float>(entries);
  for (int e = 0; e < entries; ++e) variance += (share[e] - mean) * (share[e] - mean);
  const float deviation = std::sqrt(variance / static_cast<float>(entries));
  const float spread = std::max(deviation, std::max(equal_sizes * mean, FLT_MIN));
  for (int e = 0; e < entries; ++e) share[e] = (mean - share[e]) / spread;
  for (int e = entries; e < round_up(entries, kLanes); ++e) share[e] = 0.0f;
  float* logits = spare + round_up(entries, kLanes);
  std::memcpy(logits, share, sizeof(float) * round_up(entries, kLanes));
  mean_softmax(logits, 0, 1, bias, entries, spare, share);
}

// Buffers for merging E entries of which P stay; `pad` is a multiple of 16.
struct MergeBuffers {
  float* centred;   // (padded E, pad)
  float* columns;   // (padded E / 16, pad, 16)
  float* pivots;    // (P, pad)
  float* products;  // (P, padded E)
  float* squares;   // (P,)
  float* weight;    // (padded E,)
  float* mass;      // (P,)
  float* sums;      // (padded P, pad)
  int* kept;        // (E,)
  int* owner;       // (padded E,)
};

// Adds to `products` and `squares` what the centred rows of `x`, in units of their standard deviation, say of the distances.
inline void add_distances(const float* x, int entries, int groups, int pad, float rounding, bool first, MergeBuffers& buf) {
  const int padded = round_up(entries, kLanes);
  float mean[256];
  for (int c = 0; c < pad; c += kLanes) {
    vf sum = vset1(0.0f);
    for (int e = 0; e < entries; ++e) sum = vadd(sum, vload(x + static_cast<int64_t>(e) * pad + c));
    vstore(mean + c, vmul(sum, vset1(1.0f / static_cast<float>(entries))));
  }
  float size = 0.0f, variance = 0.0f;
  for (int e = 0; e < entries; ++e) {
    const float* row = x + static_cast<int64_t>(e) * pad;
    float* out = buf.centred + static_cast<int64_t>(e) * pad;
    for (int c = 0; c < pad; c += kLanes) vstore(out + c, vsub(vload(row + c), vload(mean + c)));
    size += dot_row(row, row, pad);
    variance += dot_row(out, out, pad);
  }
  std::memset(buf.centred + static_cast<int64_t>(entries) * pad, 0, sizeof(float) * (padded - entries) * pad);
  const float spread = std::max(std::max(variance, rounding * size) / static_cast<float>(entries), FLT_MIN);
  const float unit = 1.0f / std::sqrt(spread);
  for (int e = 0; e < entries; ++e) scale_row(buf.centred + static_cast<int64_t>(e) * pad, pad, unit);
  to_columns(buf.centred, padded, pad, buf.columns);
  for (int p = 0; p < groups; ++p) {
    const float* row = buf.centred + static_cast<int64_t>(buf.kept[p]) * pad;
    std::memcpy(buf.pivots + static_cast<int64_t>(p) * pad, row, sizeof(float) * pad);
    buf.squares[p] = dot_row(row, row, pad) + (first ? 0.0f : buf.squares[p]);
  }
  matmul_vector<StepF32>(reinterpret_cast<const uint32_t*>(buf.pivots), pad, groups, reinterpret_cast<const Line*>(buf.columns),
                         pad, pad, padded / kLanes, buf.products, padded, !first);
}

// The nearest pivot of every entry; pivots belong to themselves.
inline void find_owners(int entries, int groups, MergeBuffers& buf) {
  const int padded = round_up(entries, kLanes);
  for (int e = 0; e < padded; e += kLanes) {
    lanes_f best = lanes_f{} + FLT_MAX;
    lanes_i owner = {};
    for (int p = 0; p < groups; ++p) {
      // But for the entry's own square, which is the same for all pivots.
      const lanes_f distance = buf.squares[p] - 2.0f * load_lanes(buf.products + static_cast<int64_t>(p) * padded + e);
      const lanes_i nearer = distance < best;
      owner = nearer ? lanes_i{} + p : owner;
      best = nearer ? distance : best;
    }
    std::memcpy(buf.owner + e, &owner, sizeof owner);
  }
  for (int p = 0; p < groups; ++p) buf.owner[buf.kept[p]] = p;
}

// Merges `entries` rows of keys, values and biases in place into `groups`, fewer than before. `importance` (entries,);
// afterwards `buf.kept` has the rows that stayed, ascending.
inline void merge_rows(float* keys, float* values, float* bias, const float* importance, int entries, int groups, int pad,
                       const MergeRule& rule, MergeBuffers& buf) {
  float sum = 0.0f;
  for (int e = 0; e < entries; ++e) sum += importance[e];
  const float mean = std::max(sum / static_cast<float>(entries), FLT_MIN);
  for (int e = 0; e < entries; ++e) {
    buf.weight[e] = importance[e] / mean + rule.weight_floor;
    buf.kept[e] = e;
  }
  const float* weight = buf.weight;
  std::nth_element(buf.kept, buf.kept + groups, buf.kept + entries,
                   [weight](int a, int b) { return weight[a] != weight[b] ? weight[a] > weight[b] : a < b; });
  std::sort(buf.kept, buf.kept + groups);
  add_distances(keys, entries, groups, pad, rule.rounding, true, buf);
  add_distances(values, entries, groups, pad, rule.rounding, false, buf);
  find_owners(entries, groups, buf);

  std::memset(buf.mass, 0, sizeof(float) * groups);
  std::memset(buf.sums, 0, sizeof(float) * groups * pad);
  for (int e = 0; e < entries; ++e) {
    const int p = buf.owner[e];
    buf.mass[p] += weight[e];
    add_scaled(buf.sums + static_cast<int64_t>(p) * pad, values + static_cast<int64_t>(e) * pad, pad, weight[e]);
  }
  for (int p = 0; p < groups; ++p) {
    const int e = buf.kept[p];  // not before p, so rows move without harm
    if (e != p) std::memcpy(keys + static_cast<int64_t>(p) * pad, keys + static_cast<int64_t>(e) * pad, sizeof(float) * pad);
    const vf share = vset1(1.0f / buf.mass[p]);
    for (int c = 0; c < pad; c += kLanes)
      vstore(values + static_cast<int64_t>(p) * pad + c, vmul(vload(buf.sums + static_cast<int64_t>(p) * pad + c), share));
    bias[p] = std::max(std::log(buf.mass[p] / weight[e]) + bias[e], 0.0f);
  }
  for (int p = groups; p < round_up(groups, kLanes); ++p) {
    std::memset(keys + static_cast<int64_t>(p) * pad, 0, sizeof(float) * pad);
    std::memset(values + static_cast<int64_t>(p) * pad, 0, sizeof(float) * pad);
    bias[p] = 0.0f;
  }
}

}  // namespace csa2
