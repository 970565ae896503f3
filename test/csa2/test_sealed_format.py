"""The format that a page takes when it leaves a window, and facts of pages that change hands."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_rows import facts_of, ladders, some_rows, with_shared
from page_stores import LADDERS

from csa2.formats import PLAIN
from csa2.residency import PageFacts, sealed_format

fixed = settings(derandomize=True, deadline=None, max_examples=200)


@pytest.mark.parametrize("shared", ["bf16", "fp8", "fp4", None])
@pytest.mark.parametrize("tail", list(LADDERS))
def test_sealed_pages_take_the_format_of_their_role(tail, shared):
    ladder = with_shared(shared, LADDERS[tail])
    facts, _, _ = facts_of([{}, {"hits": 1}, {"first": True}, {"first": True, "hits": 5}])
    chosen = torch.tensor([4, 2, 1, 3])
    for old, private in ((False, min(ladder.warm, ladder.tail)), (True, ladder.tail)):
        target = sealed_format(facts, chosen, torch.full((4,), old), ladder)
        assert target.tolist() == [PLAIN, private if ladder.shared is None else ladder.shared, private, PLAIN]


@fixed
@given(some_rows(), ladders(), st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_page_never_asks_for_more_bytes_when_it_gets_old(rows, ladder, marks):
    facts, _, _ = facts_of(rows)
    pages = torch.arange(1, len(rows) + 1)
    old = torch.tensor(marks[: len(rows)], dtype=torch.bool)
    young = sealed_format(facts, pages, torch.zeros_like(old), ladder)
    mixed = sealed_format(facts, pages, old, ladder)
    assert bool((mixed >= young).all())
    assert torch.equal(mixed[~old], young[~old])
    assert bool((mixed[facts.first[pages]] == PLAIN).all())


def test_forgotten_pages_are_as_new():
    facts, _, _ = facts_of([{"use": 5, "hits": 2, "first": True, "written": 3}] * 2)
    facts.reader[1:] = 7
    facts.forget(torch.tensor([2]))
    fresh = PageFacts.empty(3)
    for name in ("last_use", "hits", "first", "written", "reader"):
        assert getattr(facts, name)[2] == getattr(fresh, name)[2]
        assert getattr(facts, name)[1] != getattr(fresh, name)[1]
