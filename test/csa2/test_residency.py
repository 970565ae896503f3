"""Roles of pages and the order of demotion: against the rules written as a loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2.formats import FP8, PLAIN, SMALL, UNMAPPED
from csa2.residency import DemotionRound, PageFacts, demotion_steps, sealed_format

SIZE = 4
SHARED_FORMATS = {"bf16": PLAIN, "fp8": FP8, "fp4": SMALL}
fixed = settings(derandomize=True, deadline=None, max_examples=200)


def facts_of(rows: list[dict]) -> tuple[PageFacts, torch.Tensor, torch.Tensor]:
    """Facts, formats and hot pages of pages 1, 2, ...; a row may give use, hits, first, written, format and hot."""
    facts = PageFacts.empty(len(rows) + 1)
    formats = torch.full((len(rows) + 1,), UNMAPPED, dtype=torch.int8)
    formats[0] = PLAIN
    hot = []
    for page, row in enumerate(rows, 1):
        facts.last_use[page] = row.get("use", 0)
        facts.hits[page] = row.get("hits", 0)
        facts.first[page] = row.get("first", False)
        facts.written[page] = row.get("written", SIZE)
        formats[page] = row.get("format", PLAIN)
        if row.get("hot"):
            hot.append(page)
    return facts, formats, torch.tensor(hot, dtype=torch.int64)


def steps_of(rows: list[dict], shared: int = FP8) -> list[tuple[int, int, int]]:
    facts, formats, hot = facts_of(rows)
    steps = demotion_steps(facts, formats, hot, SIZE, shared)
    return list(zip(steps.pages.tolist(), steps.source.tolist(), steps.target.tolist(), strict=True))


def by_the_rules(rows: list[dict], shared: int) -> list[tuple[int, int, int]]:
    """Every step of every page with its place in the order, sorted."""
    found = []
    for page, row in enumerate(rows, 1):
        present, hot = row["format"], row["hot"]
        if row["written"] < SIZE or present in (UNMAPPED, SMALL):
            continue
        protected = row["hits"] > 0 or row["first"]
        late = (DemotionRound.SQUEEZE, protected)
        if present == FP8:
            path = [(late, SMALL)]
        elif hot:
            path = [((DemotionRound.HOT, False), FP8), ((DemotionRound.LAST, False), SMALL)]
        elif not protected:
            path = [((DemotionRound.COLD_PRIVATE, False), SMALL)]
        elif row["hits"] > 0 and shared == SMALL:
            path = [((DemotionRound.PROTECTED, False), SMALL)]
        else:
            path = [((DemotionRound.PROTECTED, False), FP8), (late, SMALL)]
        for place, target in path:
            found.append((place, row["use"], page, present, target))
            present = target
    return [(page, source, target) for _, _, page, source, target in sorted(found)]


some_rows = st.lists(
    st.fixed_dictionaries(
        {
            "use": st.integers(0, 4),
            "hits": st.integers(0, 2),
            "first": st.booleans(),
            "written": st.sampled_from([0, SIZE - 1, SIZE, SIZE, SIZE]),
            "format": st.sampled_from([PLAIN, PLAIN, FP8, SMALL, UNMAPPED]),
            "hot": st.booleans(),
        }
    ),
    max_size=12,
)


@fixed
@given(some_rows, st.sampled_from(sorted(SHARED_FORMATS.values())))
def test_steps_are_what_the_rules_say(rows, shared):
    assert steps_of(rows, shared) == by_the_rules(rows, shared)


@fixed
@given(some_rows, st.sampled_from(sorted(SHARED_FORMATS.values())))
def test_the_steps_of_a_page_lead_from_its_format_to_the_end_of_the_ladder(rows, shared):
    at = {page: row["format"] for page, row in enumerate(rows, 1)}
    for page, source, target in steps_of(rows, shared):
        assert source == at[page] < target
        at[page] = target
    for page, row in enumerate(rows, 1):
        movable = row["written"] == SIZE and row["format"] in (PLAIN, FP8)
        assert at[page] == (SMALL if movable else row["format"])


@fixed
@given(some_rows, st.permutations(range(12)))
def test_asking_changes_nothing_and_the_order_of_hot_pages_does_not_matter(rows, order):
    facts, formats, hot = facts_of(rows)
    kept = [x.clone() for x in (facts.last_use, facts.hits, facts.first, facts.written, formats)]
    first = demotion_steps(facts, formats, hot, SIZE, FP8)
    shuffled = hot[torch.tensor([i for i in order if i < hot.numel()], dtype=torch.int64)]
    again = demotion_steps(facts, formats, torch.cat((shuffled, shuffled)), SIZE, FP8)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("pages", "source", "target"))
    after = (facts.last_use, facts.hits, facts.first, facts.written, formats)
    assert all(torch.equal(x, y) for x, y in zip(kept, after, strict=True))


def test_rounds_come_in_order():
    rows = [
        {"hot": True},
        {"format": FP8},
        {"hits": 1},
        {"first": True},
        {},
        {"format": FP8, "hits": 3},
    ]
    assert steps_of(rows) == [
        (5, PLAIN, SMALL),  # cold and private
        (3, PLAIN, FP8),  # shared, first
        (4, PLAIN, FP8),
        (2, FP8, SMALL),  # squeeze: nobody protects it
        (3, FP8, SMALL),
        (4, FP8, SMALL),
        (6, FP8, SMALL),
        (1, PLAIN, FP8),  # hot
        (1, FP8, SMALL),  # last
    ]


def test_the_page_used_longest_ago_goes_first_and_ties_go_by_page():
    uses = [7, 3, 5, 3, 9]
    assert [page for page, _, _ in steps_of([{"use": use} for use in uses])] == [2, 4, 3, 1, 5]


def test_rounds_outrank_age():
    assert steps_of([{"use": 0, "hits": 1}, {"use": 9}])[0][0] == 2
    assert steps_of([{"use": 0, "hot": True}, {"use": 9, "first": True}])[0][0] == 2


def test_protected_pages_are_squeezed_last():
    rows = [{"format": FP8, "use": 0, "first": True}, {"format": FP8, "use": 9}, {"format": FP8, "use": 1, "hits": 1}]
    assert [page for page, _, _ in steps_of(rows)] == [2, 1, 3]


@pytest.mark.parametrize(("shared", "path"), [("bf16", [FP8, SMALL]), ("fp8", [FP8, SMALL]), ("fp4", [SMALL])])
def test_shared_pages_pass_through_the_format_of_their_role(shared, path):
    assert [target for _, _, target in steps_of([{"hits": 1}], SHARED_FORMATS[shared])] == path


@pytest.mark.parametrize("shared", SHARED_FORMATS.values())
def test_a_first_page_that_nobody_shares_passes_through_fp8(shared):
    assert steps_of([{"first": True}], shared) == [(1, PLAIN, FP8), (1, FP8, SMALL)]


def test_open_pages_and_pages_at_the_end_of_the_ladder_stay():
    assert steps_of([{"written": SIZE - 1}, {"format": SMALL}, {"format": UNMAPPED, "written": 0}]) == []


def test_no_page_at_all():
    assert steps_of([]) == []


def test_the_padding_page_is_never_demoted():
    facts, formats, hot = facts_of([{}])
    assert 0 not in demotion_steps(facts, formats, hot, SIZE, FP8).pages.tolist()


@pytest.mark.parametrize("shared", SHARED_FORMATS.values())
def test_sealed_pages_take_the_format_of_their_role(shared):
    facts, _, _ = facts_of([{}, {"hits": 1}, {"first": True}, {"first": True, "hits": 5}])
    chosen = torch.tensor([4, 2, 1, 3])
    assert sealed_format(facts, chosen, shared).tolist() == [PLAIN, shared, SMALL, PLAIN]


def test_forgotten_pages_are_as_new():
    facts, _, _ = facts_of([{"use": 5, "hits": 2, "first": True, "written": 3}] * 2)
    facts.forget(torch.tensor([2]))
    fresh = PageFacts.empty(3)
    for name in ("last_use", "hits", "first", "written"):
        assert getattr(facts, name)[2] == getattr(fresh, name)[2]
        assert getattr(facts, name)[1] != getattr(fresh, name)[1]
