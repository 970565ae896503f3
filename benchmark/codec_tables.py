"""The experiments behind docs/codec.md, one function a table: {row: {column: relative error}} for one document.

Each runs the stages of the codec itself wherever they exist; what no page format has (blocks of channels that share a scale,
keys averaged over a group, 3-bit integers) is put together from its parts here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from codec_scenes import Scene
from torch import Tensor

from csa2.calibrate.statistics import channel_order, channel_pairs
from csa2.check.formats import cache_options
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import BLOCK, Rotation, default_classes, reduced_bases
from csa2.codec.importance import attention_share, observed_attention
from csa2.codec.merging import merge_entries
from sgl_kernels import codes as num
from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import CodecBases, Entries, open_pages, seal_pages
from sgl_kernels.page_layout import HeadLayout, KeyClass, PageGeometry, PageLayout

Table = dict[str, dict[str, float]]
LADDER = ("fp8", "k8v4", "fp4", "int4", "csa2-2x", "csa2-4x", "csa2-8x")


@dataclass(frozen=True)
class Study:
    """One document, and what is known of the model from others."""

    scene: Scene
    rotation: Rotation
    orders: list[list[int]] | None
    """Channel order of each head from the calibration that is served; None: there is none."""
    scores: Tensor
    """(L, G, P) pair scores, mean over the other documents."""

    def weight(self, entries: Entries) -> Tensor:
        """(N, L x G, E) attention that the sample pays to each entry."""
        return observed_attention(entries, self.scene.sample(len(entries.keys)))


def value_means(study: Study) -> Table:
    """Which mean is taken out of values before they are quantised."""
    exact = study.scene.pages()
    seen = study.weight(exact)
    weights = {"none": torch.zeros_like(seen), "plain": torch.ones_like(seen), "of 16 queries": seen}
    kinds = {"error, 2 bits": "lloyd2", "error, 4 bits (E2M1)": "e2m1"}
    return {
        row: {column: _values_alone(study, _coded(exact, "e4m3", kind, weight)) for column, weight in weights.items()}
        for row, kind in kinds.items()
    }


def pair_order(study: Study) -> Table:
    """Which rotary pairs keep how many bits; keys of `csa2-2x` alone."""
    layers, groups, _, dim = study.scene.keys.shape
    geometry, pairs, scores = study.scene.geometry(), channel_pairs(study.rotation, dim), study.scores
    classes = default_classes(geometry, merged=False)
    of_heads = channel_order(scores, pairs).flatten(0, 1).tolist()
    orders: dict[str, list[list[int]]] = {
        "slowest first": [study.rotation.prior_order(dim)] * (layers * groups),
        "one for the model": channel_order(scores.mean((0, 1)).expand_as(scores), pairs).flatten(0, 1).tolist(),
        "one a layer": channel_order(scores.mean(1, keepdim=True).expand_as(scores), pairs).flatten(0, 1).tolist(),
        "one a head": of_heads,
        "one a head, blocks not mixed": [_unmixed(order, classes[0]) for order in of_heads],
    }
    if study.orders is not None:
        orders["calibration that ships"] = study.orders
    exact = study.scene.pages()
    weight = study.weight(exact)
    heads = tuple(HeadLayout("reduced", 64, dim, of_head, "e4m3", merged=False) for of_head in classes)
    layout = PageLayout("reduced", geometry, heads)
    errors = {}
    for name, order in orders.items():
        bases = CodecBases(orthonormal_basis(dim), reduced_bases(classes, order, dim))
        errors[name] = _keys_alone(study, open_pages(seal_pages(exact, layout, bases, weight), layout, bases))
    return {"error": errors}


def scale_blocks(study: Study) -> Table:
    """What shares a scale."""
    exact = study.scene.pages()
    weight = study.weight(exact)
    table: Table = {"keys, INT4": {}, "values, E2M1": {}, "values, 2 bits": {}}
    dim = exact.keys.shape[-1]
    for column, width in {"per entry": dim, "per entry and 32 channels": 32, "and 16": 16}.items():
        coded = _coded(exact, "int4", "e2m1", weight, width)
        table["keys, INT4"][column] = _keys_alone(study, coded)
        table["values, E2M1"][column] = _values_alone(study, coded)
        table["values, 2 bits"][column] = _values_alone(study, _coded(exact, "int4", "lloyd2", weight, width))
    by_channel = _coded(exact, "int4_asymmetric", "e2m1", weight, channel_scales=True)
    table["keys, INT4"]["per channel, asymmetric"] = _keys_alone(study, by_channel)
    return table


def scores(study: Study) -> Table:
    """Whose importance decides which tokens are merged, two to one; nothing is quantised."""
    exact = study.scene.pages()
    count = len(exact.keys)
    nobody = torch.zeros_like(exact.keys[..., 0])
    shares = {
        "size of values": torch.ones_like(nobody),
        "no sample: size of keys": attention_share(exact, nobody),
        "16 queries": study.weight(exact),
        "64 queries": observed_attention(exact, study.scene.sample(count, wide=True)),
        "the later queries themselves": observed_attention(exact, study.scene.asked.expand(count, -1, -1, -1)),
    }
    half, size = exact.keys.shape[-2] // 2, exact.values.norm(dim=-1)
    return {"error": {name: study.scene.error(merge_entries(exact, share * size, half)) for name, share in shares.items()}}


def group_keys(study: Study) -> Table:
    """Which key a group of merged tokens gets; nothing is quantised."""
    exact = study.scene.pages()
    share = attention_share(exact, study.weight(exact))
    importance = share * exact.values.norm(dim=-1)
    table: Table = {}
    for tokens, row in {2: "two tokens an entry", 4: "four tokens an entry"}.items():
        merged = merge_entries(exact, importance, exact.keys.shape[-2] // tokens)
        averaged = Entries(_mean_keys(exact, merged, share), merged.values, merged.bias)
        table[row] = {"key of the pivot": study.scene.error(merged), "mean key": study.scene.error(averaged)}
    return table


def demotions(study: Study) -> Table:
    """Each rung of the ladder straight from what the model wrote, and by way of larger rungs; no calibration, so that every
    head has the same bytes."""
    table: Table = {}
    for name in LADDER:
        # The ladder with k8v4 has fp4 below it.
        options = cache_options("k8v4" if name == "fp4" else name)
        codec, ladder = codec_and_ladder(options, study.scene.geometry(), study.rotation, None)
        exact = study.scene.pages()
        queries = study.scene.sample(len(exact.keys))
        held = {"": exact}
        table[name] = {}
        four_bit = ladder.names[ladder.warm]
        for way in ("", "fp8", "k8v4", "4 bits", "fp8, 4 bits"):
            steps = [four_bit if step == "4 bits" else step for step in way.split(", ") if step]
            if any(step not in ladder.names or ladder.index(step) >= ladder.index(name) for step in steps):
                continue
            if steps:
                layout = ladder.layouts[ladder.index(steps[-1])]
                before = held[way.rpartition(", ")[0]]
                held[way] = codec.open(codec.seal(before, layout, queries), layout)
            layout = ladder.layouts[ladder.index(name)]
            packed = codec.seal(held[way], layout, queries)
            table[name][f"over {way}" if way else "direct"] = study.scene.error(codec.open(packed, layout))
    return table


def quantisers(study: Study) -> Table:
    """Each code by itself, rounded to nearest, a scale per entry, weighted means taken out."""
    exact = study.scene.pages()
    weight = study.weight(exact)
    names = {"e4m3": "E4M3", "e2m1": "E2M1", "int4": "INT4", "int3": "INT3", "lloyd2": "Lloyd-Max 2 bits", "int2": "INT2"}
    table: Table = {"keys": {}, "values": {}}
    for kind, name in names.items():
        rounded = Entries(*(_rounded(x, kind, weight) for x in (exact.keys, exact.values)), None)
        table["keys"][name], table["values"][name] = _keys_alone(study, rounded), _values_alone(study, rounded)
    return table


def page_sizes(study: Study) -> Table:
    """Merging in groups from pages of different size; no calibration."""
    table: Table = {}
    for name in ("csa2-4x", "csa2-8x"):
        table[name] = {}
        for size in (32, 64, 128):
            codec, ladder = codec_and_ladder(cache_options(name), study.scene.geometry(size), study.rotation, None)
            exact, layout = study.scene.pages(size), ladder.layouts[ladder.index(name)]
            packed = codec.seal(exact, layout, study.scene.sample(len(exact.keys)))
            table[name][f"{size} tokens"] = study.scene.error(codec.open(packed, layout))
    return table


STAGES: dict[str, tuple[str, Callable[[Study], Table]]] = {
    "value-means": ("Mean taken out of values", value_means),
    "pair-order": ("Order of key channels, `csa2-2x`", pair_order),
    "scales": ("What shares a scale", scale_blocks),
    "scores": ("Who decides which tokens merge, two to one, nothing quantised", scores),
    "group-keys": ("Key of merged tokens, nothing quantised", group_keys),
    "demotions": ("Straight and by way of larger formats", demotions),
    "quantisers": ("Codes alone", quantisers),
    "page-sizes": ("Page size", page_sizes),
}
"""Name of `--stage`, title, experiment."""


def _keys_alone(study: Study, coded: Entries) -> float:
    return study.scene.error(Entries(coded.keys, study.scene.pages().values, None))


def _values_alone(study: Study, coded: Entries) -> float:
    return study.scene.error(Entries(study.scene.pages().keys, coded.values, None))


def _coded(
    exact: Entries, key_kind: str, value_kind: str, weight: Tensor, width: int | None = None, *, channel_scales: bool = False
) -> Entries:
    """`exact` (N, heads, E, D) sealed in the flat basis and opened, every `width` channels of it with scales of their own:
    they are sealed as if they were heads."""
    heads, size, dim = exact.keys.shape[1:]
    width = width or dim
    blocks, flat = dim // width, orthonormal_basis(dim)

    def split(x: Tensor) -> Tensor:
        return (x @ flat).unflatten(-1, (blocks, width)).permute(0, 1, 3, 2, 4).flatten(1, 2)

    def joined(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads, blocks)).permute(0, 1, 3, 2, 4).flatten(-2) @ flat

    head = HeadLayout(
        "flat", size, width, (KeyClass(key_kind, width),), value_kind, merged=False, channel_scales=channel_scales
    )
    geometry = PageGeometry(1, heads * blocks, width, size, torch.bfloat16)
    layout, bases = PageLayout("stage", geometry, (head,) * (heads * blocks)), CodecBases(torch.eye(width))
    pages = Entries(split(exact.keys), split(exact.values), None)
    opened = open_pages(seal_pages(pages, layout, bases, weight.repeat_interleave(blocks, 1)), layout, bases)
    return Entries(joined(opened.keys), joined(opened.values), None)


def _unmixed(order: Sequence[int], classes: Sequence[KeyClass]) -> list[int]:
    """`order` so arranged that `reduced_bases`, which deals the pairs of a class out to its blocks, gives each block
    pairs that follow each other in `order`."""
    pairs = [list(order[c : c + 2]) for c in range(0, len(order), 2)]
    arranged, start = list(pairs), 0
    for key_class in classes:
        blocks, count = -(-key_class.channels // BLOCK), key_class.channels // 2
        places = [place for block in range(blocks) for place in range(block, count, blocks)]
        for pair, place in zip(pairs[start : start + count], places, strict=True):
            arranged[start + place] = pair
        start += count
    return [channel for pair in arranged for channel in pair]


def _mean_keys(exact: Entries, merged: Entries, share: Tensor) -> Tensor:
    """(N, heads, E', D) mean of the keys that are nearest to each pivot, in key and value, weighted by `share`."""
    is_pivot = (merged.keys[:, :, :, None] == exact.keys[:, :, None]).all(-1)
    rows = is_pivot.int().argmax(-1).unsqueeze(-1).expand_as(merged.keys)
    distance = torch.zeros_like(is_pivot, dtype=torch.float32).transpose(-1, -2)
    for x in (exact.keys, exact.values):
        centred = x - x.mean(-2, keepdim=True)
        distance = (
            distance + torch.cdist(centred, centred.gather(-2, rows)) ** 2 / centred.square().sum((-1, -2))[..., None, None]
        )
    owner = torch.nn.functional.one_hot(distance.argmin(-1), rows.shape[-2]).transpose(-1, -2) * share.unsqueeze(-2)
    return owner @ exact.keys / owner.sum(-1, keepdim=True).clamp(min=1e-30)


def _rounded(x: Tensor, kind: str, weight: Tensor) -> Tensor:
    """`x` (N, heads, E, D) through one code, in the flat basis."""
    flat = orthonormal_basis(x.shape[-1])
    y = x @ flat
    mean = num.decode_e4m3(num.encode_e4m3((y * weight.unsqueeze(-1)).sum(-2, keepdim=True)))
    scale = num.decode_ue5m3(num.encode_ue5m3(num.entry_scales(y - mean, kind))).unsqueeze(-1)
    return (num.decode_codes(num.encode_codes((y - mean) / scale, kind), kind) * scale + mean) @ flat
