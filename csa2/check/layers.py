"""Where in the model a format costs most: the error of every layer's attention output, its inputs being exact.

Offline, beside the engines: one forward pass over one document, whose keys and values are sealed and opened with the
codec that serves. Errors do not add up from layer to layer here, so this says which layers are hard, not what they cost in
the end.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from csa2.calibrate.artefact import load
from csa2.calibrate.capture import CapturedLayer, CapturedModel
from csa2.calibrate.offline import attend, joined, pages, rows, stored
from csa2.check.formats import PLAIN_FORMAT, cache_options
from csa2.check.prompts import STEP_TOKENS
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.codec import PageCodec
from csa2.formats import FormatLadder
from csa2.options import PAGE_SIZE, CacheOptions
from sgl_kernels.page_codec.reference import CodecBases, Entries
from sgl_kernels.page_layout import PageGeometry, PageLayout


def layer_errors(
    model: Path,
    tokens: Sequence[int],
    context: int,
    formats: Sequence[str],
    identity_layers: Sequence[int],
    calibration: Path | None = None,
) -> dict[str, list[float]]:
    """Relative error of the attention output per layer, by row; uncompressed ones are left out.

    Args:
        formats: names of rows, see `check.formats`.
        tokens: of one document; those of the step after `context` are the queries.
        identity_layers: as the engine reports them.
        calibration: folder that the engines were started with.
    """
    names = [name for name in formats if name != PLAIN_FORMAT]
    if not names:
        return {}
    captured = CapturedModel(model)
    layers = captured.capture(tokens[: context + STEP_TOKENS], context)
    g, _, d = layers[0].keys.shape
    geometry = PageGeometry(len(layers), g, d, PAGE_SIZE, torch.bfloat16, tuple(identity_layers))
    known = None if calibration is None else load(calibration).of(range(len(layers)), range(g))
    exact = [attend(layer.asked, rows(layer.keys, layer.values, 0, layer.keys.shape[1])) for layer in layers]
    errors: dict[str, list[float]] = {}
    for name in names:
        options = cache_options(name)
        rope = captured.rope(d) if options.rope == "separated" else None
        codec, ladder = codec_and_ladder(options, geometry, captured.rotation(d), known, rope)
        found = []
        for index, layer in enumerate(layers):
            part, layouts = layer_of(codec, ladder, index)
            output = attend(layer.asked, _compressed(layer, context, options, ladder, layouts, part))
            found.append(float((output - exact[index]).norm() / exact[index].norm()))
        errors[name] = found
    return errors


def layer_of(codec: PageCodec, ladder: FormatLadder, layer: int) -> tuple[PageCodec, tuple[PageLayout, ...]]:
    """Codec and layouts of one layer alone."""
    whole = ladder.geometry
    heads = slice(layer * whole.num_kv_heads, (layer + 1) * whole.num_kv_heads)
    marked = (0,) if layer in whole.identity_layers else ()
    geometry = PageGeometry(1, whole.num_kv_heads, whole.head_dim, whole.page_size, whole.dtype, marked)
    reduced = codec.bases.reduced
    bases = CodecBases(codec.bases.flat, None if reduced is None else reduced[heads], codec.bases.rope)
    scorer = None if codec.scorer is None else codec.scorer.map(lambda tensor: tensor[heads])
    layouts = tuple(replace(layout, geometry=geometry, heads=layout.heads[heads]) for layout in ladder.layouts)
    return PageCodec(bases, scorer), layouts


def _compressed(
    layer: CapturedLayer,
    context: int,
    options: CacheOptions,
    ladder: FormatLadder,
    layouts: tuple[PageLayout, ...],
    codec: PageCodec,
) -> Entries:
    """The layer's (1, G, E, D) fp32 entries as the step after `context` reads them, its own tokens last."""
    keys, values = layer.keys, layer.values
    last = context // PAGE_SIZE
    protected = min(last, -(-options.protect_tokens // PAGE_SIZE))
    warm = max(protected, (context - options.warm_tokens) // PAGE_SIZE)
    hot = max(warm, (context - options.hot_tokens) // PAGE_SIZE)

    def sealed(index: int, first: int, last: int) -> Entries:
        if layouts[index].is_plain or first == last:
            return rows(keys, values, first * PAGE_SIZE, last * PAGE_SIZE)
        return stored(codec, layouts[index], pages(keys, values, first, last, PAGE_SIZE), layer.sample)

    return joined(
        (
            rows(keys, values, 0, protected * PAGE_SIZE),
            sealed(ladder.tail, protected, warm),
            sealed(min(ladder.warm, ladder.tail), warm, hot),
            rows(keys, values, hot * PAGE_SIZE, keys.shape[1]),
        )
    )
