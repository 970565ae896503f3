"""Training of one layer's scorer: the relaxed merging, the two ways to fit, and that they find what is there."""

from dataclasses import fields, replace

import pytest
import torch
from merge_samples import DIM, GROUPS, PAGES, TOKENS, random_sample

from csa2.calibrate import scorer_training
from csa2.calibrate.merge_sample import cut, piece_split
from csa2.calibrate.offline import attend, joined, pages, rows, sequence
from csa2.calibrate.relaxed_merging import pairwise_distance, relaxed_merge
from csa2.calibrate.scorer_training import (
    RATIOS,
    Network,
    Standardised,
    curriculum,
    fit_ridge,
    importance,
    merging_error,
    oracle,
    train_mlp,
)
from csa2.calibrate.statistics import PAGE_TOKENS
from csa2.codec.merging import merge_entries
from csa2.codec.scorer import SCALARS
from csa2.errors import OptionError

WIDTH = 2 * DIM + SCALARS


@pytest.fixture(scope="module")
def samples():
    return [random_sample(seed) for seed in range(6)]


def error_of(samples, scorer, ratio=4) -> float:
    return sum(merging_error(sample, importance(sample, scorer), ratio) for sample in samples)


def test_a_sample_reads_what_attention_reads():
    """Merged and exact outputs agree with attention over the whole sequence, computed in one piece."""
    split = piece_split(512)
    random = torch.Generator().manual_seed(0)
    queries = torch.randn(2 * GROUPS, 512, DIM, generator=random)
    keys, values = torch.randn(2, GROUPS, 512, DIM, generator=random)
    sample = cut(queries, keys, values, split)
    asked = torch.linspace(split.context, 511, sample.asked.shape[2]).long()
    merged = merge_entries(sample.entries, importance(sample, None), 16)
    size = PAGE_TOKENS
    assert torch.equal(sample.keys, pages(keys, values, 1, split.last_page, size).keys)
    for row, token in list(enumerate(asked.tolist()))[::20]:
        before = rows(keys, values, 0, size)
        after = rows(keys, values, split.last_page * size, token + 1)
        for got, inner in ((sample.exact, sample.entries), (sample.output(merged), merged)):
            expected = attend(queries[:, token : token + 1], joined((before, sequence(inner), after)))
            # Sums over 500 entries of size 1 in another order.
            torch.testing.assert_close(got[:, :, row].flatten(0, 1), expected[:, 0], rtol=1e-4, atol=1e-5)
    assert sample.error(sample.entries) == 0


def test_later_attention_and_the_rest_add_up_to_one(samples):
    sample = random_sample(0, rest=-30.0)
    assert float(sample.later_attention().sum((0, 2)).mean()) == pytest.approx(1, abs=1e-5)
    assert float(random_sample(0, rest=30.0).later_attention().sum()) < 1e-6


@pytest.mark.parametrize("groups", [32, 16, 8])
def test_relaxed_merging_is_the_merging_that_serves(samples, groups):
    sample = samples[0]
    scores = importance(sample, None)
    summed, mass = relaxed_merge(sample.entries, scores, groups, pairwise_distance(sample.entries))
    assert int((mass > 0.5).sum(-1).unique()) == groups
    expected = sample.output(merge_entries(sample.entries, scores, groups))
    # The straight-through term cancels to a rounding error of the largest ratio of weights, below 100.
    torch.testing.assert_close(sample.output_of_groups(sample.keys, summed, mass), expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_says_which_entries_to_keep(samples):
    """A step down the gradient of the error makes the error smaller, again and again."""
    sample = samples[0]
    distance = pairwise_distance(sample.entries)
    f = torch.zeros(PAGES, GROUPS, TOKENS, requires_grad=True)
    errors = []
    for _ in range(60):
        summed, mass = relaxed_merge(sample.entries, importance(sample, None) * f.exp(), 16, distance)
        loss = (sample.output_of_groups(sample.keys, summed, mass) - sample.exact).norm()
        errors.append(float(loss.detach()))
        (gradient,) = torch.autograd.grad(loss, f)
        f = (f - 0.3 * gradient / gradient.norm() * f.numel() ** 0.5).detach().requires_grad_()
    assert min(errors[-10:]) < 0.5 * errors[0]


def test_the_network_starts_as_the_identity():
    network = Network(GROUPS, WIDTH, 8, torch.Generator().manual_seed(0))
    x = torch.randn(PAGES, GROUPS, TOKENS, WIDTH)
    assert torch.equal(network(x), torch.zeros(PAGES, GROUPS, TOKENS))
    assert any(bool(parameter.any()) for parameter in network.parameters())


def test_an_untrained_scorer_corrects_nothing(samples):
    """Not even by the standardisation that goes into its weights."""
    network = Network(GROUPS, WIDTH, 8, torch.Generator().manual_seed(0))
    scorer = Standardised(samples).scorer(network.weights, network.offsets, network.outer)
    assert torch.equal(scorer.correction(samples[0].entries, samples[0].observed), torch.ones(PAGES, GROUPS, TOKENS))


def test_the_stored_scorer_is_the_trained_network(samples):
    """Standardisation goes into the weights; rounding to bfloat16 is all that changes."""
    known = Standardised(samples)
    network = Network(GROUPS, WIDTH, 8, torch.Generator().manual_seed(0))
    torch.nn.init.normal_(network.outer, std=0.3, generator=torch.Generator().manual_seed(1))
    scorer = known.scorer(network.weights, network.offsets, network.outer)
    got = scorer.correction(samples[0].entries, samples[0].observed).log()
    # 36 products of features up to 4 and weights of about 0.2 that bfloat16 rounds by 2^-9 each.
    torch.testing.assert_close(got, network(known.of(samples[0])).detach(), rtol=0, atol=0.05)


def test_regression_finds_what_later_queries_look_for(samples):
    """Half the way, at least, to the score that knows them."""
    scorer = fit_ridge(samples)
    assert scorer.outer.shape == (GROUPS, 0)
    others = [random_sample(seed) for seed in range(100, 104)]
    free, best = error_of(others, None), sum(merging_error(sample, oracle(sample), 4) for sample in others)
    assert error_of(others, scorer) < (free + best) / 2


def test_distillation_finds_what_later_queries_look_for(samples, monkeypatch):
    monkeypatch.setattr(scorer_training, "EPOCHS", 30)
    scorer = train_mlp(samples, 8, seed=0)
    others = [random_sample(seed) for seed in range(100, 104)]
    for ratio in RATIOS:
        assert error_of(others, scorer, ratio) < 0.8 * error_of(others, None, ratio)


def test_the_same_seed_gives_the_same_scorer(samples, monkeypatch):
    monkeypatch.setattr(scorer_training, "EPOCHS", 1)
    first, again, other = (train_mlp(samples[:2], 4, seed) for seed in (3, 3, 4))
    assert all(torch.equal(getattr(first, f.name), getattr(again, f.name)) for f in fields(first))
    assert not torch.equal(first.weights, other.weights)


def test_a_head_without_values_does_no_harm(samples, monkeypatch):
    monkeypatch.setattr(scorer_training, "EPOCHS", 1)
    values, rest = samples[0].values.clone(), samples[0].rest.clone()
    values[:, 1], rest[1] = 0, 0
    empty = replace(samples[0], values=values, rest=rest)
    for scorer in (train_mlp([empty], 4, 0), fit_ridge([empty])):
        assert all(bool(getattr(scorer, field.name).isfinite().all()) for field in fields(scorer))
        assert merging_error(empty, importance(empty, scorer), 2) < 1


def test_the_curriculum_tightens():
    steps = [curriculum(step, 300) for step in range(300)]
    assert set(steps[:100]) == {2}
    assert set(steps[100:]) == {2, 4}
    assert {curriculum(step, 2) for step in range(2)} <= {2, 4}


@pytest.mark.parametrize("tokens", [384, 512, 2560, 8192])
def test_a_piece_is_split_into_pages_window_and_queries(tokens):
    split = piece_split(tokens)
    assert split.last_page > 1
    assert split.last_page * PAGE_TOKENS + min(1024, split.context // 2) <= split.context < tokens


def test_a_short_piece_is_refused():
    with pytest.raises(OptionError, match="--scorer-tokens 383 is too short"):
        piece_split(383)
