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
  const float* basis_lines;  // (ceil(D / 16), D, 16) columns of the flat basis
  float scale;
  int threads;
};

void extend_attention(const AttentionArgs& args);

}  // namespace csa2
