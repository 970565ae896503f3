"""Where in the model a format costs most: the error of every layer's attention output, its inputs being exact.

Offline, beside the engines: one forward pass over one document, whose keys and values are sealed and opened with the
codec that serves. Errors do not add up from layer to layer here, so this says which layers are hard, not what they cost in
the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csa2.calibrate.artefact import load
from csa2.calibrate.capture import CapturedModel
from csa2.check.formats import PLAIN_FORMAT, cache_options
from csa2.check.prompts import STEP_TOKENS
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import Rotation
from csa2.codec.queries import QuerySamples
from csa2.options import PAGE_SIZE
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageGeometry


def layer_errors(
    model: Path,
    tokens: Sequence[int],
    context: int,
    formats: Sequence[str],
    identity_layers: Sequence[int],
    calibration: Path | None = None,
) -> dict[str, list[float]]:
    """Relative error of the attention output per layer, by format; uncompressed ones are left out.

    Args:
        tokens: of one document; those of the step after `context` are the queries.
        identity_layers: as the engine reports them.
        calibration: folder that the engines were started with.
    """
    errors: dict[str, list[float]] = {name: [] for name in formats if name != PLAIN_FORMAT}
    if not errors:
        return errors
    captured = CapturedModel(model)
    known = None if calibration is None else load(calibration)
    flagged = set(identity_layers)

    def visit(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        g, t, d = keys.shape
        exact = _attend(query[:, context:], _plain(keys, values, 0, t))
        samples = QuerySamples(1, g)
        samples.record_extend(0, 0, query[:, :context].transpose(0, 1), 1.0)
        orders = None if known is None else known.orders(range(layer, layer + 1), range(g))
        codec_of_layer = LayerCodec(captured.rotation(d), orders, layer in flagged)
        for name, found in errors.items():
            packed = _compressed(name, keys, values, samples, context, codec_of_layer)
            found.append(float((_attend(query[:, context:], packed) - exact).norm() / exact.norm()))

    captured.run(list(tokens[: context + STEP_TOKENS]), visit)
    return errors


@dataclass(frozen=True)
class LayerCodec:
    """What the codec of one layer depends on."""

    rotation: Rotation
    orders: list[list[int]] | None
    is_flagged: bool


def _compressed(
    name: str, keys: Tensor, values: Tensor, samples: QuerySamples, context: int, of_layer: LayerCodec
) -> Entries:
    """Keys and values (1, G, E, D) fp32 as the step after `context` reads them, its own tokens last."""
    options = cache_options(name)
    g, _, d = keys.shape
    geometry = PageGeometry(1, g, d, PAGE_SIZE, torch.bfloat16, (0,) if of_layer.is_flagged else ())
    codec, ladder = codec_and_ladder(options, geometry, of_layer.rotation, of_layer.orders)
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


def _attend(query: Tensor, entries: Entries) -> Tensor:
    """Attention (H, T, D) of scaled queries to entries of which the last T are their own tokens, seen causally."""
    heads, t, d = query.shape
    g = entries.keys.shape[1]
    logits = query.reshape(g, heads // g, t, d) @ entries.keys[0].unsqueeze(1).transpose(-1, -2)
    if entries.bias is not None:
        logits = logits + entries.bias[0][:, None, None, :]
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    logits[..., -t:] = logits[..., -t:].masked_fill(hidden, float("-inf"))
    output: Tensor = logits.softmax(-1) @ entries.values[0].unsqueeze(1)
    return output.flatten(0, 1)
