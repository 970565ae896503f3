"""The format that a page takes when it leaves a window, and facts of pages that change hands."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_rows import facts_of, ladders, some_rows, with_shared
from page_stores import LADDERS

from csa2.facts import NO_CAP, PageFacts
from csa2.formats import FP8, PLAIN, FormatLadder
from csa2.residency import sealed_format


def tails(n: int, ladder: FormatLadder) -> torch.Tensor:
    return torch.full((n,), ladder.tail)


fixed = settings(derandomize=True, deadline=None, max_examples=200)


@pytest.mark.parametrize("shared", ["bf16", "fp8", "fp4", None])
@pytest.mark.parametrize("tail", list(LADDERS))
def test_sealed_pages_take_the_format_of_their_role(tail, shared):
    ladder = with_shared(shared, LADDERS[tail])
    facts, _, _ = facts_of([{}, {"hits": 1}, {"first": True}, {"first": True, "hits": 5}])
    chosen = torch.tensor([4, 2, 1, 3])
    for old, private in ((False, min(ladder.warm, ladder.tail)), (True, ladder.tail)):
        target = sealed_format(facts, chosen, torch.full((4,), old), tails(4, ladder), ladder)
        assert target.tolist() == [PLAIN, private if ladder.shared is None else ladder.shared, private, PLAIN]


@fixed
@given(some_rows(), ladders(), st.lists(st.booleans(), min_size=12, max_size=12), st.booleans())
def test_a_page_never_asks_for_more_bytes_when_it_gets_old(rows, ladder, marks, roomy):
    facts, _, _ = facts_of(rows)
    pages = torch.arange(1, len(rows) + 1)
    old = torch.tensor(marks[: len(rows)], dtype=torch.bool)
    tail = tails(len(rows), ladder)
    young = sealed_format(facts, pages, torch.zeros_like(old), tail, ladder, roomy=roomy)
    mixed = sealed_format(facts, pages, old, tail, ladder, roomy=roomy)
    assert bool((mixed >= young).all())
    assert torch.equal(mixed[~old], young[~old])
    assert bool((mixed[facts.first[pages]] == PLAIN).all())


@pytest.mark.parametrize("old", [True, False])
def test_pages_of_prompts_wait_in_the_shared_format_while_memory_is_free(old):
    ladder = with_shared("fp8", LADDERS["csa2-4x"])
    facts, _, _ = facts_of([{"prompt": True}, {}, {"prompt": True, "first": True}, {"prompt": True, "hits": 1}])
    pages, marks = torch.arange(1, 5), torch.full((4,), old)
    private = ladder.tail if old else ladder.warm
    roomy = sealed_format(facts, pages, marks, tails(4, ladder), ladder, roomy=True)
    assert roomy.tolist() == [FP8, private, PLAIN, FP8]
    short = sealed_format(facts, pages, marks, tails(4, ladder), ladder)
    assert short.tolist() == [private, private, PLAIN, FP8]


def test_a_cap_limits_the_tail_of_its_request():
    ladder = LADDERS["csa2-8x"]
    facts, _, _ = facts_of([{"cap": ladder.warm}, {"cap": NO_CAP}])
    target = sealed_format(facts, torch.tensor([1, 2]), torch.ones(2, dtype=torch.bool), tails(2, ladder), ladder)
    assert target.tolist() == [ladder.warm, ladder.end]


@pytest.mark.parametrize("old", [True, False])
def test_a_document_chooses_its_format_and_a_static_page_has_that_of_shared_ones(old):
    ladder = with_shared("fp8", LADDERS["csa2-8x"])
    rows = [{"asked": PLAIN}, {"asked": ladder.warm, "pinned": True}, {"asked": ladder.end, "hits": 1}, {"static": True}]
    facts, _, _ = facts_of([*rows, {"asked": ladder.warm, "first": True}])
    pages = torch.arange(1, 6)
    target = sealed_format(facts, pages, torch.full((5,), old), tails(5, ladder), ladder)
    assert target.tolist() == [PLAIN, ladder.warm, ladder.end, FP8, PLAIN]


def test_forgotten_pages_are_as_new():
    facts, _, _ = facts_of(
        [{"last_use": 5, "hits": 2, "first": True, "written": 3, "cap": 2, "pinned": True, "static": True, "asked": 1}] * 2
    )
    facts.reader[1:] = 7
    facts.forget(torch.tensor([2]))
    fresh = PageFacts.empty(3)
    for name in ("last_use", "hits", "first", "written", "reader", "cap", "pinned", "static", "asked", "turn"):
        assert getattr(facts, name)[2] == getattr(fresh, name)[2]
        assert getattr(facts, name)[1] != getattr(fresh, name)[1]
