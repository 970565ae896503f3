// The small operators between the matrix products of a decoder layer: RMSNorm, rotary embedding, SiLU-and-mul.
// All compute in fp32 and round once.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace csa2 {
namespace {

constexpr int64_t kParallelElements = 1 << 15;  // less work than this is done before a second thread has woken up

struct Half {
  uint16_t bits;
};
struct Brain {
  bf16_t bits;
};

inline vf load16(const float* p) { return vload(p); }
inline vf load16(const Brain* p) { return vload_bf16(&p->bits); }
inline void store16(float* p, vf x) { vstore(p, x); }
inline void store16(Brain* p, vf x) { vstore_bf16(&p->bits, x); }
#if defined(__AVX512F__)
inline vf load16(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store16(Half* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.x, 0));
}
#else
inline vf load16(const Half* p) {
  float tmp[kLanes];
  for (int i = 0; i < kLanes; ++i) tmp[i] = half_to_float(p[i].bits);
  return vload(tmp);
}
inline void store16(Half* p, vf x) {
  float tmp[kLanes];
  vstore(tmp, x);
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_half(tmp[i]);
}
#endif

// `n` < 16 elements, zero beyond.
template <class E>
inline vf load_tail(const E* p, int n) {
  E tmp[kLanes] = {};
  std::memcpy(tmp, p, n * sizeof(E));
  return load16(tmp);
}
template <class E>
inline void store_tail(E* p, vf x, int n) {
  E tmp[kLanes];
  store16(tmp, x);
  std::memcpy(p, tmp, n * sizeof(E));
}

template <class E>
inline vf rounded(vf x) {
  E tmp[kLanes];
  store16(tmp, x);
  return load16(tmp);
}

// Calls body(index, load, store) for groups of 16 elements and for the rest.
template <class Body>
inline void for_lanes(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

template <class E>
inline vf load_some(const E* p, int count) {
  return count == kLanes ? load16(p) : load_tail(p, count);
}
template <class E>
inline void store_some(E* p, vf x, int count) {
  if (count == kLanes)
    store16(p, x);
  else
    store_tail(p, x, count);
}

template <class E, class W>
void rms_norm_rows(const RmsNormArgs& a) {
  const int threads = a.rows * a.width < kParallelElements ? 1 : static_cast<int>(std::min<int64_t>(a.threads, a.rows));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<float> scratch;
    scratch.resize(a.width + kLanes);
    float* sum = scratch.data();
    const W* weight = static_cast<const W*>(a.weight);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.rows; ++row) {
      const E* x = static_cast<const E*>(a.x) + row * a.x_stride;
      E* out = static_cast<E*>(a.out) + row * a.out_stride;
      E* residual = a.residual ? static_cast<E*>(a.residual) + row * a.residual_stride : nullptr;
      vf squares = vset1(0.0f);
      for_lanes(a.width, [&](int64_t i, int n) {
        vf v = load_some(x + i, n);
        if (residual) {
          v = vadd(v, load_some(residual + i, n));
          store_some(residual + i, v, n);
        }
        vstore(sum + i, v);
        squares = vfma(v, v, squares);
      });
      const vf factor = vset1(1.0f / std::sqrt(vsum(squares) / static_cast<float>(a.width) + a.epsilon));
      for_lanes(a.width, [&](int64_t i, int n) {
        vf v = vmul(vload(sum + i), factor);
        if (a.round_before_weight) v = rounded<E>(v);
        store_some(out + i, vmul(v, load_some(weight + i, n)), n);
      });
    }
  }
}

template <class E>
void silu_and_mul_rows(const SiluArgs& a) {
  const int threads = a.rows * a.width < kParallelElements ? 1 : static_cast<int>(std::min<int64_t>(a.threads, a.rows));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a.rows; ++row) {
    const E* gate = static_cast<const E*>(a.x) + row * a.x_stride;
    const E* up = gate + a.width;
    E* out = static_cast<E*>(a.out) + row * a.width;
    for_lanes(a.width, [&](int64_t i, int n) {
      const vf g = load_some(gate + i, n);
      const vf one = vset1(1.0f);
      // x / (1 + 2^(-x log2 e)); the exponent is limited so that the sum stays finite.
      const vf exponent = vsub(vset1(0.0f), vmax(vmul(g, vset1(kLog2E)), vset1(-126.0f)));
      const vf silu = vdiv(g, vadd(one, vexp2(exponent)));
      store_some(out + i, vmul(silu, load_some(up + i, n)), n);
    });
  }
}

template <class E, class C>
inline void rotate_head(E* head, const C* cos, const C* sin, int half, bool neox) {
  if (neox) {
    for_lanes(half, [&](int64_t i, int n) {
      const vf a = load_some(head + i, n), b = load_some(head + half + i, n);
      const vf c = load_some(cos + i, n), s = load_some(sin + i, n);
      const vf minus_b = vsub(vset1(0.0f), b);
      store_some(head + i, vfma(minus_b, s, vmul(a, c)), n);
      store_some(head + half + i, vfma(a, s, vmul(b, c)), n);
    });
    return;
  }
  for_lanes(half, [&](int64_t i, int n) {
    float even[kLanes], odd[kLanes], c[kLanes], s[kLanes], pair[2 * kLanes];
    vstore(pair, load_some(head + 2 * i, std::min(2 * n, kLanes)));
    vstore(pair + kLanes, load_some(head + 2 * i + kLanes, std::max(2 * n - kLanes, 0)));
    vstore(c, load_some(cos + i, n));
    vstore(s, load_some(sin + i, n));
    for (int k = 0; k < n; ++k) {
      even[k] = pair[2 * k] * c[k] - pair[2 * k + 1] * s[k];
      odd[k] = pair[2 * k + 1] * c[k] + pair[2 * k] * s[k];
    }
    for (int k = 0; k < n; ++k) {
      pair[2 * k] = even[k];
      pair[2 * k + 1] = odd[k];
    }
    store_some(head + 2 * i, vload(pair), std::min(2 * n, kLanes));
    if (2 * n > kLanes) store_some(head + 2 * i + kLanes, vload(pair + kLanes), 2 * n - kLanes);
  });
}

template <class E, class C>
void rotate_rows(const RopeArgs& a) {
  const int heads = a.query_heads + a.key_heads, half = a.rotary_dim / 2;
  const int threads =
      a.rows * heads * a.rotary_dim < kParallelElements ? 1 : static_cast<int>(std::min<int64_t>(a.threads, a.rows));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a.rows; ++row) {
    const C* cos = static_cast<const C*>(a.cos_sin) + a.positions[row] * a.rotary_dim;
    E* query = static_cast<E*>(a.query) + row * a.query_stride;
    E* key = static_cast<E*>(a.key) + row * a.key_stride;
    for (int head = 0; head < heads; ++head) {
      E* at = head < a.query_heads ? query + head * a.head_dim : key + (head - a.query_heads) * a.head_dim;
      rotate_head(at, cos, cos + half, half, a.neox);
    }
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& a) {
  auto with_weight = [&](auto element) {
    using E = decltype(element);
    if (a.weight_dtype == kFp32) return rms_norm_rows<E, float>(a);
    if (a.weight_dtype == kFp16) return rms_norm_rows<E, Half>(a);
    rms_norm_rows<E, Brain>(a);
  };
  if (a.dtype == kFp32) return with_weight(float{});
  if (a.dtype == kFp16) return with_weight(Half{});
  with_weight(Brain{});
}

void silu_and_mul(const SiluArgs& a) {
  if (a.dtype == kFp32) return silu_and_mul_rows<float>(a);
  if (a.dtype == kFp16) return silu_and_mul_rows<Half>(a);
  silu_and_mul_rows<Brain>(a);
}

void rotate(const RopeArgs& a) {
  auto with_cache = [&](auto element) {
    using E = decltype(element);
    if (a.cache_dtype == kFp32) return rotate_rows<E, float>(a);
    if (a.cache_dtype == kFp16) return rotate_rows<E, Half>(a);
    rotate_rows<E, Brain>(a);
  };
  if (a.dtype == kFp32) return with_cache(float{});
  if (a.dtype == kFp16) return with_cache(Half{});
  with_cache(Brain{});
}

}  // namespace csa2
