"""Attention over entries with a bias, as a variant that FlashInfer compiles.

A merged entry stands for several tokens: its bias, the logarithm of their number or what a codec made of it, joins its
logit. Biases lie in a slab beside the arena (`views.bias_slab`), found by page id, so a plan serves all layers.

FlashInfer names built modules by their URI alone, so ours holds a digest of the source.
"""

import hashlib
from typing import Any

import torch

from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.page_codec.reference import BIAS_STEP

NAME = "EntryBias"
TENSORS = {"entry_bias": "uint8_t"}
SCALARS = {"softmax_scale": "double", "bias_page_stride": "int64_t", "bias_head_stride": "int64_t"}
QUERY_DTYPES = (torch.bfloat16, torch.float16)
KV_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}
PREFILL_OPTIONS = {"paged_kv_stride_mode": "equal"}
"""Of the module with tensor cores: keys and values have the same strides, so half as much is to be compiled."""

# Logits arrive unscaled; softmax multiplies what is returned by `sm_scale_log2`. Entries behind the end are masked by the
# caller, after this, so their page must not be looked up. FlashInfer compiles kernels for ragged keys along with those for
# pages; nothing calls them, and without pages there are no biases: NaN, so that nobody can mistake their results.
SOURCE = """
DEFINE_HAS_MEMBER(paged_kv)

struct EntryBias : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ EntryBias(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr)
      : qo_len(params.get_qo_len(batch_idx)), kv_len(params.get_kv_len(batch_idx)), window_left(kv_len),
        sm_scale_log2(math::log2e) {}

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    float bias = 0.f;
    if constexpr (has_paged_kv_v<Params>) {
      if (kv_idx < kv_len) {
        uint32_t page, entry;
        params.paged_kv.page_size.divmod(kv_idx, page, entry);
        const int64_t id = params.paged_kv.indices[params.paged_kv.indptr[batch_idx] + page];
        const int64_t place = id * params.bias_page_stride + kv_head_idx * params.bias_head_stride + entry;
        bias = float(params.entry_bias[place]) * BIAS_STEPf;
      }
    } else {
      bias = __int_as_float(0x7fffffff);
    }
    return float(logits) * float(params.softmax_scale) + bias;
  });
};
""".replace("BIAS_STEP", repr(BIAS_STEP))


def jit_arguments(query: torch.dtype, kv: torch.dtype, head_dim: int, *, tensor_cores: bool) -> list[Any]:
    """`jit_args` of FlashInfer's paged wrappers. Outputs have the dtype of the query, indices are int32.

    Args:
        query: bfloat16 or float16.
        kv: bfloat16, float16 or float8_e4m3fn.
        head_dim: of keys and values.
        tensor_cores: whether the module is that of the prefill wrapper.

    Raises:
        KernelLayoutError: a dtype that FlashInfer's kernels do not take.
    """
    if query not in QUERY_DTYPES or kv not in KV_DTYPES:
        raise KernelLayoutError(
            f"queries of {query} over keys of {kv}: FlashInfer takes queries of bfloat16 or float16, keys of these or "
            f"float8_e4m3fn; leave the format to the Triton kernels"
        )
    interface = repr((TENSORS, SCALARS, SOURCE))
    digest = hashlib.sha256(interface.encode()).hexdigest()[:12]
    kind = "prefill" if tensor_cores else "decode"
    uri = f"csa2_entry_bias_{kind}_q_{KV_DTYPES[query]}_kv_{KV_DTYPES[kv]}_d{head_dim}_{digest}"
    return [
        uri, query, kv, query, torch.int32, head_dim, head_dim,
        list(TENSORS), list(TENSORS.values()), list(SCALARS), list(SCALARS.values()), NAME, SOURCE,
    ]  # fmt: skip


def build_module(query: torch.dtype, kv: torch.dtype, head_dim: int, *, tensor_cores: bool) -> Any:
    """FlashInfer's description of the module, sources generated; its `build()` compiles. See `jit_arguments`."""
    from flashinfer.jit.attention import gen_customize_batch_decode_module, gen_customize_batch_prefill_module

    arguments = jit_arguments(query, kv, head_dim, tensor_cores=tensor_cores)
    if tensor_cores:
        return gen_customize_batch_prefill_module("fa2", *arguments, **PREFILL_OPTIONS)
    return gen_customize_batch_decode_module(*arguments)
