"""Keys and values whose size and mean drift over thousands of tokens: every page has scales and means of its own."""

from dataclasses import replace

import pytest
import torch
from page_stores import (
    GEOMETRY,
    LADDERS,
    SIZE,
    Content,
    assert_near,
    assert_same,
    entries_of,
    make_store,
    merged_for,
    raw,
    read_page,
    write,
)
from torch import Tensor

from csa2.formats import FP8, make_ladder
from csa2.store import PageStore
from sgl_kernels.page_codec.reference import Entries

PAGES = 256
GROWTH = 2.0 ** (12 / PAGES)
"""Of keys from page to page, and of values the other way: 4096 times in all, which E4M3 means can follow."""
INT4 = make_ladder(GEOMETRY, "int4")
FORMATS = {
    **{name: (ladder, ladder.tail) for name, ladder in LADDERS.items()},
    "fp8": (LADDERS["fp4"], FP8),
    "int4": (INT4, INT4.tail),
}


def drifting_tokens(page: int) -> Tensor:
    """(SIZE, 2, L, G, D) keys and values of a page, around a mean that turns by a right angle in 1000 tokens."""
    shape = (2, GEOMETRY.num_layers, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    x = torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(page))
    first, second = torch.randn(2, *shape, generator=torch.Generator().manual_seed(PAGES + 1))
    angle = torch.tensor(page * SIZE / 1000 * torch.pi / 2)
    return ((x + first * angle.cos() + second * angle.sin()) * sizes(page).view(2, 1, 1, 1)).to(GEOMETRY.dtype)


def sizes(page: int) -> Tensor:
    """(2,) standard deviation of keys and of values."""
    return torch.tensor([GROWTH ** (page - PAGES / 2), GROWTH ** (PAGES / 2 - page)])


def seal_page(store: PageStore, page: int) -> Content:
    """Write a page, let a request read it whose queries are as large as its keys are small, and seal it; what it held."""
    store.map_pages(torch.tensor([page]))
    tokens = drifting_tokens(page)
    write(store, page, 0, tokens)
    queries = torch.randn(SIZE, 3, 32, generator=torch.Generator().manual_seed(page)) / sizes(page)[0] / 4
    for layer in range(GEOMETRY.num_layers):
        store.samples.record_extend(page, layer, queries, 1.0)
    store.touch(torch.tensor([page]), torch.tensor([page]))
    assert store.seal(torch.empty(0, dtype=torch.int64), torch.tensor([page])) == 1
    return Content(entries_of(tokens))


def relative_errors(store: PageStore, page: int, before: Content, after: Content) -> Tensor:
    """(2,) of keys and values as they were coded, over how far they are from their own mean."""
    layout = store.ladder.layouts[store.ladder.tail]
    entries = Entries(*before.entries[:, None].float(), None)
    coded, _ = merged_for(store.codec, entries, layout, store.samples.of(torch.tensor([page])))
    want = torch.stack((coded.keys[0], coded.values[0])).double()
    spread = want - want.mean(-2, keepdim=True)
    return (after.entries - want).flatten(1).norm(dim=-1) / spread.flatten(1).norm(dim=-1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_page_follows_the_drift_and_none_that_is_sealed_changes(name):
    ladder, tail = FORMATS[name]
    store = make_store(num_slabs=PAGES // 4, slab_pages=4, ladder=replace(ladder, tail=tail), pages=PAGES + 2)
    bytes_of, opened, errors = {}, {}, []
    for page in range(1, PAGES + 1):
        before = seal_page(store, page)
        bytes_of[page], opened[page] = raw(store, page), read_page(store, page)
        assert_near(store, before, opened[page], tail, page)
        errors.append(relative_errors(store, page, before, opened[page]))
    # After 4096 tokens every page has the bytes it was sealed to, and opens to the same.
    for page, sealed in bytes_of.items():
        assert torch.equal(raw(store, page), sealed)
        assert_same(read_page(store, page), opened[page])
    # No trend: the error of a page is the same share of it, whatever its size. A stored scale is within 1/16 of the wanted
    # one and a mean within 1/17, a saw tooth that each run of 32 pages (a drift by 2^1.5) goes through. What is left is
    # chance: pages deviate by up to a quarter (csa2-8x), a mean of 32 by 5 per cent, least and largest of 8 by 10. A scale
    # of an earlier run would be 2^1.5 times too large or too small.
    runs = torch.stack(errors).unflatten(0, (8, -1)).mean(1)
    assert bool((runs.amax(0) <= 1.1 * runs.amin(0)).all())
