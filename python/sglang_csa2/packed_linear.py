"""Weights of linear layers in the order in which oneDNN's matrix products read them, on our CPU platform.

`torch.nn.functional.linear` leaves a bf16 weight as it lies and the product reorders it at each call, which for few tokens
takes as long as the product. Here it is reordered once and replaces the weight, so memory stays the same. The one exception
is an output head that shares its weight with the embedding, which needs the rows: it gets a second copy.

A packed weight is opaque: reading it as rows or writing into it raises. Before SGLang loads new weights it asks for the old
form back, and afterwards packs again. Layers that serve adapters (LoRA) are wrapped by SGLang after this, wrappers keep a
reference to the plain weight, and so nothing is packed for a server with adapters.

UPSTREAM(sglang 0.5.23): `SRTPlatform.post_load_model`; subclasses of `UnquantizedLinearMethod` and
`UnquantizedEmbeddingMethod` with `process_weights_after_loading` and `restore_weights_before_loading`;
`_weight_export_error`, which SGLang answers to requests for weights.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from csa2.options import PackWeights
from csa2.units import format_bytes

logger = logging.getLogger(__name__)

HEAD = "lm_head"
"""Name that SGLang's models give the output head."""
EXPORT_ERROR = (
    "csa2: the weights are packed for this CPU and cannot be read out. Start with --csa2-pack-weights none to read them"
)


class PackedLinearMethod(UnquantizedLinearMethod):
    """A linear layer whose weight is packed, or plain between `restore_weights_before_loading` and the end of a load."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the weight in place of the plain one."""
        _pack(layer, replace=True)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """Bring the plain weight back."""
        _restore(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` (..., in) -> (..., out)."""
        return _product(layer, x, bias)

    def apply_into(self, layer: nn.Module, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """`apply` into memory of the caller."""
        return output.copy_(_product(layer, x, bias))


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """An output head with a packed weight; where the embedding shares the weight, the plain one stays beside it."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the weight, in place of the plain one or beside it."""
        _pack(layer, replace=not self.shared)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """Bring the plain weight back, and drop the copy."""
        _restore(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` (..., hidden) -> (..., vocabulary)."""
        return _product(layer, x, bias)


def pack_model(model: nn.Module, which: PackWeights, *, has_adapters: bool) -> None:
    """Pack what `which` names of a model whose weights are loaded, unless it serves adapters or the CPU cannot."""
    if which == "none":
        return
    obstacle = _obstacle(has_adapters=has_adapters)
    if obstacle:
        logger.info("csa2: weights stay as they are (--csa2-pack-weights %s): %s", which, obstacle)
        return
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    replaced = 0
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if _takes_packed_weight(layer) and _owns_weight(layer, uses):
            replaced += layer.weight.nbytes
            layer.quant_method = PackedLinearMethod()
            layer.quant_method.process_weights_after_loading(layer)
    shared_heads = []
    for head in _heads(model):
        shared = not _owns_weight(head, uses) or type(head) is VocabParallelEmbedding
        if shared and which != "all":
            continue
        if shared:
            shared_heads.append(head)
        else:
            replaced += head.weight.nbytes
        head.quant_method = PackedHeadMethod(shared=shared)
        head.quant_method.process_weights_after_loading(head)
    # Kept because statistics are read often, and finding them again is a walk over all modules.
    model.csa2_shared_heads = shared_heads  # type: ignore[assignment]  # nn.Module knows no lists
    if replaced or shared_heads:
        model._weight_export_error = EXPORT_ERROR  # type: ignore[assignment]  # nn.Module knows no strings
        logger.info(
            "csa2: packed %s of weights in place and %s as a second copy (--csa2-pack-weights %s)",
            format_bytes(replaced),
            format_bytes(copied_bytes(model)),
            which,
        )


def copied_bytes(model: nn.Module) -> int:
    """Bytes of packed weights that lie beside their plain form."""
    heads: list[Any] = getattr(model, "csa2_shared_heads", [])
    return sum(torch.ops.mkldnn._nbytes(head.csa2_packed) for head in heads if head.csa2_packed is not None)


def _obstacle(*, has_adapters: bool) -> str | None:
    """Why no weight can be packed."""
    if has_adapters:
        return "layers that serve LoRA adapters keep plain ones"
    # UPSTREAM(torch 2.14: where it says no, the product is computed by other code, which takes no packed weight.)
    if not torch.backends.mkldnn.enabled or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bf16 products on this CPU"
    return None


def _takes_packed_weight(layer: nn.Module) -> bool:
    # Replicated layers are left out: they are small, and models read the weights of routers themselves.
    return (
        isinstance(layer, ColumnParallelLinear | RowParallelLinear) and type(layer.quant_method) is UnquantizedLinearMethod
    )


def _owns_weight(layer: nn.Module, uses: Counter[int]) -> bool:
    """Whether nobody else reads the memory of a bf16 weight, as far as modules and storages tell."""
    weight: Any = layer.weight
    return (
        _is_packable(layer) and uses[id(weight)] == 1 and weight.untyped_storage().nbytes() == weight.nbytes  # not a view
    )


def _is_packable(layer: Any) -> bool:
    weight = layer.weight
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.is_contiguous()
        and not getattr(layer, "use_intel_amx_backend", False)  # SGLang's own packing, whose shape does not show it
    )


def _heads(model: nn.Module) -> Iterator[Any]:
    """Heads whose logits SGLang computes as one product in bf16."""
    exact = any(
        isinstance(module, LogitsProcessor)
        and (module.use_fp32_lm_head or module.use_fp32_lm_head_output or module.rl_on_policy_target is not None)
        for module in model.modules()
    )
    for name, module in model.named_modules(remove_duplicate=False):
        if (
            not exact
            and name.rpartition(".")[2] == HEAD
            and isinstance(module, VocabParallelEmbedding)
            and type(module.quant_method) is UnquantizedEmbeddingMethod
            and getattr(module, "bias", None) is None
            and _is_packable(module)
        ):
            yield module


def _pack(layer: Any, *, replace: bool) -> None:
    plain = layer.weight
    if plain.is_mkldnn:
        return
    layer.csa2_packed = torch.ops.mkldnn._reorder_linear_weight(plain.data, None)
    if replace:
        opaque = nn.Parameter(layer.csa2_packed, requires_grad=False)
        opaque.csa2_plain = plain  # type: ignore[attr-defined]  # the object that knows how to load itself
        layer.weight = opaque
        plain.data = torch.empty(0, dtype=plain.dtype)


def _restore(layer: Any) -> None:
    packed, layer.csa2_packed = layer.csa2_packed, None
    if layer.weight.is_mkldnn:
        plain = layer.weight.csa2_plain
        plain.data = packed.to_dense()
        layer.weight = plain


def _product(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    packed = layer.csa2_packed
    if packed is None:
        return nn.functional.linear(x, layer.weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out
