"""Where in the model a format costs most: the error of every layer's attention output, its inputs being exact.

Offline, beside the engines: one forward pass over one document, whose keys and values are sealed and opened with the
codec that serves. Errors do not add up from layer to layer here, so this says which layers are hard, not what they cost in
the end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from csa2.check.formats import PLAIN_FORMAT, cache_options
from csa2.check.prompts import STEP_TOKENS
from csa2.codec.channels import make_rotation
from csa2.codec.codec import make_codec
from csa2.codec.queries import QuerySamples
from csa2.formats import MERGE, make_ladder
from csa2.options import PAGE_SIZE
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageGeometry

PROBE = "csa2_layer_probe"
"""Name of our attention among those of transformers."""
ROTARY_PAIRS_ARE_HALVES = True
"""Assumed: channel j rotates with j + half of the rotary channels. Interleaved models are off here in reduced formats."""

Look = Callable[[int, Tensor, Tensor, Tensor, Tensor, float], None]
"""Called per layer with query (H, T, D), keys and values (G, T, D), output (H, T, D) and the scale of the logits."""


def layer_errors(
    model: Path, tokens: Sequence[int], context: int, formats: Sequence[str], identity_layers: Sequence[int]
) -> dict[str, list[float]]:
    """Relative error of the attention output per layer, by format; uncompressed ones are left out.

    Args:
        tokens: of one document; those of the step after `context` are the queries.
        identity_layers: as the engine reports them.
    """
    errors: dict[str, list[float]] = {name: [] for name in formats if name != PLAIN_FORMAT}
    flagged = set(identity_layers)

    def look(layer: int, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, scale: float) -> None:
        exact = output[:, context:].float()
        samples = QuerySamples(1, keys.shape[0])
        samples.record_extend(0, 0, query[:, :context].transpose(0, 1), scale)
        for name, found in errors.items():
            packed = _compressed(name, keys, values, samples, context, is_flagged=layer in flagged)
            attended = _attend(query[:, context:].float(), packed, scale)
            found.append(float((attended - exact).norm() / exact.norm()))

    if errors:
        _forward(model, tokens[: context + STEP_TOKENS], look)
    return errors


def _forward(model: Path, tokens: Sequence[int], look: Look) -> None:
    from transformers import AttentionInterface, AutoModelForCausalLM

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        # One sequence without padding: causal is all there is to mask.
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        look(module.layer_idx, query[0], key[0], value[0], out[0], scale)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(PROBE, attention)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation=PROBE, local_files_only=True)
    with torch.inference_mode():
        loaded.base_model(input_ids=torch.tensor([list(tokens)]), use_cache=False)


def _compressed(
    name: str, keys: Tensor, values: Tensor, samples: QuerySamples, context: int, *, is_flagged: bool
) -> Entries:
    """Keys and values (1, G, E, D) fp32 as the step after `context` reads them, its own tokens last."""
    options = cache_options(name)
    g, _, d = keys.shape
    geometry = PageGeometry(1, g, d, PAGE_SIZE, torch.bfloat16, (0,) if is_flagged else ())
    merged = MERGE.get(options.old_page_format or "", 1) > 1
    codec, classes = make_codec(geometry, make_rotation(d, neox=ROTARY_PAIRS_ARE_HALVES), merged=merged)
    ladder = make_ladder(geometry, options.kv_format, options.old_page_format, None, classes)
    pages = context // PAGE_SIZE
    protected = min(pages, -(-options.protect_tokens // PAGE_SIZE))
    warm = max(protected, (context - options.warm_tokens) // PAGE_SIZE)
    hot = max(warm, (context - options.hot_tokens) // PAGE_SIZE)

    def sealed(index: int, first: int, last: int) -> Entries:
        layout = ladder.layouts[index]
        if layout.is_plain or first == last:
            return _plain(keys, values, first * PAGE_SIZE, last * PAGE_SIZE)
        pages = Entries(_paged(keys, first, last), _paged(values, first, last), None)
        queries = samples.of(torch.zeros(last - first, dtype=torch.int64))
        return _flat(codec.open(codec.seal(pages, layout, queries), layout))

    parts = [
        _plain(keys, values, 0, protected * PAGE_SIZE),
        sealed(ladder.tail, protected, warm),
        sealed(min(ladder.warm, ladder.tail), warm, hot),
        _plain(keys, values, hot * PAGE_SIZE, keys.shape[1]),
    ]
    return Entries(
        torch.cat([part.keys for part in parts], 2),
        torch.cat([part.values for part in parts], 2),
        torch.cat([part.keys.new_zeros(part.keys.shape[:3]) if part.bias is None else part.bias for part in parts], 2),
    )


def _plain(keys: Tensor, values: Tensor, start: int, stop: int) -> Entries:
    return Entries(keys[None, :, start:stop].float(), values[None, :, start:stop].float(), None)


def _paged(x: Tensor, first: int, last: int) -> Tensor:
    """Pages `first` to `last` of (G, T, D) as (N, G, S, D) fp32."""
    cut = x[:, first * PAGE_SIZE : last * PAGE_SIZE].float()
    return cut.reshape(x.shape[0], last - first, PAGE_SIZE, x.shape[2]).transpose(0, 1).contiguous()


def _flat(pages: Entries) -> Entries:
    """Pages (N, G, E, D) side by side as one sequence (1, G, N x E, D)."""

    def flat(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2)[None]

    return Entries(flat(pages.keys), flat(pages.values), None if pages.bias is None else flat(pages.bias))


def _attend(query: Tensor, entries: Entries, scale: float) -> Tensor:
    """Attention (H, T, D) of `query` to entries of which the last T are its own tokens, seen causally."""
    heads, t, d = query.shape
    g = entries.keys.shape[1]
    grouped = query.reshape(g, heads // g, t, d)
    logits = scale * grouped @ entries.keys[0].unsqueeze(1).transpose(-1, -2)
    if entries.bias is not None:
        logits = logits + entries.bias[0][:, None, None, :]
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    logits[..., -t:] = logits[..., -t:].masked_fill(hidden, float("-inf"))
    output: Tensor = logits.softmax(-1) @ entries.values[0].unsqueeze(1)
    return output.flatten(0, 1)
