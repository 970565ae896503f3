"""Small page stores, tokens to write, and what a page may differ by after it was re-encoded."""

import torch
from codec_bounds import entry_norm_bounds
from torch import Tensor

from csa2.capacity import ArenaPlan
from csa2.formats import FP8, PLAIN, FormatLadder, make_ladder, packing
from csa2.store import PageStore
from sgl_kernels.page_layout import PageGeometry
from sgl_kernels.paged_attention.reference import plain_rows, write_plain

SIZE = 16
GEOMETRY = PageGeometry(2, 1, 32, SIZE, torch.bfloat16, (1,))
LADDER = make_ladder(GEOMETRY, "fp4")


def make_store(num_slabs: int = 5, slab_pages: int = 2, ladder: FormatLadder = LADDER, pages: int = 24) -> PageStore:
    slab = slab_pages * ladder.page_bytes[0]
    plan = ArenaPlan(slab, num_slabs, ladder.page_bytes, packing(slab, ladder.page_bytes))
    store = PageStore(ladder, plan, pages)
    store.arena.buffer[: plan.arena_bytes] = 0xFF  # NaN, wherever nobody has written
    store.shared_format = FP8
    return store


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


def full_pages(store: PageStore, pages: list[int]) -> list[Tensor]:
    """Map and fill `pages`; their keys and values (2, L, G, S, D) in float64."""
    store.map_pages(torch.tensor(pages))
    contents = []
    for page in pages:
        tokens = some_tokens(SIZE, page)
        write(store, page, 0, tokens)
        contents.append(tokens.permute(1, 2, 3, 0, 4).double())
    return contents


def read_page(store: PageStore, page: int) -> Tensor:
    """(2, L, G, S, D) float64."""
    return torch.stack([x[0] for x in store.read(torch.tensor([page]))]).double()


def raw(store: PageStore, page: int) -> Tensor:
    return store.arena.read_pages(int(store.arena.formats[page]), torch.tensor([page]))[0]


def assert_near(store: PageStore, before: Tensor, after: Tensor, index: int) -> None:
    """`after` is `before` stored in format `index`, (2, L, G, S, D)."""
    bounds = entry_norm_bounds(before[:1], before[1:], store.ladder.layouts[index], store.basis)
    error = (after - before).norm(dim=-1)
    assert bool((error <= torch.cat(bounds)).all())
