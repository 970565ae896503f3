"""Merging entries: what must hold for any page, and groups found by a loop in float64."""

import math

import pytest
import torch
from codec_bounds import U32
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from csa2.codec.merging import WEIGHT_FLOOR, merge_entries
from sgl_kernels.page_codec.reference import Entries

fixed = settings(derandomize=True, deadline=None, max_examples=80)
DIM = 16


def some_entries(count: int, seed: int, heads: int = 2, pages: int = 2, *, biased: bool = False) -> tuple[Entries, Tensor]:
    """Entries that come in clusters, as neighbouring tokens do, and their importance."""
    random = torch.Generator().manual_seed(seed)
    shape = (pages, heads, count, DIM)
    centre = torch.randint(0, max(1, count // 3), (pages, heads, count), generator=random)
    keys, values = (
        torch.randn(pages, heads, count, DIM, generator=random).gather(2, centre[..., None].expand(shape))
        + 0.2 * torch.randn(shape, generator=random)
        for _ in range(2)
    )
    bias = torch.rand(shape[:3], generator=random) * 3 if biased else None
    return Entries(keys, values, bias), torch.rand(shape[:3], generator=random).square() * 5


def weights_of(importance: Tensor) -> Tensor:
    """What the docstrings say: importance in units of the mean of the page, and a floor."""
    wide = importance.double()
    return wide / wide.mean(-1, keepdim=True).clamp(min=2.0**-126) + WEIGHT_FLOOR


def groups_of(merged: Entries, entries: Entries) -> Tensor:
    """(pages, heads, groups) int64: which entry each group has its key from, the first with that key."""
    same = (merged.keys[:, :, :, None] == entries.keys.float()[:, :, None]).all(-1)
    assert bool(same.any(-1).all()), "a key of a group is no key of an entry"
    return same.int().argmax(-1)


def cases():
    counts = st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
    return st.tuples(counts, st.integers(0, 2**31), st.booleans())


@fixed
@given(cases())
def test_mass_is_conserved_and_keys_are_those_of_pivots(case):
    (count, groups), seed, biased = case
    entries, importance = some_entries(count, seed, biased=biased)
    merged = merge_entries(entries, importance, groups)
    assert merged.keys.shape == merged.values.shape == (2, 2, groups, DIM)
    assert merged.bias is not None
    pivots = groups_of(merged, entries)
    # In their order of position, each once.
    assert bool((pivots.diff(dim=-1) > 0).all())
    weight = weights_of(importance)
    # The most important entries: none that was left is worth more than one that was taken.
    least = weight.gather(-1, pivots).amin(-1, keepdim=True)
    others = weight.scatter(-1, pivots, 0.0)
    assert bool((others <= least * (1 + 8 * U32)).all())
    before = 0 if entries.bias is None else entries.bias.double().gather(-1, pivots)
    mass = (merged.bias.double() - before).exp() * weight.gather(-1, pivots)
    # A sum of at most 24 weights in fp32, its quotient, its logarithm and one rounding more of a bias of at most 10.
    assert torch.allclose(mass.sum(-1), weight.sum(-1), rtol=(24 + 12 + 16) * U32, atol=0)
    # The means of the groups, weighted with their mass, are the weighted mean of the page.
    total = (mass[..., None] * merged.values.double()).sum(-2)
    want = (weight[..., None] * entries.values.double()).sum(-2)
    size = (weight[..., None] * entries.values.double().abs()).sum(-2)
    assert bool(((total - want).abs() <= (24 + 12 + 16) * 2 * U32 * size).all())


@fixed
@given(cases())
def test_every_entry_is_in_the_group_that_is_nearest(case):
    """By a loop in float64, where no entry is as near to another group."""
    (count, groups), seed, biased = case
    entries, importance = some_entries(count, seed, heads=1, pages=1, biased=biased)
    merged = merge_entries(entries, importance, groups)
    assert merged.bias is not None
    pivots = groups_of(merged, entries)[0, 0].tolist()
    keys, values, weight = entries.keys[0, 0].double(), entries.values[0, 0].double(), weights_of(importance)[0, 0]
    spread = [max(float((x - x.mean(0)).square().sum(-1).mean()), 2.0**-126) for x in (keys, values)]
    members: list[list[int]] = [[] for _ in pivots]
    for entry in range(count):
        if entry in pivots:
            members[pivots.index(entry)].append(entry)
            continue
        distance = [
            sum(float((x[entry] - x[p]).square().sum()) / s for x, s in zip((keys, values), spread, strict=True))
            for p in pivots
        ]
        nearest = sorted(range(groups), key=distance.__getitem__)
        assume(groups == 1 or distance[nearest[1]] - distance[nearest[0]] > 1e-4)
        members[nearest[0]].append(entry)
    for group, (pivot, of_group) in enumerate(zip(pivots, members, strict=True)):
        mass = float(weight[of_group].sum())
        mean = (weight[of_group, None] * values[of_group]).sum(0) / mass
        before = 0.0 if entries.bias is None else float(entries.bias[0, 0, pivot])
        assert float(merged.bias[0, 0, group]) == pytest.approx(before + math.log(mass / float(weight[pivot])), abs=1e-5)
        size = (weight[of_group, None] * values[of_group].abs()).sum(0) / mass
        assert bool(((merged.values[0, 0, group].double() - mean).abs() <= (2 * len(of_group) + 8) * U32 * size).all())


@fixed
@given(st.integers(1, 24), st.integers(0, 2**31), st.booleans())
def test_as_many_groups_as_entries_change_nothing(count, seed, biased):
    entries, importance = some_entries(count, seed, biased=biased)
    merged = merge_entries(entries, importance, count)
    assert torch.equal(merged.keys, entries.keys)
    # Multiplied by its weight and divided by it again.
    assert bool(((merged.values - entries.values).abs() <= 3 * U32 * entries.values.abs()).all())
    assert torch.equal(merged.bias, torch.zeros_like(importance) if entries.bias is None else entries.bias)


@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("value", [0.0, 1.0, -300.0])
def test_equal_entries_become_equal_groups(value, groups, count):
    """Whoever joins whom: every group is the entry, and the groups weigh as much as the entries did."""
    x = torch.full((1, 1, count, DIM), value)
    merged = merge_entries(Entries(x, x, None), torch.ones(1, 1, count), groups)
    assert torch.equal(merged.keys, x[:, :, :groups])
    assert torch.allclose(merged.values, x[:, :, :groups], rtol=1e-5)
    assert float(merged.bias.exp().sum()) == pytest.approx(count, rel=1e-5)


@pytest.mark.parametrize("large", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("seed", range(4))
def test_what_does_not_differ_has_no_say(seed, which, large):
    """Keys that are all equal, as of a repeated token without rotation, leave it to the values; and the other way round."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 64, generator=random)
    owner = torch.arange(64) % 4
    moving = (centres[owner] + 0.05 * torch.randn(64, 64, generator=random))[None, None]
    still = (large * torch.randn(64, generator=random)).expand(1, 1, 64, 64)
    importance = torch.full((1, 1, 64), 0.5)
    importance[..., :4] = 1.0
    entries = Entries(still, moving, None) if which == "keys" else Entries(moving, still, None)
    merged = merge_entries(entries, importance, 4)
    # Sixteen in each group: the pivot, with weight 1, and fifteen with 0.5, in units of the mean, and the floor.
    mean = float(importance.mean())
    ratio = 1 + 15 * (0.5 / mean + WEIGHT_FLOOR) / (1 / mean + WEIGHT_FLOOR)
    assert torch.allclose(merged.bias, torch.full((1, 1, 4), math.log(ratio)), rtol=1e-5)


def test_ties_are_decided_the_same_way_each_time_and_for_each_page():
    random = torch.Generator().manual_seed(2)
    x = torch.randn(1, 1, 8, DIM, generator=random).repeat(3, 2, 4, 1)
    entries, importance = Entries(x, x.flip(-1), None), torch.ones(3, 2, 32)
    first, again = (merge_entries(entries, importance, 8) for _ in range(2))
    alone = merge_entries(Entries(x[:1], x[:1].flip(-1), None), importance[:1], 8)
    for name in ("keys", "values", "bias"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert torch.equal(getattr(first, name)[:1], getattr(alone, name))
        assert torch.equal(getattr(first, name)[0], getattr(first, name)[2])
    assert torch.allclose(first.bias.exp().sum(-1), torch.full((3, 2), 32.0))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_the_scale_of_importance_does_not_matter(scale):
    entries, importance = some_entries(16, 3)
    merged = merge_entries(entries, importance * scale, 4)
    if scale == 0:
        assert torch.allclose(merged.bias.exp().sum(-1), torch.full((2, 2), 16.0))
        return
    usual = merge_entries(entries, importance, 4)
    assert torch.equal(merged.keys, usual.keys)
    assert torch.allclose(merged.values, usual.values, rtol=1e-4, atol=1e-5)
    assert torch.allclose(merged.bias, usual.bias, rtol=1e-4, atol=1e-5)


def test_pages_and_heads_do_not_see_each_other():
    entries, importance = some_entries(16, 4, heads=3, pages=4)
    merged = merge_entries(entries, importance, 4)
    for page in range(4):
        for head in range(3):
            one = Entries(entries.keys[page, head][None, None], entries.values[page, head][None, None], None)
            alone = merge_entries(one, importance[page, head][None, None], 4)
            assert torch.equal(alone.keys[0, 0], merged.keys[page, head])
            assert torch.allclose(alone.values[0, 0], merged.values[page, head], rtol=1e-5, atol=1e-6)


def test_an_entry_that_scores_nothing_still_counts():
    """Four entries in two pairs; the second of each pair scores nothing."""
    keys = torch.zeros(1, 1, 4, DIM)
    keys[..., 2:, 0] = 10
    values = keys.roll(1, -1)
    importance = torch.tensor([[[1.0, 0.0, 1.0, 0.0]]])
    merged = merge_entries(Entries(keys, values, None), importance, 2)
    want = math.log((2 + 2 * WEIGHT_FLOOR) / (2 + WEIGHT_FLOOR))
    assert torch.allclose(merged.bias, torch.full((1, 1, 2), want), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entries_of_any_dtype(dtype):
    entries, importance = some_entries(16, 5)
    keys, values = entries.keys.to(dtype), entries.values.to(dtype)
    merged = merge_entries(Entries(keys, values, None), importance, 4)
    assert merged.keys.dtype == merged.values.dtype == merged.bias.dtype == torch.float32
    wide = merge_entries(Entries(keys.float(), values.float(), None), importance, 4)
    assert torch.equal(merged.values, wide.values)
