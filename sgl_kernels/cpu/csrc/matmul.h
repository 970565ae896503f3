// C[m][n] (+)= A[m][k] B[k][n], B in "lines": 64 bytes = 16 columns x one dword, and a dword holds Step::kPer consecutive k.
#pragma once

#include "vec.h"

namespace csa2 {

struct alignas(64) Line {
  uint32_t lane[kLanes];
};

// One dword of A against a line of B. fp32: one k per dword.
struct StepF32 {
  using elem = float;
  static constexpr int kPer = 1;
  static constexpr int kPadK = 1;     // k of A and B is padded with zeros to a multiple of it
  static constexpr int kPadRows = 1;  // buffers of A and C have room for rows up to a multiple of it
  static inline vf line(const Line* b) { return vload(reinterpret_cast<const float*>(b)); }
  static inline vf step(const uint32_t* a, vf b, vf acc) {
    float x;
    std::memcpy(&x, a, 4);
    return vfma(vset1(x), b, acc);
  }
};

#if defined(__AVX512BF16__)
// bf16: two k per dword, products and sums in fp32.
struct StepBf16 {
  using elem = bf16_t;
  static constexpr int kPer = 2;
#if defined(__AMX_BF16__)
  static constexpr int kPadK = 32;
  static constexpr int kPadRows = 16;
#else
  static constexpr int kPadK = 2;
  static constexpr int kPadRows = 1;
#endif
  static inline vf line(const Line* b) { return vload(reinterpret_cast<const float*>(b)); }
  static inline vf step(const uint32_t* a, vf b, vf acc) {
    return {_mm512_dpbf16_ps(acc.x, (__m512bh)_mm512_set1_epi32(static_cast<int>(*a)), (__m512bh)b.x)};
  }
};
#endif

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileCols = 4;  // 24 accumulators, 4 lines, 1 broadcast
#else
constexpr int kTileRows = sizeof(vf) == 2 * sizeof(part_t) ? 6 : 2, kTileCols = 1;  // 12 or 8 registers of accumulators
#endif

template <class Step, int R, int C>
inline __attribute__((always_inline)) void tile(const uint32_t* a, int64_t lda, const Line* b, int64_t b_stride, int steps, float* c, int64_t ldc,
                 bool accumulate) {
  vf acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) acc[r][j] = accumulate ? vload(c + r * ldc + j * kLanes) : vset1(0.0f);
  for (int k = 0; k < steps; ++k) {
    vf line[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) line[j] = Step::line(b + j * b_stride + k);
  #pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
  #pragma GCC unroll 8
    for (int j = 0; j < C; ++j) acc[r][j] = Step::step(a + r * lda + k, line[j], acc[r][j]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) vstore(c + r * ldc + j * kLanes, acc[r][j]);
}

template <class Step, int C>
inline void tile_rows(const uint32_t* a, int64_t lda, int rows, const Line* b, int64_t b_stride, int steps, float* c,
                      int64_t ldc, bool accumulate) {
  int r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    tile<Step, kTileRows, C>(a + r * lda, lda, b, b_stride, steps, c + r * ldc, ldc, accumulate);
  if (kTileRows > 4 && rows - r >= 4) {
    tile<Step, 4, C>(a + r * lda, lda, b, b_stride, steps, c + r * ldc, ldc, accumulate);
    r += 4;
  }
  if (rows - r == 3) {
    tile<Step, 3, C>(a + r * lda, lda, b, b_stride, steps, c + r * ldc, ldc, accumulate);
  } else if (rows - r == 2) {
    tile<Step, 2, C>(a + r * lda, lda, b, b_stride, steps, c + r * ldc, ldc, accumulate);
  } else if (rows - r == 1) {
    tile<Step, 1, C>(a + r * lda, lda, b, b_stride, steps, c + r * ldc, ldc, accumulate);
  }
}

// lda in dwords, b_stride in lines between blocks of 16 columns, ldc in floats.
template <class Step>
inline void matmul_vector(const uint32_t* a, int64_t lda, int rows, const Line* b, int64_t b_stride, int steps, int blocks,
                          float* c, int64_t ldc, bool accumulate) {
  int j = 0;
  for (; j + kTileCols <= blocks; j += kTileCols)
    tile_rows<Step, kTileCols>(a, lda, rows, b + j * b_stride, b_stride, steps, c + j * kLanes, ldc, accumulate);
  for (; j < blocks; ++j)
    tile_rows<Step, 1>(a, lda, rows, b + j * b_stride, b_stride, steps, c + j * kLanes, ldc, accumulate);
}

#if defined(__AMX_BF16__)

// Eight tiles of 16 rows x 64 bytes. Keeps what another library had configured for this thread.
class TileConfig {
 public:
  TileConfig() {
    _tile_storeconfig(&before_);
    alignas(64) Config wanted{};
    wanted.palette = 1;
    for (int i = 0; i < 8; ++i) {
      wanted.colsb[i] = 64;
      wanted.rows[i] = 16;
    }
    _tile_loadconfig(&wanted);
  }
  ~TileConfig() {
    if (before_.palette)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
  };
  alignas(64) Config before_{};
};

// 32 x 32, 32 x 16, 16 x 32 or 16 x 16 of C. Rows are padded to 16 by the caller's buffers, steps are a multiple of 16.
template <bool kTwoRows, bool kTwoCols>
inline void amx_tile(const uint32_t* a, int64_t lda, const Line* b, int64_t b_stride, int steps, float* c, int64_t ldc,
                     bool accumulate) {
  const uint32_t* a1 = a + 16 * lda;
  const Line* b1 = b + b_stride;
  float* c1 = c + 16 * ldc;
  if (accumulate) {
    _tile_loadd(0, c, ldc * 4);
    if (kTwoCols) _tile_loadd(1, c + 16, ldc * 4);
    if (kTwoRows) _tile_loadd(2, c1, ldc * 4);
    if (kTwoRows && kTwoCols) _tile_loadd(3, c1 + 16, ldc * 4);
  } else {
    _tile_zero(0);
    if (kTwoCols) _tile_zero(1);
    if (kTwoRows) _tile_zero(2);
    if (kTwoRows && kTwoCols) _tile_zero(3);
  }
  for (int k = 0; k < steps; k += 16) {
    _tile_loadd(4, a + k, lda * 4);
    _tile_loadd(6, b + k, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoRows) {
      _tile_loadd(5, a1 + k, lda * 4);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (kTwoCols) {
      _tile_loadd(7, b1 + k, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kTwoRows && kTwoCols) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, ldc * 4);
  if (kTwoCols) _tile_stored(1, c + 16, ldc * 4);
  if (kTwoRows) _tile_stored(2, c1, ldc * 4);
  if (kTwoRows && kTwoCols) _tile_stored(3, c1 + 16, ldc * 4);
}

template <bool kTwoRows>
inline void amx_rows(const uint32_t* a, int64_t lda, const Line* b, int64_t b_stride, int steps, int blocks, float* c,
                     int64_t ldc, bool accumulate) {
  int j = 0;
  for (; j + 2 <= blocks; j += 2)
    amx_tile<kTwoRows, true>(a, lda, b + j * b_stride, b_stride, steps, c + j * 16, ldc, accumulate);
  if (j < blocks) amx_tile<kTwoRows, false>(a, lda, b + j * b_stride, b_stride, steps, c + j * 16, ldc, accumulate);
}

#else

class TileConfig {
 public:
  TileConfig() {}
};

#endif

template <class Step>
inline void matmul(const uint32_t* a, int64_t lda, int rows, const Line* b, int64_t b_stride, int steps, int blocks, float* c,
                   int64_t ldc, bool accumulate) {
#if defined(__AMX_BF16__)
  if (Step::kPer == 2 && rows > 4) {
    int r = 0;
    for (; r + 16 < rows; r += 32)
      amx_rows<true>(a + r * lda, lda, b, b_stride, steps, blocks, c + r * ldc, ldc, accumulate);
    if (r < rows) amx_rows<false>(a + r * lda, lda, b, b_stride, steps, blocks, c + r * ldc, ldc, accumulate);
    return;
  }
#endif
  matmul_vector<Step>(a, lda, rows, b, b_stride, steps, blocks, c, ldc, accumulate);
}

}  // namespace csa2
