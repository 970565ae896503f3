"""Pages that sealers of any kind re-encode, and whether what comes out is what the torch codec merges and codes."""

import math

import torch
from codec_bounds import bias_error, entry_norm_bounds
from hard_pages import BUDGETS, UNEVEN, bases_of, layout_of
from torch import Tensor

from csa2.codec.codec import PageCodec
from csa2.codec.importance import attention_share, observed_attention
from csa2.codec.merging import WEIGHT_FLOOR, merge_heads
from csa2.codec.queries import QuerySamples
from csa2.codec.scorer import SCALARS, Scorer
from csa2.codec.sealing import Sealer, Wave
from sgl_kernels.page_codec.reference import CodecBases, Entries
from sgl_kernels.page_layout import PageGeometry, PageLayout, plain_layout

TARGETS = ("fp8", "k8v4", "fp4", "int4", BUDGETS, "csa2-2x", "csa2-4x", "csa2-8x", UNEVEN)
DEMOTIONS = [
    (before, name)
    for i, before in enumerate(("plain", *TARGETS[:-2]))
    for name in TARGETS[i:]
    if (before, name) != ("csa2-4x", UNEVEN)  # which has heads with more entries
]


class Samples(QuerySamples):
    """Samples by reader, as they are given; reader -1 has none."""

    def __init__(self, queries: Tensor | None) -> None:
        super().__init__(1, 1)
        self.queries = queries

    def of(self, readers: Tensor) -> Tensor | None:
        if self.queries is None:
            return None
        readers = readers.to(self.queries.device)
        return torch.where(readers[:, None, None, None] < 0, 0, self.queries[readers])


def model(g: PageGeometry, *names: str) -> tuple[PageCodec, list[PageLayout]]:
    """A codec and the plain layout, then those of `names`."""
    return PageCodec(bases_of(g)), [plain_layout("plain", g), *(layout_of(name, g) for name in names)]


def plain_pages(keys: Tensor, values: Tensor, g: PageGeometry) -> Tensor:
    """(N, page_bytes) uint8 of (N, L x G, S, D)."""
    pair = torch.stack([x.unflatten(1, (g.num_layers, g.num_kv_heads)) for x in (keys, values)], 2)
    return pair.to(g.dtype).contiguous().view(len(keys), -1).view(torch.uint8)


def reencoded(sealer: Sealer, layouts: list[PageLayout], source: int, data: Tensor, target: int, queries: Tensor | None) -> Tensor:  # fmt: skip # noqa: E501
    """(N, page_bytes) of pages `data` (N, bytes) that lie in any order in an arena, page n asked by the queries of n."""
    n, size = data.shape
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    arena = torch.full((n * size + 64,), 0xFF, dtype=torch.uint8)
    arena[64:] = data[order].reshape(-1)
    wave = Wave(torch.full((n,), source), 64 + order.argsort() * size, torch.full((n,), target), torch.arange(n))
    packed = sealer.seal(arena, wave, Samples(queries))
    assert list(packed) == [target]
    assert packed[target].shape == (n, layouts[target].page_bytes)
    return packed[target]


def some_queries(n: int, g: PageGeometry, rows: int = 32, seed: int = 8) -> Tensor:
    """(N, L x G, M, D); every third page has none."""
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(n, g.num_layers * g.num_kv_heads, rows, g.head_dim, generator=random) * 2 / math.sqrt(g.head_dim)
    queries[2::3] = 0
    return queries.bfloat16()


def loss(keys: Tensor, values: Tensor, weight: Tensor, opened: Entries) -> Tensor:
    """(N, heads): how far entries are from the nearest group, by weight, in float64."""
    total = torch.zeros((*opened.keys.shape[:2], keys.shape[-2], opened.keys.shape[-2]), dtype=torch.float64)
    for x, y in ((keys, opened.keys), (values, opened.values)):
        x, y = x.double(), y.double()
        spread = (x - x.mean(-2, keepdim=True)).square().sum(-1).mean(-1).clamp(min=2.0**-100)
        total += torch.cdist(x, y).square() / spread[..., None, None]
    return (weight.double() * total.amin(-1)).sum(-1)


def undecided_heads(codec: PageCodec, held: Entries, layout: PageLayout, queries: Tensor | None, packed: Tensor) -> int:
    """Number of pieces that are not what the reference merges, coded; those must lose no more than the reference does."""
    held = Entries(*(x.float().nan_to_num(0, 0, 0).clamp(-(2.0**15), 2.0**15) for x in (held.keys, held.values)), held.bias)
    observed = observed_attention(held, queries)
    share = attention_share(held, observed)
    importance = share * held.values.norm(dim=-1)
    if codec.scorer is not None:
        importance = importance * codec.scorer.correction(held, observed)
    merged, wanted = held, codec.seal(held, layout, queries)
    if layout.is_merged:
        merged = merge_heads(held, importance, [head.entries for head in layout.heads])
    weighted = observed_attention(merged, queries)
    opened, reference = codec.open(packed, layout), codec.open(wanted, layout)
    undecided = 0
    for index, head in enumerate(layout.heads):
        kept, one = slice(head.entries), slice(index, index + 1)
        g = layout.geometry
        alone = PageLayout("one", PageGeometry(1, 1, g.head_dim, g.page_size, g.dtype), (head,))
        bases = CodecBases(codec.bases.flat, codec.bases.reduced[one])
        keys, values = merged.keys[:, one, kept], merged.values[:, one, kept]
        bounds = entry_norm_bounds(keys, values, alone, bases, weighted[:, one, kept])
        near = torch.ones(len(packed), dtype=torch.bool)
        for got, want, bound in zip((opened.keys, opened.values), (keys, values), bounds, strict=True):
            near &= ((got[:, one, kept] - want).double().norm(dim=-1) <= bound).flatten(1).all(-1)
        if head.merged:
            # Weights are sums of 64 roundings at most, as in the reference.
            want = merged.bias[:, index, kept]
            near &= ((opened.bias[:, index, kept] - want).abs() <= bias_error(want) + 2.0**-12).all(-1)
        undecided += int((~near).sum())
        if not bool(near.all()):
            assert head.merged, f"head {index} of {layout.name} is beyond the bound of its format"
            weight = importance[:, one] / importance[:, one].mean(-1, keepdim=True).clamp(min=2.0**-126) + WEIGHT_FLOOR
            ours, theirs = (
                loss(
                    held.keys[:, one],
                    held.values[:, one],
                    weight,
                    Entries(x.keys[:, one, kept], x.values[:, one, kept], None),
                )
                for x in (opened, reference)
            )
            # Where entries weigh alike, as those without a value do, any may stay: a tenth is what that changes by chance.
            assert bool((ours <= theirs * 1.1 + 1e-3)[:, 0][~near].all())
    return undecided


def random_scorer(heads: int, dim: int, units: int) -> Scorer:
    """Corrections by factors of about 3 either way."""
    random = torch.Generator().manual_seed(9)
    features = 2 * dim + SCALARS
    weights = torch.randn(heads, features, 1 + units, generator=random) / math.sqrt(features)
    return Scorer(
        weights,
        torch.randn(heads, 1 + units, generator=random) / 4,
        torch.randn(heads, units, generator=random) / max(1, units) ** 0.5,
    )
