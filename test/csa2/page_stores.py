"""Small page stores, tokens to write, and what a page may differ by after it was re-encoded."""

from dataclasses import dataclass

import torch
from codec_bounds import bias_error, entry_norm_bounds
from torch import Tensor

from csa2.capacity import ArenaPlan
from csa2.codec.channels import make_rotation, reduced_bases
from csa2.codec.codec import PageCodec
from csa2.codec.importance import attention_share, observed_attention
from csa2.codec.merging import merge_entries
from csa2.facts import Usage
from csa2.formats import MERGE, PLAIN, FormatLadder, even_heads, make_ladder, packing
from csa2.store import PageStore
from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import CodecBases, Entries
from sgl_kernels.page_layout import KeyClass, PageGeometry, PageLayout
from sgl_kernels.paged_attention.reference import plain_rows, write_plain

SIZE = 16
GEOMETRY = PageGeometry(2, 1, 32, SIZE, torch.bfloat16, (1,))
CLASSES = ((KeyClass("int4", 8), KeyClass("lloyd2", 16)), ())
"""The other 8 channels of the flat layer are left out."""
CODEC = PageCodec(
    CodecBases(orthonormal_basis(32), reduced_bases(CLASSES, [make_rotation(32, neox=True).prior_order(32)] * 2, 32))
)
LADDERS = {tail or "fp4": make_ladder(GEOMETRY, "fp4", tail) for tail in (None, "k8v4")}
REDUCED = {tail: even_heads(tail, CLASSES, GEOMETRY) for tail in MERGE}
LADDERS.update({tail: make_ladder(GEOMETRY, "fp4", tail, "fp8", {tail: heads}) for tail, heads in REDUCED.items()})
LADDER = LADDERS["fp4"]
SMALL = LADDER.end


@dataclass
class Content:
    """What a page holds, in float64."""

    entries: Tensor
    """(2, L x G, E, D) keys and values."""
    bias: Tensor | None = None
    """(L x G, E)"""


def make_store(
    num_slabs: int = 5, slab_pages: int = 2, ladder: FormatLadder = LADDER, pages: int = 24, codec: PageCodec = CODEC
) -> PageStore:
    slab = slab_pages * ladder.page_bytes[0]
    plan = ArenaPlan(slab, num_slabs, ladder.page_bytes, packing(slab, ladder.page_bytes), ladder.guard)
    store = PageStore(ladder, plan, pages, codec)
    store.arena.buffer[: plan.arena_bytes] = 0xFF  # NaN, wherever nobody has written
    return store


def idle(store: PageStore) -> Usage:
    """No request runs."""
    return Usage.nobody(store.facts.hits.numel())


def hot(store: PageStore, pages: Tensor) -> Usage:
    """A request runs that has `pages` in its hot window."""
    marks = torch.ones_like(pages, dtype=torch.bool)
    return Usage.of(pages, marks, marks, store.facts.hits.numel())


def some_tokens(n: int, seed: int) -> Tensor:
    """(n, 2, L, G, D) keys and values in the model dtype; now and then a token or a channel is a hundred times larger."""
    g = GEOMETRY
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, g.num_layers, g.num_kv_heads, g.head_dim, generator=random)
    x += torch.randn(1, 2, g.num_layers, g.num_kv_heads, g.head_dim, generator=random)
    if seed % 3 == 1 and n:
        x[seed % n] *= 100
    if seed % 3 == 2:
        x[..., seed % g.head_dim] *= 100
    return x.to(g.dtype)


def write(store: PageStore, page: int, first: int, tokens: Tensor) -> None:
    """Store (n, 2, L, G, D) `tokens` in slots `first`, ... of a page, as a forward pass does."""
    slots = torch.arange(first, first + len(tokens))
    store.record_writes(page * store.page_size + slots)
    layout = store.ladder.layouts[PLAIN]
    rows = plain_rows(store.arena.offsets[torch.full_like(slots, page)], slots, layout)
    for layer in range(layout.geometry.num_layers):
        write_plain(store.arena.buffer, rows, layout, layer, tokens[:, 0, layer], tokens[:, 1, layer])


def full_pages(store: PageStore, pages: list[int]) -> list[Content]:
    """Map and fill `pages`; what they hold."""
    store.map_pages(torch.tensor(pages))
    contents = []
    for page in pages:
        tokens = some_tokens(SIZE, page)
        write(store, page, 0, tokens)
        contents.append(Content(entries_of(tokens)))
    return contents


def entries_of(tokens: Tensor) -> Tensor:
    """(2, L x G, n, D) float64 of tokens (n, 2, L, G, D)."""
    return tokens.permute(1, 2, 3, 0, 4).flatten(1, 2).double()


def read_page(store: PageStore, page: int) -> Content:
    read = store.read(torch.tensor([page]))
    return Content(
        torch.stack((read.keys[0], read.values[0])).double(), None if read.bias is None else read.bias[0].double()
    )


def raw(store: PageStore, page: int) -> Tensor:
    return store.arena.read_pages(int(store.arena.formats[page]), torch.tensor([page]))[0]


def assert_same(before: Content, after: Content) -> None:
    assert torch.equal(before.entries, after.entries)
    assert before.bias is after.bias is None or torch.equal(before.bias, after.bias)


def merged_for(codec: PageCodec, entries: Entries, layout: PageLayout, queries: Tensor | None) -> tuple[Entries, Tensor]:
    """Entries as `layout` will code them, merged by their importance if it merges, and the attention they draw."""
    entries = Entries(entries.keys.float(), entries.values.float(), entries.bias)
    observed = observed_attention(entries, queries)
    if layout.is_merged:
        share = attention_share(entries, observed)
        entries = merge_entries(entries, share * entries.values.norm(dim=-1), layout.entries)
        observed = observed_attention(entries, queries)
    return entries, observed


def assert_near(store: PageStore, before: Content, after: Content, index: int, reader: int = -1) -> None:
    """`after` is `before` stored in format `index`: merged where the format merges, which is exact, and then coded.

    Args:
        reader: slot of the request that read the page last.
    """
    layout = store.ladder.layouts[index]
    keys, values = before.entries[:, None].float()
    entries = Entries(keys, values, None if before.bias is None else before.bias[None].float())
    queries = store.samples.of(torch.tensor([reader]))
    entries, observed = merged_for(store.codec, entries, layout, queries)
    bounds = entry_norm_bounds(entries.keys, entries.values, layout, store.codec.bases, observed)
    want = torch.cat((entries.keys, entries.values)).double()
    assert bool(((after.entries - want).norm(dim=-1) <= torch.cat(bounds)).all())
    assert (after.bias is None) == (not layout.is_merged)
    if after.bias is not None:
        assert bool(((after.bias - entries.bias[0]).abs() <= bias_error(entries.bias[0]) + 1e-6).all())
