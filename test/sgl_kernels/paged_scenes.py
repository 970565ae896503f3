"""Arenas with pages of mixed formats, and attention over them in float64."""

import math
from dataclasses import dataclass, field, fields

import torch
from codec_bounds import U16, U32, open_by_the_letter, rotated
from hard_pages import FORMATS, UNEVEN, bases_of, biases, layout_of, positions_of, weights
from torch import Tensor

from sgl_kernels.page_codec.reference import CodecBases, Entries, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout, plain_layout
from sgl_kernels.paged_attention.plan import PagePlan, plan_pages

FLAT, IDENTITY = 0, 1
LAYERS = [FLAT, IDENTITY]
PLAIN = "plain"
ALL_FORMATS = (PLAIN, *FORMATS, UNEVEN)
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 513]
"""Around page borders, and one of several formats."""
MIXED = 10 * 64 + 1
"""A prefix with a page of each format."""
UNIT = {torch.float32: U32, torch.float16: 2.0**-11, torch.bfloat16: U16}
# head_dim, KV heads, query heads per KV head, dtype of the model
SHAPES = [
    (32, 1, 1, torch.float32),
    (32, 2, 3, torch.bfloat16),
    (64, 3, 3, torch.bfloat16),
    (64, 1, 8, torch.float16),
    (64, 2, 7, torch.float32),
    (80, 3, 1, torch.bfloat16),
    (80, 1, 5, torch.float32),
    (96, 2, 4, torch.float16),
    (100, 1, 6, torch.bfloat16),
    (112, 1, 2, torch.float32),
    (128, 2, 4, torch.bfloat16),
    (128, 1, 7, torch.float32),
    (256, 1, 3, torch.bfloat16),
]


LIKELY = 6.0
"""Rounding errors are independent and centred, so a sum of them stays below this many times its deviation: a chance of
2 exp(-18) per value to be wrong about it (Higham and Mary 2019)."""


@dataclass
class Held:
    """Entries of one request in float64, axes (L, G, n, D)."""

    keys: Tensor
    values: Tensor
    bias: Tensor
    """(L, G, n) in nat."""
    key_terms: Tensor
    """Size of the terms that add up to a key in the basis in which it is stored: |code s| + |mean| <= |k'| + 2 |mean|."""
    value_terms: Tensor
    coded: Tensor
    """(L, G, n) bool."""
    folded: Tensor
    """(L, G, n) bool: keys are in the flat basis."""

    def followed_by(self, other: "Held") -> "Held":
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return Held(**{name: torch.cat(pair, 2) for name, pair in pairs.items()})

    def between(self, start: int, end: int) -> "Held":
        """Entries start..end - 1."""
        return Held(*(getattr(self, f.name)[:, :, start:end] for f in fields(self)))


def as_written(keys: Tensor, values: Tensor) -> Held:
    """Entries stored as they are; keys and values (L, G, n, D)."""
    k, v = keys.double(), values.double()
    no = torch.zeros(k.shape[:-1], dtype=torch.bool)
    return Held(k, v, no.double(), k.abs(), v.abs(), no, no)


@dataclass
class Scene:
    """An arena with the pages of some requests in it, and what they hold."""

    geometry: PageGeometry
    repeat: int
    layouts: tuple[PageLayout, ...]
    arena: Tensor
    formats: Tensor
    offsets: Tensor
    table: Tensor
    lengths: Tensor
    bases: CodecBases
    held: list[Held] = field(default_factory=list)

    @property
    def scale(self) -> float:
        return self.geometry.head_dim**-0.5

    def plan(self, *requests: int) -> PagePlan:
        chosen = torch.tensor(requests) if requests else torch.arange(len(self.lengths))
        return plan_pages(
            self.table[chosen], self.lengths[chosen], self.formats, self.offsets, self.layouts, self.geometry.page_size
        )

    def query(self, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
        heads = self.geometry.num_kv_heads * self.repeat
        random = torch.Generator().manual_seed(11)
        return torch.randn(tokens, heads, self.geometry.head_dim, generator=random).to(dtype)


def make_scene(
    lengths: list[int],
    shape: tuple,
    *,
    only: str | None = None,
    rubbish: int = 0xFF,
    tail: int = 0,
    seed: int = 0,
    size: int = 64,
    separated_at: int | None = None,
) -> Scene:
    """Full pages of every format in turn, last partial pages plain.

    Args:
        only: the format of all full pages.
        rubbish: byte in every place that no page holds; 0xFF is NaN in every dtype and in E4M3.
        tail: byte behind the last token of a partial page; the store maps pages zeroed.
        size: tokens of a page.
        separated_at: keys of coded pages are separated from their positions, and requests begin at this one.
    """
    dim, groups, repeat, dtype = shape
    geometry = PageGeometry(2, groups, dim, size, dtype, (IDENTITY,))
    layouts = (
        plain_layout(PLAIN, geometry),
        *(layout_of(name, geometry, separated=separated_at is not None) for name in ALL_FORMATS[1:]),
    )
    random = torch.Generator().manual_seed(seed)
    used = [-(-length // size) for length in lengths]
    num_pages = sum(used) + 3
    plain_bytes = layouts[0].page_bytes
    arena = torch.full((num_pages * plain_bytes,), rubbish, dtype=torch.uint8)
    # Page p in slab p of one plain page; never in the order of the requests.
    order = torch.randperm(num_pages - 1, generator=random) + 1
    scene = Scene(
        geometry,
        repeat,
        layouts,
        arena,
        torch.full((num_pages,), -1, dtype=torch.int8),
        torch.arange(num_pages) * plain_bytes,
        torch.zeros(len(lengths), max(*used, 1), dtype=torch.int64),
        torch.tensor(lengths),
        bases_of(geometry, seed),
    )
    taken = full = 0
    empty = torch.empty(2, groups, 0, dim)
    for request, length in enumerate(lengths):
        held = as_written(empty, empty)
        for depth in range(used[request]):
            page, taken = int(order[taken]), taken + 1
            scene.table[request, depth] = page
            valid, index = min(size, length - depth * size), 0
            if valid == size:
                index, full = full % len(layouts) if only is None else ALL_FORMATS.index(only), full + 1
            held = held.followed_by(place(scene, page, index, valid, tail, random, (separated_at or 0) + depth * size))
        scene.held.append(held)
    return scene


def place(scene: Scene, page: int, index: int, valid: int, tail: int, random: torch.Generator, position: int = 0) -> Held:
    """Fill one page, whose first token is at `position`, and say what it holds."""
    g, layout = scene.geometry, scene.layouts[index]
    shape = g.num_layers, g.num_kv_heads, layout.entries, g.head_dim
    content = torch.randn(2, *shape, generator=random)
    content += torch.randn(2, g.num_layers, g.num_kv_heads, 1, g.head_dim, generator=random)
    content = content.to(g.dtype)
    scene.formats[page] = index
    if layout.is_plain:
        data = content.transpose(0, 1).contiguous()
        data.view(torch.uint8)[..., valid:, :] = tail
        stored = data.view(torch.uint8).reshape(-1)
        held = as_written(*content[:, :, :, :valid])
    else:
        # Any slot of the slab that the page fits in.
        slots = scene.layouts[0].page_bytes // layout.page_bytes
        scene.offsets[page] += page % slots * layout.page_bytes
        bias = biases(layout, 1, seed=page)
        entries = Entries(*content.flatten(1, 2)[:, None], bias, positions_of(layout, 1, position, seed=page))
        stored = seal_pages(entries, layout, scene.bases, weights(layout, 1, seed=page)).view(-1)
        held = opened(stored, layout, scene.bases)
    start = int(scene.offsets[page])
    scene.arena[start : start + layout.page_bytes] = stored
    return held


def opened(stored: Tensor, layout: PageLayout, bases: CodecBases) -> Held:
    """What a coded page holds, by the letter."""
    g = layout.geometry
    letter = open_by_the_letter(stored[None], layout, bases)
    wide = bases.flat.double()

    def per_layer(x: Tensor) -> Tensor:
        return x[0].unflatten(0, (g.num_layers, g.num_kv_heads))

    keys, values = per_layer(letter.keys), per_layer(letter.values)
    folded = torch.tensor([head.basis == "flat" and not layout.is_separated for head in layout.heads])[None, :, None].expand(
        1, -1, layout.entries
    )
    folded, coded = per_layer(folded), torch.ones(keys.shape[:-1], dtype=torch.bool)
    means = letter.key_means[:, :, None].expand_as(letter.keys)
    if letter.positions is not None:
        # What is added up in the stored basis is turned as a whole; terms are counted where they end.
        flat = torch.tensor([head.basis == "flat" for head in layout.heads])[:, None, None]
        means = rotated(torch.where(flat, means @ wide, means), letter.positions, bases.rope)
    key_terms = torch.where(folded[..., None], keys @ wide, keys).abs() + 2 * per_layer(means).abs()
    value_terms = (values @ wide).abs() + 2 * per_layer(letter.value_means).abs()[:, :, None]
    bias = torch.zeros(keys.shape[:-1], dtype=torch.float64) if letter.bias is None else per_layer(letter.bias)
    return Held(keys, values, bias, key_terms, value_terms, coded, folded)


def oracle(scene: Scene, held: Held, layer: int, query: Tensor, *, new: int = 0, unit: float = 0.0) -> tuple[Tensor, Tensor]:
    """Attention in float64 of `query` (T, H, D) over `held`, the last `new` entries causal; and how far off it may be.

    The bound follows the errors of this very input, to first order (and `exp` of the largest logit error beyond it):

    - fp32: a logit is a dot product of length D with the basis and another with the key, 2 D + 16 roundings of terms
      that the norms bound: delta = scale 6 sqrt(2 D + 16) U |q| |terms|. The sum over n entries, the way back through
      the basis and the exponential (20 units) are n + D + 64 roundings of the weighted terms.
    - In low precision with unit u, in the basis, q' and k' are rounded once each: delta += scale 6 sqrt(2) u
      |q' * terms|. Weights, output and merge are rounded: 3 u of the weighted |v|. v' and the output in the basis are
      rounded before they go through the basis: 2 u of the weighted terms, added up with the squares of the basis. fp16
      weights below 2^-14 are off by 2^-25.

    - The bias joins a logit in fp32: one more rounding of their sum.

    An error delta of the logits moves the output by sum p delta (|v| + |out|).
    """
    groups, n, dim = held.keys.shape[1:]
    repeat = query.shape[1] // groups
    wide = scene.bases.flat.double()

    def per_query_head(x: Tensor) -> Tensor:
        return x[layer].repeat_interleave(repeat, 0)

    q = query.double().transpose(0, 1)
    keys, values = per_query_head(held.keys), per_query_head(held.values)
    key_terms, value_terms = per_query_head(held.key_terms), per_query_head(held.value_terms)
    coded, folded, bias = per_query_head(held.coded), per_query_head(held.folded), per_query_head(held.bias)
    logits = q @ keys.transpose(-1, -2) * scene.scale + bias[:, None]
    if new:
        future = torch.ones(new, new, dtype=torch.bool).triu(1)
        logits[..., n - new :] = logits[..., n - new :].masked_fill(future, -math.inf)
    p = torch.softmax(logits, -1)
    out = p @ values

    delta = (
        scene.scale * LIKELY * math.sqrt(2 * dim + 16) * U32 * q.norm(dim=-1)[..., None] * key_terms.norm(dim=-1)[:, None]
    )
    delta = delta + LIKELY * U32 * torch.where(bias.isinf(), 0.0, bias)[:, None]  # no entry, no error
    term_norms = torch.where(
        folded[:, None],
        ((q @ wide).square() @ key_terms.square().transpose(-1, -2)).sqrt(),
        (q.square() @ key_terms.square().transpose(-1, -2)).sqrt(),
    )
    delta = delta + scene.scale * LIKELY * math.sqrt(2) * unit * term_norms
    moved = (p * delta) @ values.abs() + (p * delta).sum(-1, keepdim=True) * out.abs()
    moved = moved * math.exp(2 * float(delta.max()))
    weighted = p @ value_terms
    through_basis = (p @ (value_terms * coded[..., None])).square() @ wide.square()
    rounded = LIKELY * math.sqrt(n + dim + 64) * U32 * weighted.norm(dim=-1, keepdim=True)
    rounded = rounded + unit * (3 * (p @ values.abs()) + 2 * LIKELY * through_basis.sqrt())
    rounded = rounded + (n * 2.0**-25 * float(values.abs().max()) if unit else 0.0)
    return out.transpose(0, 1), (moved + rounded).transpose(0, 1)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def eager_attention(scene: Scene, held: Held, layer: int, query: Tensor, new: int) -> Tensor:
    """Attention as models write it: products in the dtype of the query, softmax in fp32; (T, H, D) float64."""
    dtype, n = query.dtype, held.keys.shape[2]
    repeat = query.shape[1] // held.keys.shape[1]
    keys, values = (x[layer].to(dtype).repeat_interleave(repeat, 0) for x in (held.keys, held.values))
    logits = (query.transpose(0, 1) @ keys.transpose(-1, -2)) * scene.scale
    logits = logits + held.bias[layer].to(dtype).repeat_interleave(repeat, 0)[:, None]
    if new:
        future = torch.ones(new, new, dtype=torch.bool).triu(1)
        logits[..., n - new :] = logits[..., n - new :].masked_fill(future, -math.inf)
    return (torch.softmax(logits, -1, dtype=torch.float32).to(dtype) @ values).transpose(0, 1).double()
