"""The page store weights entries by the queries of whoever read a page last."""

import pytest
import torch
from page_stores import CODEC, LADDERS, SIZE, assert_near, full_pages, make_store, raw, read_page
from torch import Tensor

from sgl_kernels.page_codec.reference import Entries


def no_pages() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("tail", LADDERS)
def test_pages_are_scored_by_the_queries_of_their_last_reader(tail):
    store = make_store(num_slabs=8, ladder=LADDERS[tail])
    contents = full_pages(store, [1, 2, 3, 4])
    queries = torch.randn(2, 2, SIZE, 3, 32, generator=torch.Generator().manual_seed(1)) * 3
    for slot, of_slot in zip((5, 6), queries, strict=True):
        for layer, of_layer in enumerate(of_slot):
            store.samples.record_extend(slot, layer, of_layer, 1.0)
    store.touch(torch.tensor([1, 2, 3]), torch.tensor([5, 5, 9]))
    store.touch(torch.tensor([2]), torch.tensor([6]))
    assert store.facts.reader[1:5].tolist() == [5, 6, 9, -1]
    store.seal(no_pages(), torch.tensor([1, 2, 3, 4]))
    for page, reader in ((1, 5), (2, 6), (3, 9), (4, -1)):
        assert_near(store, contents[page - 1], read_page(store, page), store.ladder.tail, reader)
    # Page 1 would have other bytes for another reader, and for none.
    layout = store.ladder.layouts[store.ladder.tail]
    entries = Entries(*contents[0].entries[:, None].float(), None)
    others = [CODEC.seal(entries, layout, store.samples.of(torch.tensor([slot]))) for slot in (6, -1)]
    assert not any(torch.equal(raw(store, 1), other[0]) for other in others)
    store.clear()
    assert store.samples.of(torch.tensor([5, 6])) is None
