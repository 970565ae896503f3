"""FlashInfer's own objects: one for each dense format, planned once a step, run once a layer.

Results are partial: outputs of the formats with base-2 log-sum-exps, which the n-way merge of the Triton kernels joins with
the rest (`TritonAttention.attend(others=...)`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_kernels.errors import PlanError
from sgl_kernels.flashinfer.plan import DenseFormat, FlashInferPlan, SubPlan
from sgl_kernels.flashinfer.variant import PREFILL_OPTIONS, jit_arguments
from sgl_kernels.flashinfer.views import KV_LAYOUT, layer_view
from sgl_kernels.triton.attention import Partials

WORKSPACE_BYTES = 128 << 20
"""Of partial results of FlashInfer's own splits, as it recommends. Shared: formats run one after another."""
TENSOR_CORE_GROUP = 4
"""Query heads of a KV head from which on 16-bit rows are read with tensor cores."""

PREFILL_BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
DECODE_BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")


@dataclass(frozen=True)
class GraphLimits:
    """What a CUDA graph fixes: buffers of this size stay where they are, and so does the batch."""

    batch: int
    pages: int
    """Of one format, of all requests together."""


@dataclass(frozen=True)
class FixedScales:
    """What stored numbers of E4M3 rows are multiplied by, of each layer."""

    keys: Sequence[float]
    values: Sequence[float]


def flashinfer_classes() -> tuple[Any, Any]:
    """FlashInfer's wrappers for decode and prefill over pages."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    return BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper


def uses_tensor_cores(dtype: torch.dtype, group: int) -> bool:
    """Whether decode over rows of a dtype goes through tensor cores.

    Opening E4M3 on CUDA cores takes longer than reading it.
    """
    return dtype.itemsize == 1 or group >= TENSOR_CORE_GROUP


class DenseAttention:
    """Attention of one token of each request (decode), or of its new tokens (extend), over its dense pages."""

    def __init__(
        self,
        formats: Sequence[DenseFormat],
        num_query_heads: int,
        query_dtype: torch.dtype,
        scale: float,
        workspace: Tensor,
        *,
        extends: bool = False,
        extend_backend: str = "fa2",
        graph: GraphLimits | None = None,
        scales: Mapping[int, FixedScales] | None = None,
    ) -> None:
        """Make the wrappers; the variant for biases is compiled if some format needs it and nobody has.

        Args:
            formats: of the plans to come, in the same order.
            query_dtype: of queries and results, bfloat16 or float16.
            scale: softmax scale.
            workspace: (WORKSPACE_BYTES,) uint8 zeros on the device; several of these may share it on one stream.
            extends: new tokens of a request instead of one; what they read is all before them, so there is no mask.
            extend_backend: of FlashInfer, for formats without biases; "auto" is FA3 on Hopper for 16-bit rows.
            graph: what is fixed by a graph; without it nothing is.
            scales: of E4M3 formats by their place in the ladder; 1 where it says nothing.
        """
        self._formats = tuple(formats)
        self._heads, self._dtype, self._scale = num_query_heads, query_dtype, scale
        self._extends, self._extend_backend, self._graph = extends, extend_backend, graph
        self._scales = dict(scales or {})
        self._workspace = workspace
        self._wrappers = [self._make(one) for one in self._formats]
        self._active: list[tuple[DenseFormat, Any]] = []

    def plan(self, plan: FlashInferPlan, new_tokens: Sequence[int] | None = None) -> None:
        """Before the layers of a step, outside a graph.

        Args:
            plan: of the formats that this was made for.
            new_tokens: of each request, for extend.

        Raises:
            PlanError: a plan of other formats, or beyond what a graph fixed; new tokens given or missing against `extends`.
        """
        self._check(plan, new_tokens)
        counts = torch.ones(plan.batch_size, dtype=torch.int64) if new_tokens is None else torch.tensor(new_tokens)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
        self._active = []
        for part, wrapper in zip(plan.parts, self._wrappers, strict=True):
            # A graph replays what it captured: a format without pages gives results without mass.
            if part.num_pages or self._graph:
                self._plan_one(part, wrapper, starts)
                self._active.append((part.format, wrapper))

    def run(self, query: Tensor, arena: Tensor, layer: int, biases: Mapping[int, Tensor] | None = None) -> Partials:
        """Attention of one layer.

        Args:
            query: (T, H, D) of `query_dtype`, rotated; the new tokens of the requests one after another.
            arena: (bytes,) uint8.
            biases: slabs of the formats with biases (`views.bias_slab`), by their place in the ladder.

        Returns:
            A partial result for each format that was planned, in base 2.
        """
        shape = (len(self._active), *query.shape)
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=query.device)
        for place, (one, wrapper) in enumerate(self._active):
            fixed = self._scales.get(one.index)
            key_scale = fixed.keys[layer] if fixed else 1.0
            extra: tuple[Any, ...] = ()
            options = {"v_scale": fixed.values[layer]} if fixed else {}
            if one.is_biased:
                slab = (biases or {})[one.index]
                extra = (slab[:, layer], self._scale * key_scale, slab.stride(0), slab.stride(2))
            elif fixed:
                options["k_scale"] = key_scale
            wrapper.run(
                query, layer_view(arena, one, layer), *extra, out=out[place], lse=lse[place], return_lse=True, **options
            )
        return Partials(out, lse)

    def _make(self, one: DenseFormat) -> Any:
        """FlashInfer's wrapper for one format."""
        decode, prefill = flashinfer_classes()
        g = one.layout.geometry
        cores = self._extends or uses_tensor_cores(g.dtype, self._heads // g.num_kv_heads)
        buffers = self._graph_buffers()
        jit = jit_arguments(self._dtype, g.dtype, g.head_dim, tensor_cores=cores) if one.is_biased else None
        if self._prefills(one):
            # FA3 does not tell a variant which request it is in.
            return prefill(
                self._workspace, KV_LAYOUT, use_cuda_graph=self._graph is not None,
                backend="fa2" if jit else self._extend_backend,
                jit_args=jit, jit_kwargs=PREFILL_OPTIONS if jit else None,
                **dict(zip(PREFILL_BUFFERS, buffers, strict=False)),
            )  # fmt: skip
        return decode(
            self._workspace, KV_LAYOUT, use_cuda_graph=self._graph is not None, use_tensor_cores=cores, backend="fa2",
            jit_args=jit, **dict(zip(DECODE_BUFFERS, buffers[1:], strict=False)),
        )  # fmt: skip

    def _prefills(self, one: DenseFormat) -> bool:
        """Whether the prefill wrapper reads a format. In decode it does with a variant on tensor cores: only it takes the
        options that keep FlashInfer from compiling the kernels twice."""
        g = one.layout.geometry
        return self._extends or (one.is_biased and uses_tensor_cores(g.dtype, self._heads // g.num_kv_heads))

    def _graph_buffers(self) -> list[Tensor]:
        if self._graph is None:
            return []
        batch, device = self._graph.batch, self._workspace.device
        sizes = (batch + 1, batch + 1, self._graph.pages, batch)
        return [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]

    def _plan_one(self, part: SubPlan, wrapper: Any, starts: Tensor) -> None:
        one = part.format
        g = one.layout.geometry
        pages = (part.indptr, part.indices, part.last_page_len, self._heads, g.num_kv_heads, g.head_dim, one.entries)
        types = {"q_data_type": self._dtype, "kv_data_type": g.dtype, "sm_scale": self._scale}
        if self._prefills(one):
            wrapper.plan(starts, *pages, causal=False, **types)
        else:
            wrapper.plan(*pages, **types)

    def _check(self, plan: FlashInferPlan, new_tokens: Sequence[int] | None) -> None:
        names, planned = ([one.layout.name for one in x] for x in (self._formats, [part.format for part in plan.parts]))
        if names != planned:
            raise PlanError(f"a plan of the formats {planned} for attention over {names}: make both from the same list")
        if (new_tokens is not None) != self._extends:
            raise PlanError("new tokens are for extend, which needs them: make another `DenseAttention` for the other stage")
        if self._graph is None:
            return
        if plan.batch_size != self._graph.batch:
            raise PlanError(
                f"{plan.batch_size} requests in a graph of {self._graph.batch}: pad with requests without tokens"
            )
        most = max((part.num_pages for part in plan.parts), default=0)
        if most > self._graph.pages:
            raise PlanError(
                f"{most} pages of one format in a graph with room for {self._graph.pages}: raise `GraphLimits.pages`"
            )


def joined_partials(parts: Sequence[Partials]) -> Partials:
    """Partial results of several sources as one, in fp32: those of new tokens among themselves, and of dense pages.

    Raises:
        PlanError: parts whose log-sum-exps have different bases.
    """
    if len({part.base2 for part in parts}) != 1:
        raise PlanError("partial results with log-sum-exps of base 2 and natural ones: convert one kind before joining")
    out = torch.cat([part.out.float() for part in parts])
    return Partials(out, torch.cat([part.lse for part in parts]), parts[0].base2)
