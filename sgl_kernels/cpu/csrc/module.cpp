// The functions that Python sees.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "kernels.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace csa2 {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

Dtype dtype_of(const TensorView& tensor) {
  const DLDataType type = tensor.dtype();
  if (type.code == kDLBfloat && type.bits == 16) return kBf16;
  if (type.code == kDLFloat && type.bits == 16) return kFp16;
  if (type.code == kDLFloat && type.bits == 32) return kFp32;
  TVM_FFI_THROW(TypeError) << "dtype must be bfloat16, float16 or float32";
}

void check_heads(const TensorView& tensor, const char* name) {
  if (tensor.ndim() != 3 || tensor.stride(2) != 1 || tensor.stride(1) != tensor.size(2))
    TVM_FFI_THROW(ValueError) << name << " must be (tokens, heads, D) with contiguous heads";
}

void extend(TensorView out, TensorView query, TensorView keys, TensorView values, TensorView arena, TensorView requests,
            TensorView pages, TensorView pieces, TensorView basis_lines, TensorView reduced_lines, Optional<TensorView> lse, double scale,
            int64_t threads) {
  check_heads(query, "query");
  check_heads(keys, "keys");
  check_heads(values, "values");
  AttentionArgs args{};
  args.query = query.data_ptr();
  args.keys = keys.data_ptr();
  args.values = values.data_ptr();
  args.out = out.data_ptr();
  args.lse = lse.has_value() ? static_cast<float*>(lse.value().data_ptr()) : nullptr;
  args.query_stride = query.stride(0);
  args.key_stride = keys.stride(0);
  args.value_stride = values.stride(0);
  args.dtype = dtype_of(query);
  args.heads = static_cast<int>(query.size(1));
  args.kv_heads = static_cast<int>(keys.size(1));
  args.head_dim = static_cast<int>(query.size(2));
  args.arena = static_cast<const uint8_t*>(arena.data_ptr());
  args.requests = static_cast<const RequestRef*>(requests.data_ptr());
  args.num_requests = requests.size(0);
  args.pages = static_cast<const PageRef*>(pages.data_ptr());
  args.pieces = static_cast<const HeadPiece*>(pieces.data_ptr());
  args.basis_lines = static_cast<const float*>(basis_lines.data_ptr());
  args.reduced_lines = static_cast<const float*>(reduced_lines.data_ptr());
  args.scale = static_cast<float>(scale);
  args.threads = static_cast<int>(threads);
  extend_attention(args);
}

void check_rows(const TensorView& tensor, const char* name) {
  if (tensor.ndim() != 2 || tensor.stride(1) != 1) TVM_FFI_THROW(ValueError) << name << " must be (rows, columns) with contiguous rows";
}

void rms_norm_op(TensorView out, TensorView x, Optional<TensorView> residual, TensorView weight, double epsilon,
                 bool round_before_weight, int64_t threads) {
  check_rows(out, "out");
  check_rows(x, "x");
  RmsNormArgs args{};
  args.x = x.data_ptr();
  args.out = out.data_ptr();
  args.weight = weight.data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1);
  args.x_stride = x.stride(0);
  args.out_stride = out.stride(0);
  if (residual.has_value()) {
    check_rows(residual.value(), "residual");
    args.residual = residual.value().data_ptr();
    args.residual_stride = residual.value().stride(0);
  }
  args.dtype = dtype_of(x);
  args.weight_dtype = dtype_of(weight);
  args.epsilon = static_cast<float>(epsilon);
  args.round_before_weight = round_before_weight;
  args.threads = static_cast<int>(threads);
  rms_norm(args);
}

void silu_and_mul_op(TensorView out, TensorView x, int64_t threads) {
  check_rows(out, "out");
  check_rows(x, "x");
  silu_and_mul({x.data_ptr(), out.data_ptr(), x.size(0), out.size(1), x.stride(0), dtype_of(x), static_cast<int>(threads)});
}

void rotate_op(TensorView query, TensorView key, TensorView cos_sin, TensorView positions, int64_t head_dim, bool neox,
               int64_t threads) {
  check_rows(query, "query");
  check_rows(key, "key");
  RopeArgs args{};
  args.query = query.data_ptr();
  args.key = key.data_ptr();
  args.cos_sin = cos_sin.data_ptr();
  args.positions = static_cast<const int64_t*>(positions.data_ptr());
  args.rows = query.size(0);
  args.query_stride = query.stride(0);
  args.key_stride = key.stride(0);
  args.head_dim = static_cast<int>(head_dim);
  args.query_heads = static_cast<int>(query.size(1) / head_dim);
  args.key_heads = static_cast<int>(key.size(1) / head_dim);
  args.rotary_dim = static_cast<int>(cos_sin.size(1));
  args.neox = neox;
  args.dtype = dtype_of(query);
  args.cache_dtype = dtype_of(cos_sin);
  args.threads = static_cast<int>(threads);
  rotate(args);
}

// Keys and values of new tokens into plain pages: row `rows[t]` + `first_row` + head * page size, values `value_rows` later.
void write_rows(TensorView arena, TensorView rows, TensorView keys, TensorView values, int64_t first_row, int64_t page_size,
                int64_t value_rows) {
  check_heads(keys, "keys");
  check_heads(values, "values");
  const int64_t bytes = dtype_bytes(dtype_of(keys)), heads = keys.size(1), row_bytes = keys.size(2) * bytes;
  const auto* at = static_cast<const int64_t*>(rows.data_ptr());
  char* out = static_cast<char*>(arena.data_ptr());
  for (int64_t t = 0; t < keys.size(0); ++t) {
    const char* key = static_cast<const char*>(keys.data_ptr()) + t * keys.stride(0) * bytes;
    const char* value = static_cast<const char*>(values.data_ptr()) + t * values.stride(0) * bytes;
    for (int64_t h = 0; h < heads; ++h) {
      char* row = out + (at[t] + first_row + h * page_size) * row_bytes;
      std::memcpy(row, key + h * row_bytes, row_bytes);
      std::memcpy(row + value_rows * row_bytes, value + h * row_bytes, row_bytes);
    }
  }
}

// Re-encode pages: see `SealArgs`. `moves` (n, 5), `pieces` (formats, heads, fields), `dtype` of plain pages.
void seal_op(TensorView out, TensorView arena, TensorView moves, TensorView pieces, int64_t dtype, TensorView flat,
             bool hadamard, TensorView reduced, TensorView reduced_t, Optional<TensorView> queries, double weight_floor, double equal_sizes,
             double rounding, TensorView scorer_weights, TensorView scorer_offsets, TensorView scorer_outer, double share_floor,
             double size_floor, double limit, int64_t threads) {
  SealArgs args{};
  args.out = static_cast<uint8_t*>(out.data_ptr());
  args.arena = static_cast<const uint8_t*>(arena.data_ptr());
  args.moves = static_cast<const PageMove*>(moves.data_ptr());
  args.num_moves = moves.size(0);
  args.pieces = static_cast<const HeadPiece*>(pieces.data_ptr());
  args.heads = static_cast<int>(pieces.size(1));
  args.head_dim = static_cast<int>(flat.size(0));
  args.dtype = static_cast<Dtype>(dtype);
  args.flat = static_cast<const float*>(flat.data_ptr());
  args.hadamard = hadamard;
  args.reduced = static_cast<const float*>(reduced.data_ptr());
  args.reduced_t = static_cast<const float*>(reduced_t.data_ptr());
  args.reduced_channels = reduced.size(2);
  if (queries.has_value()) {
    args.queries = queries.value().data_ptr();
    args.num_queries = queries.value().size(2);
    args.query_dtype = dtype_of(queries.value());
  }
  args.rule = {static_cast<float>(weight_floor), static_cast<float>(equal_sizes), static_cast<float>(rounding)};
  args.scorer = {static_cast<const float*>(scorer_weights.data_ptr()),
                 static_cast<const float*>(scorer_offsets.data_ptr()),
                 static_cast<const float*>(scorer_outer.data_ptr()),
                 scorer_weights.size(1),
                 static_cast<float>(share_floor),
                 static_cast<float>(size_floor),
                 static_cast<float>(limit)};
  args.threads = static_cast<int>(threads);
  seal(args);
}

// Best effort: a system without huge pages, or that refuses, is as good as one that grants none.
void advise_huge_pages(TensorView buffer) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(buffer.data_ptr()) + kHuge - 1) / kHuge * kHuge;
  const auto end = (reinterpret_cast<uintptr_t>(buffer.data_ptr()) + buffer.numel()) / kHuge * kHuge;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Asks the kernel for what this build needs; false if it is refused.
bool enable() {
#if defined(__AMX_BF16__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return true;
#endif
}

}  // namespace
}  // namespace csa2

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend, csa2::extend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, csa2::rms_norm_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, csa2::silu_and_mul_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotate, csa2::rotate_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_rows, csa2::write_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(advise_huge_pages, csa2::advise_huge_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(seal, csa2::seal_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(enable, csa2::enable);
