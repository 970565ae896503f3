// What the module offers, as plain C++; `module.cpp` wraps it for Python.
#pragma once

#include <cstdint>

#include "layout.h"
#include "pack.h"

namespace csa2 {

// A request of a batch: new tokens [token_begin, token_end) and pages [page_begin, page_end) before them, those with coded
// values first.
struct RequestRef {
  int64_t token_begin, token_end, page_begin, page_end;
};

struct AttentionArgs {
  const void *query, *keys, *values;  // (T, H, D), (T, G, D), (T, G, D); heads contiguous, tokens `*_stride` elements apart
  void* out;                          // (T, H, D) contiguous
  float* lse;                         // (T, H) natural log-sum-exp, or null
  int64_t query_stride, key_stride, value_stride;
  Dtype dtype;
  int heads, kv_heads, head_dim;
  const uint8_t* arena;
  const RequestRef* requests;
  int64_t num_requests;
  const PageRef* pages;
  const HeadPiece* pieces;   // (formats, G) of this layer
  const float* basis_lines;    // (ceil(D / 16), D, 16) columns of the flat basis
  const float* reduced_lines;  // the same of the reduced heads, where `HeadPiece::basis_lines` says
  float scale;
  int threads;
};

void extend_attention(const AttentionArgs& args);

// A page to be written in another format.
struct PageMove {
  int64_t source, offset;      // its format, and where it lies in the arena
  int64_t target, out_offset;  // the coded format it gets, and where in the output
  int64_t sample;              // which sample of queries weights its entries; -1: none
};

// What scoring and merging leave to the caller; see `sgl_kernels/page_codec/cpu.py`.
struct MergeRule {
  float weight_floor, equal_sizes, rounding;
};

// Networks that correct the scores of entries, one a head; see `sgl_kernels/page_codec/cpu.py`.
struct ScorerArgs {
  const float *weights, *offsets, *outer;  // (heads, rows, 2 D + 4), (heads, rows), (heads, rows - 1)
  int64_t rows;                            // hidden units and one; 0: no scorer
  float share_floor, size_floor, limit;
};
constexpr int64_t kMostScorerRows = 65;

struct SealArgs {
  const uint8_t* arena;
  uint8_t* out;
  const PageMove* moves;
  int64_t num_moves;
  const HeadPiece* pieces;  // (formats, heads): all layers and heads of a page
  int heads, head_dim;
  Dtype dtype;  // of plain pages
  const float* flat;  // (D, D), symmetric and orthonormal
  bool hadamard;      // whether it is Sylvester's matrix
  const float *reduced, *reduced_t;  // (heads, D, C) and (heads, C, D), or null
  int64_t reduced_channels;
  const void* queries;  // (samples, heads, num_queries, D), softmax scale included
  int64_t num_queries;
  Dtype query_dtype;
  MergeRule rule;
  ScorerArgs scorer;
  int threads;
};
void seal(const SealArgs& args);

// out = x / rms(x) * weight; with a residual it is added to x first, and becomes the sum.
struct RmsNormArgs {
  const void* x;
  void *residual, *out;  // residual may be null, out may be x
  const void* weight;
  int64_t rows, width, x_stride, residual_stride, out_stride;
  Dtype dtype, weight_dtype;
  float epsilon;
  bool round_before_weight;  // round x / rms(x) to the dtype before the weight
  int threads;
};
void rms_norm(const RmsNormArgs& args);

// out (rows, width) = silu(x[:, :width]) * x[:, width:]
struct SiluArgs {
  const void* x;
  void* out;
  int64_t rows, width, x_stride;
  Dtype dtype;
  int threads;
};
void silu_and_mul(const SiluArgs& args);

// Rotates the first `rotary_dim` channels of every head in place.
struct RopeArgs {
  void *query, *key;
  const void* cos_sin;  // (positions, rotary_dim): cosines, then sines
  const int64_t* positions;
  int64_t rows, query_stride, key_stride;
  int query_heads, key_heads, head_dim, rotary_dim;
  bool neox;  // halves, not pairs, of channels are rotated into each other
  Dtype dtype, cache_dtype;
  int threads;
};
void rotate(const RopeArgs& args);

}  // namespace csa2
