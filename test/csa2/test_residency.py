"""Roles of pages and the order of demotion: against the rules written as a loop."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_rows import (
    LADDER,
    SIZE,
    TURNOVER,
    facts_of,
    fit,
    in_use,
    is_shared,
    ladders,
    some_rows,
    with_shared,
)
from page_stores import LADDERS

from csa2.facts import NO_CAP
from csa2.formats import FP8, PLAIN, UNMAPPED, FormatLadder
from csa2.residency import DemotionRound, demotion_steps
from csa2.value import FORMAT_ERRORS, IN_USE

SMALL = LADDER.end
MERGED = LADDERS["csa2-8x"]
fixed = settings(derandomize=True, deadline=None, max_examples=100)
Round = DemotionRound


def steps_of(
    rows: list[dict], ladder: FormatLadder = LADDER, *, upto: DemotionRound = Round.LAST, tail: int | None = None
) -> list[tuple[int, int, int]]:
    facts, formats, usage = facts_of(rows)
    tail = ladder.tail if tail is None else tail
    steps = demotion_steps(facts, formats, usage, SIZE, ladder, TURNOVER, tail, upto=upto)
    return list(zip(steps.pages.tolist(), steps.source.tolist(), steps.target.tolist(), strict=True))


def path_of(row: dict, ladder: FormatLadder) -> list[tuple[DemotionRound, int]]:
    """Where a full page goes, and in which rounds."""
    present, shared, used = row["format"], is_shared(row), in_use(row)
    below = range(ladder.warm, (ladder.guard if row["first"] else ladder.end) + 1)
    if row["hot"] and present == PLAIN:
        path = [(Round.HOT, FP8), *((Round.LAST, f) for f in below if f > FP8)]
    elif shared or row["first"]:
        path = [(Round.USED if used else Round.SHARED if f == ladder.warm else Round.SHARED_END, f) for f in below]
        # Nothing goes below 4 bits before all private pages have; in the model dtype a shared page saves nothing.
        role = ladder.tail if ladder.shared is None else ladder.shared
        gentle = min(role, ladder.warm) if shared and role != PLAIN else FP8
        if present < gentle:
            path = [(Round.PRIVATE, gentle), *(step for step in path if step[1] > gentle)]
    else:
        role = ladder.warm if row["warm"] or row["hot"] else max(ladder.warm, ladder.tail)
        path = [(Round.USED if used and f > role else Round.PRIVATE, f) for f in below]
    return [(Round.LAST if f > row["cap"] else place, f) for place, f in path if f > present]


def by_the_rules(rows: list[dict], ladder: FormatLadder, upto: DemotionRound) -> list[tuple[int, int, int]]:
    """Every step of every page with its place in the order, sorted."""
    found = []
    for page, row in enumerate(rows, 1):
        present, dearest = row["format"], 0.0
        if row["written"] < SIZE or present == UNMAPPED:
            continue
        worth = (1 + math.log2(1 + row["hits"])) * 2 ** -row["age"] * (IN_USE if in_use(row) else 1)
        for place, target in path_of(row, ladder):
            loss = FORMAT_ERRORS[ladder.names[target]] ** 2 - FORMAT_ERRORS.get(ladder.names[present], 0) ** 2
            dearest = max(dearest, loss / (ladder.page_bytes[present] - ladder.page_bytes[target]))
            if place <= upto:
                found.append((place, row["priority"], worth * dearest, row["last_use"], page, present, target))
            present = target
    return [(page, source, target) for *_, page, source, target in sorted(found)]


@fixed
@given(some_rows(), ladders(), st.sampled_from(list(DemotionRound)))
def test_steps_are_what_the_rules_say(rows, ladder, upto):
    rows = fit(rows, ladder)
    assert steps_of(rows, ladder, upto=upto) == by_the_rules(rows, ladder, upto)


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
def test_shared_pages_give_up_their_format_only_when_no_idle_private_page_can_go_further(rows, ladder):
    rows = fit(rows, ladder)
    at = {page: row["format"] for page, row in enumerate(rows, 1)}
    movable = {p for p, row in enumerate(rows, 1) if row["written"] == SIZE and at[p] != UNMAPPED}
    idle = [p for p in movable if not in_use(rows[p - 1]) and rows[p - 1]["cap"] == NO_CAP]
    private = [p for p in idle if not is_shared(rows[p - 1]) and not rows[p - 1]["first"]]
    role = ladder.tail if ladder.shared is None else ladder.shared
    for page, source, target in steps_of(rows, ladder):
        row = rows[page - 1]
        if is_shared(row) and target > max(FP8, min(role, ladder.warm)) and not (row["hot"] and source == PLAIN):
            assert all(at[p] == ladder.end for p in private)
            if in_use(row):
                assert all(at[p] == (ladder.guard if rows[p - 1]["first"] else ladder.end) for p in idle)
        at[page] = target


@fixed
@given(some_rows(), ladders())
def test_what_a_running_request_reads_keeps_the_format_of_its_role_until_the_rounds_of_used_pages(rows, ladder):
    rows = fit(rows, ladder)
    for page, _, target in steps_of(rows, ladder, upto=Round.SHARED_END):
        row = rows[page - 1]
        if not in_use(row):
            continue
        assert not (row["hot"] and row["format"] == PLAIN)
        if is_shared(row) or row["first"]:
            assert target <= ladder.warm
        else:
            assert target <= max(ladder.warm, ladder.tail if not (row["warm"] or row["hot"]) else 0)


@fixed
@given(some_rows(), ladders())
def test_caps_hold_until_the_last_round(rows, ladder):
    rows = fit(rows, ladder)
    assert all(target <= rows[page - 1]["cap"] for page, _, target in steps_of(rows, ladder, upto=Round.HOT))


@fixed
@given(some_rows(), ladders(), st.integers(0, 5))
def test_more_rounds_only_add_steps(rows, ladder, upto):
    rows = fit(rows, ladder)
    some = steps_of(rows, ladder, upto=DemotionRound(upto))
    assert steps_of(rows, ladder)[: len(some)] == some


@fixed
@given(some_rows(), ladders())
def test_asking_changes_nothing(rows, ladder):
    facts, formats, usage = facts_of(fit(rows, ladder))
    arrays = [*vars(facts).values(), formats, *vars(usage).values()]
    kept = [x.clone() for x in arrays]
    demotion_steps(facts, formats, usage, SIZE, ladder, TURNOVER, ladder.tail)
    assert all(torch.equal(x, y) for x, y in zip(kept, arrays, strict=True))


def test_rounds_come_in_order():
    rows = [{"hot": True}, {"format": FP8}, {"hits": 1}, {"first": True}, {}, {"format": FP8, "hits": 3}]
    assert steps_of(rows) == [
        (4, PLAIN, FP8),  # to FP8 costs least, and of a page that nobody shares less
        (3, PLAIN, FP8),
        (5, PLAIN, SMALL),
        (2, FP8, SMALL),
        (4, FP8, SMALL),  # protected
        (3, FP8, SMALL),
        (6, FP8, SMALL),
        (1, PLAIN, FP8),  # hot
        (1, FP8, SMALL),  # last
    ]


def test_pages_in_use_are_merged_after_idle_ones_of_any_worth():
    rows = [{"users": 1, "age": 3}, {"hits": 3, "age": 0}]
    steps = steps_of(rows, replace(MERGED, tail=MERGED.warm))
    assert steps.index((2, MERGED.warm, MERGED.end)) < steps.index((1, MERGED.warm, MERGED.end))


def test_within_a_round_the_page_worth_least_goes_first_and_ties_go_by_use_and_page():
    rows = [{"age": 0}, {"age": 2}, {"age": 1, "last_use": 2}, {"age": 1, "last_use": 1}, {"age": 2}]
    assert [page for page, _, _ in steps_of(rows)] == [2, 5, 4, 3, 1]


def test_hits_make_up_for_age():
    shared = [{"hits": 3, "age": 1, "format": FP8}, {"hits": 1, "age": 0, "format": FP8}]  # 3/2 against 2
    assert [page for page, _, _ in steps_of(shared)] == [1, 2]


def test_lower_priorities_go_first():
    assert [page for page, _, _ in steps_of([{"age": 3, "priority": 2}, {"age": 0}])] == [2, 1]


def test_an_idle_page_goes_before_one_in_use():
    assert [page for page, _, _ in steps_of([{"users": 1, "age": 2}, {"age": 0}])] == [2, 1]


def test_old_pages_in_use_go_as_far_as_their_role_before_eviction():
    """The controller says how far: in the rounds before eviction, no further."""
    rows = [{"users": 1}, {"users": 1, "warm": True}]
    ladder = LADDERS["csa2-8x"]
    for tail in (ladder.warm, ladder.end):
        steps = steps_of(rows, ladder, upto=Round.SHARED_END, tail=tail)
        assert max(target for page, _, target in steps if page == 1) == tail
        assert max(target for page, _, target in steps if page == 2) == ladder.warm


@pytest.mark.parametrize(
    ("shared", "path"), [("bf16", [FP8, SMALL]), ("fp8", [FP8, SMALL]), ("fp4", [SMALL]), (None, [SMALL])]
)
@pytest.mark.parametrize("why", [{"hits": 1}, {"pinned": True}])
def test_shared_pages_pass_through_the_format_of_their_role(shared, path, why):
    assert [target for _, _, target in steps_of([why], with_shared(shared))] == path


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


def test_open_pages_and_pages_at_the_end_of_the_ladder_stay():
    assert steps_of([{"written": SIZE - 1}, {"format": SMALL}, {"format": UNMAPPED, "written": 0}]) == []


def test_no_page_at_all():
    assert steps_of([]) == []


def test_the_padding_page_is_never_demoted():
    assert 0 not in [page for page, _, _ in steps_of([{}])]


def test_rounds_are_numbered_in_their_order():
    assert all(a < b for a, b in pairwise(DemotionRound))
