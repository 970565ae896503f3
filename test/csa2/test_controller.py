"""The target ratio: bounds, monotone in pressure, at rest under constant demand; formats that make up a ratio."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_stores import CLASSES, GEOMETRY, LADDERS

from csa2.controller import MAX_RATIO, MIN_RATIO, Mix, RatioController, deal, mix_for, rungs
from csa2.formats import MERGE, FormatLadder, even_heads, make_ladder

fixed = settings(derandomize=True, deadline=None, max_examples=200)
watermarks = st.tuples(st.floats(0.02, 1), st.floats(0, 0.99)).map(lambda x: (x[0], x[0] * x[1]))
uses = st.lists(st.floats(0, 2), max_size=60)
LADDER_2X = LADDERS["csa2-2x"]


def run(marks: tuple[float, float], steps: list[float]) -> list[float]:
    controller = RatioController(*marks, 64)
    targets = []
    for use in steps:
        controller.look(use)
        targets.append(controller.target)
    return targets


@fixed
@given(watermarks, uses)
def test_the_target_stays_within_its_bounds_and_moves_by_one_step(marks, steps):
    targets = run(marks, steps)
    assert all(MIN_RATIO <= target <= MAX_RATIO for target in targets)
    factor = 2 ** (1 / RatioController(*marks, 64).steps_per_octave)
    pairs = zip([MIN_RATIO, *targets], targets, strict=False)
    assert all(max(a, b) / min(a, b) <= factor * (1 + 1e-9) for a, b in pairs)


@fixed
@given(watermarks, st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), max_size=60))
def test_more_pressure_never_gives_a_smaller_target(marks, steps):
    less = run(marks, [use for use, _ in steps])
    more = run(marks, [use + extra for use, extra in steps])
    assert all(a <= b for a, b in zip(less, more, strict=True))


@fixed
@given(watermarks, st.floats(0, 20), st.floats(0, 1), uses)
def test_at_constant_demand_it_comes_to_rest(marks, demand, fixed_share, before):
    """Whatever part of the bytes follows the target, and wherever it started."""
    controller = RatioController(*marks, 64)
    for use in before:
        controller.look(use)
    steps = [controller.look(demand * (fixed_share + (1 - fixed_share) / controller.target)) for _ in range(1500)]
    still = steps.index(0)
    assert not any(steps[still:])
    assert len({step for step in steps if step}) <= 1, "it turned round"


def test_it_rises_above_the_high_watermark_falls_below_the_low_one_and_rests_between():
    controller = RatioController(0.8, 0.6, 64)
    assert [controller.look(use) for use in (0.7, 0.81, 0.8, 0.6, 0.59, 0.1)] == [0, 1, 0, 0, -1, 0]
    assert controller.changes_total == 2


def test_it_looks_every_so_many_generated_tokens():
    controller = RatioController(0.8, 0.6, 64)
    assert [controller.is_due(16) for _ in range(8)] == [False, False, False, True] * 2
    assert controller.is_due(1000)


def test_a_fixed_target_does_not_follow_memory():
    controller = RatioController(0.8, 0.6, 64, ratio=2.5)
    assert (controller.look(1.0), controller.target, controller.is_due(64)) == (0, 2.5, False)
    controller.fix(None)
    assert controller.is_automatic
    assert 2 < controller.target < 3
    assert controller.look(1.0) == 1
    controller.fix(8)
    assert controller.target == 8


def test_it_backs_off_to_the_rung_below_and_stays_there_until_it_is_set():
    controller = RatioController(0.8, 0.6, 64, ratio=8)
    assert (controller.back_off(), controller.target) == (False, 8), "a fixed target is somebody's choice"
    controller.fix(None)
    targets = []
    for _ in range(4):
        assert controller.look(1.0) == 0, "at its ceiling"
        backed_off = controller.back_off()
        targets.append((backed_off, controller.target, controller.ceiling))
    assert targets == [(True, 4, 4), (True, 2, 2), (True, 1, 1), (False, 1, 1)]
    controller.fix(None)
    assert (controller.look(1.0), controller.ceiling) == (1, MAX_RATIO)


@fixed
@given(watermarks, st.lists(st.one_of(st.floats(0, 2), st.none()), max_size=60))
def test_after_backing_off_memory_never_asks_for_more_than_the_ceiling(marks, steps):
    """None stands for backing off."""
    controller = RatioController(*marks, 64)
    for use in steps:
        before = controller.target
        if use is None:
            assert controller.back_off() == (before > MIN_RATIO)
            assert controller.target < before or before == MIN_RATIO
            assert controller.target in (1, 2, 4)
        else:
            controller.look(use)
        assert MIN_RATIO <= controller.target <= controller.ceiling <= MAX_RATIO


def whole_ladder() -> FormatLadder:
    """With every rung there is."""
    from dataclasses import replace

    ladder = make_ladder(GEOMETRY, "fp4", "csa2-2x", "fp8", {"csa2-2x": even_heads("csa2-2x", CLASSES, GEOMETRY)})
    smaller = [LADDERS[name].layouts[-1] for name in list(MERGE)[1:]]
    return replace(ladder, layouts=(*ladder.layouts, *smaller))


@pytest.mark.parametrize(
    ("ratio", "larger", "smaller", "share"),
    [
        (1, "fp4", "fp4", 1),
        (2, "csa2-2x", "csa2-2x", 1),
        (8, "csa2-8x", "csa2-8x", 1),
        (4 / 3, "fp4", "csa2-2x", 0.5),
        (16 / 3, "csa2-4x", "csa2-8x", 0.5),
    ],
)
def test_a_ratio_is_made_up_of_the_formats_next_to_it(ratio, larger, smaller, share):
    ladder = whole_ladder()
    mix = mix_for(ratio, ladder)
    assert (ladder.names[mix.smaller], mix.share) in ((smaller, pytest.approx(share)), (larger, 1.0))
    assert mix.share == 1 or ladder.names[mix.larger] == larger


@fixed
@given(st.floats(1, 8))
def test_the_bytes_of_a_mix_are_those_of_its_ratio(ratio):
    ladder = whole_ladder()
    of = {index: 1 / rung for rung, index in rungs(ladder)}
    mix = mix_for(ratio, ladder)
    assert mix.share * of[mix.smaller] + (1 - mix.share) * of[mix.larger] == pytest.approx(1 / ratio)
    pages = torch.bincount(deal(mix, torch.arange(2000)), minlength=7) / 2000
    dealt = sum(float(pages[index]) * share for index, share in of.items())
    assert dealt == pytest.approx(1 / ratio, abs=0.002)


def test_a_ladder_without_smaller_formats_gives_what_it_has():
    assert mix_for(5, LADDERS["fp4"]) == Mix(2, 2)
    assert mix_for(5, LADDER_2X) == Mix(LADDER_2X.end, LADDER_2X.end)


@fixed
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_only_adds_pages(depth, one, other):
    depths = torch.arange(depth, depth + 50)
    few, many = (deal(Mix(2, 3, share), depths) for share in sorted((one, other)))
    assert bool((few <= many).all())
    assert torch.equal(few, deal(Mix(2, 3, min(one, other)), depths))
