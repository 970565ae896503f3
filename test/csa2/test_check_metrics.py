"""Metrics of the check against cases computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csa2.check import metrics
from csa2.check.errors import CheckError
from csa2.check.metrics import TokenScores

LOG2 = math.log(2)
EXACT = 1e-12
"""Sums of a few float64 terms of size 1."""


def scores(tokens, logprobs, top_tokens, top_probabilities):
    """Scores with the most likely tokens given by probability."""
    top = np.log(np.array(top_probabilities, dtype=np.float64))
    return TokenScores(np.array(tokens), np.array(logprobs, dtype=np.float64), np.array(top_tokens), top)


def one(top_tokens, top_probabilities):
    return scores([0], [-1.0], [top_tokens], [top_probabilities])


def test_nll_difference_is_what_the_packed_side_lost():
    full = scores([5, 6], [-1.0, -2.0], [[5], [6]], [[0.5], [0.5]])
    packed = scores([5, 6], [-1.5, -1.75], [[5], [6]], [[0.5], [0.5]])
    assert metrics.nll_differences(full, packed).tolist() == [0.5, -0.25]


def test_different_tokens_are_refused():
    with pytest.raises(CheckError, match="different tokens"):
        metrics.nll_differences(one([1], [0.5]), scores([9], [-1.0], [[1]], [[0.5]]))


def test_perplexity_increase_by_document():
    # Means 0, log 2 and 2 log 2: the mean is log 2, so the perplexity doubles.
    documents = [np.zeros(4), np.full(4, LOG2), np.full(4, 2 * LOG2)]
    estimate = metrics.perplexity_increase_pct(documents)
    assert estimate.value == pytest.approx(100, abs=100 * EXACT)
    # sd of (0, log 2, 2 log 2) is log 2; over sqrt(3) documents; times the slope 100 * 2.
    assert estimate.standard_error == pytest.approx(200 * LOG2 / math.sqrt(3), abs=200 * EXACT)
    assert estimate.blocks == "3 documents"


def test_perplexity_increase_of_few_documents_uses_blocks():
    first = np.concatenate([np.full(64, 0.1), np.full(64, 0.3)])
    estimate = metrics.perplexity_increase_pct([first])
    assert estimate.blocks == "2 blocks of 64 tokens"
    # sd of (0.1, 0.3) over sqrt(2) is 0.1.
    assert estimate.standard_error == pytest.approx(100 * math.exp(0.2) * 0.1, abs=100 * EXACT)


def test_one_block_has_no_error():
    assert math.isnan(metrics.perplexity_increase_pct([np.ones(64)]).standard_error)


def test_tokens_count_alike_in_blocks_of_different_length():
    # 64 tokens of 0 and 32 of 3: the mean over tokens is 1, not 1.5.
    estimate = metrics.perplexity_increase_pct([np.concatenate([np.zeros(64), np.full(32, 3.0)])])
    assert estimate.value == pytest.approx(100 * math.expm1(1), abs=200 * EXACT)
    # Residual sums are -64 and +64: sqrt(2 / 1 * 2 * 64^2) / 96.
    assert estimate.standard_error == pytest.approx(100 * math.e * 128 / 96, abs=200 * EXACT)


def test_divergence_of_equal_distributions_is_zero():
    side = one([1, 2], [0.5, 0.25])
    assert metrics.divergence_nats(side, side).tolist() == [0]


def test_divergence_with_the_rest_as_a_bucket():
    full, packed = one([1, 2], [0.5, 0.25]), one([2, 1], [0.5, 0.25])
    # Tokens 1 and 2 swap, the rest is 1/4 on both sides: 1/2 log 2 + 1/4 log(1/2) + 0.
    assert metrics.divergence_nats(full, packed)[0] == pytest.approx(LOG2 / 4, abs=EXACT)


def test_divergence_puts_tokens_that_one_side_does_not_name_into_the_bucket():
    full, packed = one([1, 2], [0.5, 0.25]), one([1, 3], [0.25, 0.5])
    # Only token 1 is known to both; the rest is 1/2 against 3/4.
    assert metrics.divergence_nats(full, packed)[0] == pytest.approx(0.5 * LOG2 + 0.5 * math.log(2 / 3), abs=EXACT)


def test_divergence_without_a_common_token_is_zero():
    assert metrics.divergence_nats(one([1], [0.5]), one([2], [0.5]))[0] == 0


def test_rounding_that_leaves_no_rest_stays_finite():
    full, packed = one([1], [1.0]), one([1], [1 + 1e-7])
    assert abs(metrics.divergence_nats(full, packed)[0]) < 1e-6  # the size of the excess itself


@given(st.lists(st.floats(0.01, 1), min_size=8, max_size=8), st.lists(st.floats(0.01, 1), min_size=8, max_size=8))
def test_divergence_is_a_lower_bound(left, right):
    p, q = np.array(left) / sum(left), np.array(right) / sum(right)
    whole = float((p * np.log(p / q)).sum())

    def top(probabilities):
        order = np.argsort(-probabilities)[:4]
        return one(order, probabilities[order])

    bound = metrics.divergence_nats(top(p), top(q))[0]
    assert -EXACT <= bound <= whole + EXACT


def test_agreement_and_recall():
    full = scores([1, 2], [-1, -1], [[1, 3], [4, 2]], [[0.5, 0.2], [0.5, 0.2]])
    packed = scores([1, 2], [-1, -1], [[1, 2], [2, 4]], [[0.5, 0.2], [0.5, 0.2]])
    assert metrics.agreements(full, packed).tolist() == [True, False]
    assert metrics.copied(full).tolist() == [True, False]
    assert metrics.copied(packed).tolist() == [True, True]
    assert metrics.percent([metrics.copied(full), metrics.copied(packed)]) == 75


def test_loss_by_position_averages_documents():
    documents = [np.repeat([1.0, 2.0], 64), np.repeat([3.0, 4.0], 64)]
    assert metrics.loss_by_position(documents).tolist() == [2, 3]
