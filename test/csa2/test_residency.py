"""Roles of pages and the order of demotion: against the rules written as a loop."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_rows import LADDER, SIZE, facts_of, fit, ladders, some_rows, with_shared
from page_stores import LADDERS

from csa2.formats import FP8, PLAIN, UNMAPPED, FormatLadder
from csa2.residency import DemotionRound, demotion_steps

SMALL = LADDER.end
MERGED = LADDERS["csa2-8x"]
fixed = settings(derandomize=True, deadline=None, max_examples=200)


def steps_of(rows: list[dict], ladder: FormatLadder = LADDER, *, spare_hot: bool = False) -> list[tuple[int, int, int]]:
    facts, formats, hot = facts_of(rows)
    steps = demotion_steps(facts, formats, hot, SIZE, ladder, spare_hot=spare_hot)
    return list(zip(steps.pages.tolist(), steps.source.tolist(), steps.target.tolist(), strict=True))


def by_the_rules(rows: list[dict], ladder: FormatLadder, *, spare_hot: bool = False) -> list[tuple[int, int, int]]:
    """Every step of every page with its place in the order, sorted."""
    found = []
    for page, row in enumerate(rows, 1):
        present, shared = row["format"], row["hits"] > 0
        if row["written"] < SIZE or present == UNMAPPED:
            continue
        last = ladder.guard if row["first"] else ladder.end
        role = ladder.tail if ladder.shared is None else ladder.shared
        # Nothing goes below 4 bits before all private pages have; in the model dtype a shared page saves nothing.
        gentle = min(role, ladder.warm) if shared and role != PLAIN else FP8
        if row["hot"] and present == PLAIN:
            path = [] if spare_hot else [(DemotionRound.HOT, FP8), (DemotionRound.LAST, last)]
        elif not shared and not row["first"]:
            path = [(DemotionRound.COLD_PRIVATE, ladder.warm), (DemotionRound.SHRINK, last)]
        else:
            path = [(DemotionRound.SQUEEZE, ladder.warm), (DemotionRound.SHRINK_PROTECTED, last)]
            if present == PLAIN:
                path.insert(0, (DemotionRound.PROTECTED, gentle))
        for place, target in path:
            if target > present:
                found.append((place, row["use"], page, present, target))
                present = target
    return [(page, source, target) for _, _, page, source, target in sorted(found)]


@fixed
@given(some_rows(), ladders(), st.booleans())
def test_steps_are_what_the_rules_say(rows, ladder, spare_hot):
    rows = fit(rows, ladder)
    assert steps_of(rows, ladder, spare_hot=spare_hot) == by_the_rules(rows, ladder, spare_hot=spare_hot)


@fixed
@given(some_rows(), ladders())
def test_the_steps_of_a_page_lead_down_to_the_end_of_the_ladder(rows, ladder):
    """One rung after the other, and first pages only as far as they are guarded."""
    rows = fit(rows, ladder)
    at = {page: row["format"] for page, row in enumerate(rows, 1)}
    for page, source, target in steps_of(rows, ladder):
        assert source == at[page] < target
        at[page] = target
    for page, row in enumerate(rows, 1):
        movable = row["written"] == SIZE and row["format"] != UNMAPPED
        assert at[page] == ((ladder.guard if row["first"] else ladder.end) if movable else row["format"])


@fixed
@given(some_rows(), ladders())
def test_nothing_is_merged_before_everything_that_may_is_at_4_bits(rows, ladder):
    """Private pages go first, and protected ones stay at 4 bits or more until all private ones are as small as can be."""
    rows = fit(rows, ladder)
    at = {page: row["format"] for page, row in enumerate(rows, 1)}
    cold = [
        p
        for p, row in enumerate(rows, 1)
        if row["written"] == SIZE and at[p] != UNMAPPED and not (row["hot"] and at[p] == 0)
    ]
    private = [p for p in cold if rows[p - 1]["hits"] == 0 and not rows[p - 1]["first"]]
    for page, source, target in steps_of(rows, ladder):
        if page in cold and target > ladder.warm and source <= ladder.warm:
            assert all(at[p] >= ladder.warm for p in private)
            if page not in private:
                assert all(at[p] == ladder.end for p in private)
                assert all(at[p] >= ladder.warm for p in cold)
        if page not in cold:
            assert all(at[p] == (ladder.guard if rows[p - 1]["first"] else ladder.end) for p in cold)
        at[page] = target


@fixed
@given(some_rows(), ladders(), st.permutations(range(12)))
def test_asking_changes_nothing_and_the_order_of_hot_pages_does_not_matter(rows, ladder, order):
    facts, formats, hot = facts_of(fit(rows, ladder))
    kept = [x.clone() for x in (facts.last_use, facts.hits, facts.first, facts.written, formats)]
    first = demotion_steps(facts, formats, hot, SIZE, ladder)
    shuffled = hot[torch.tensor([i for i in order if i < hot.numel()], dtype=torch.int64)]
    again = demotion_steps(facts, formats, torch.cat((shuffled, shuffled)), SIZE, ladder)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("pages", "source", "target"))
    after = (facts.last_use, facts.hits, facts.first, facts.written, formats)
    assert all(torch.equal(x, y) for x, y in zip(kept, after, strict=True))


@fixed
@given(some_rows(), ladders())
def test_sparing_hot_pages_leaves_out_their_rounds_only(rows, ladder):
    rows = fit(rows, ladder)
    hot = {page for page, row in enumerate(rows, 1) if row["hot"] and row["format"] == PLAIN}
    all_steps = steps_of(rows, ladder)
    assert steps_of(rows, ladder, spare_hot=True) == [step for step in all_steps if step[0] not in hot]


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
        (2, FP8, SMALL),  # cold and private
        (5, PLAIN, SMALL),
        (3, PLAIN, FP8),  # shared, first
        (4, PLAIN, FP8),
        (3, FP8, SMALL),  # squeeze: protected
        (4, FP8, SMALL),
        (6, FP8, SMALL),
        (1, PLAIN, FP8),  # hot
        (1, FP8, SMALL),  # last
    ]


def test_rounds_come_in_order_where_entries_are_merged():
    rows = [
        {"hot": True},
        {"format": FP8},
        {"hits": 1},
        {"first": True},
        {},
        {"format": FP8, "hits": 3},
        {"format": 3},
        {"hot": True, "first": True},
    ]
    warm, end = MERGED.warm, MERGED.end
    assert (warm, end, MERGED.guard) == (2, 3, 2)
    assert steps_of(rows, MERGED) == [
        (2, FP8, warm),  # cold and private
        (5, PLAIN, warm),
        (3, PLAIN, FP8),  # shared, first
        (4, PLAIN, FP8),
        (2, warm, end),  # shrink: private
        (5, warm, end),
        (3, FP8, warm),  # squeeze: protected
        (4, FP8, warm),
        (6, FP8, warm),
        (3, warm, end),  # shrink: protected, but for first ones
        (6, warm, end),
        (1, PLAIN, FP8),  # hot
        (8, PLAIN, FP8),
        (1, FP8, end),  # last
        (8, FP8, warm),
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


@pytest.mark.parametrize(
    ("shared", "path"), [("bf16", [FP8, SMALL]), ("fp8", [FP8, SMALL]), ("fp4", [SMALL]), (None, [SMALL])]
)
def test_shared_pages_pass_through_the_format_of_their_role(shared, path):
    assert [target for _, _, target in steps_of([{"hits": 1}], with_shared(shared))] == path


@pytest.mark.parametrize(
    ("shared", "path"),
    [
        ("bf16", ["fp8", "fp4", "csa2-4x"]),
        ("fp8", ["fp8", "fp4", "csa2-4x"]),
        ("fp4", ["fp4", "csa2-4x"]),
        (None, ["fp4", "csa2-4x"]),  # as private pages, but in the round of the protected
    ],
)
def test_shared_pages_are_merged_last(shared, path):
    ladder = with_shared(shared, LADDERS["csa2-4x"])
    assert [ladder.names[target] for _, _, target in steps_of([{"hits": 1}], ladder)] == path


@pytest.mark.parametrize("shared", ["bf16", "fp8", "fp4", None])
def test_a_first_page_that_nobody_shares_passes_through_fp8(shared):
    assert steps_of([{"first": True}], with_shared(shared)) == [(1, PLAIN, FP8), (1, FP8, SMALL)]


def test_k8v4_is_a_rung_between():
    ladder = with_shared("k8v4", LADDERS["k8v4"])
    assert ladder.names == ("bf16", "fp8", "k8v4", "fp4")
    steps = steps_of([{"hits": 1}, {}, {"format": 2}, {"first": True}], ladder)
    assert steps == [(2, 0, 3), (3, 2, 3), (1, 0, 2), (4, 0, 1), (1, 2, 3), (4, 1, 3)]


def test_open_pages_and_pages_at_the_end_of_the_ladder_stay():
    assert steps_of([{"written": SIZE - 1}, {"format": SMALL}, {"format": UNMAPPED, "written": 0}]) == []


def test_no_page_at_all():
    assert steps_of([]) == []


def test_the_padding_page_is_never_demoted():
    facts, formats, hot = facts_of([{}])
    assert 0 not in demotion_steps(facts, formats, hot, SIZE, LADDER).pages.tolist()


def test_rounds_are_numbered_in_their_order():
    assert all(a < b for a, b in pairwise(DemotionRound))
