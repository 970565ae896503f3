"""Samples of the queries that running requests asked."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2.codec.importance import importance
from csa2.codec.queries import MAX_REQUESTS, SAMPLE_TOKENS, SAMPLE_WINDOW, QuerySamples
from sgl_kernels.page_codec.reference import Entries

fixed = settings(derandomize=True, deadline=None, max_examples=60)
LAYERS, GROUPS, DIM = 2, 2, 4


def numbered(tokens: int, heads: int, layer: int = 0) -> torch.Tensor:
    """(T, H, D) queries that say who they are: token, head, layer. Small numbers, exact in bf16."""
    token, head = torch.meshgrid(torch.arange(tokens), torch.arange(heads), indexing="ij")
    return torch.stack((token // 128, token % 128, head, torch.full_like(head, layer)), -1).float()


def one(samples: QuerySamples, slot: int) -> torch.Tensor:
    found = samples.of(torch.tensor([slot]))
    assert found is not None
    return found[0]


@fixed
@given(st.integers(SAMPLE_TOKENS, 3000), st.integers(1, 4))
def test_a_sample_is_spread_over_the_newest_tokens(tokens, repeat):
    samples = QuerySamples(LAYERS, GROUPS)
    for layer in range(LAYERS):
        samples.record(5, layer, numbered(tokens, GROUPS * repeat, layer), 1.0)
    sample = one(samples, 5)
    assert sample.shape == (LAYERS * GROUPS, repeat * SAMPLE_TOKENS, DIM)
    for index, of_head in enumerate(sample.unbind(0)):
        layer, group = divmod(index, GROUPS)
        assert of_head[:, 3].tolist() == [layer] * len(of_head)
        # Query heads group * repeat ... read this KV head, each of them with the same tokens.
        assert of_head[:, 2].unique(return_counts=True)[0].tolist() == [group * repeat + r for r in range(repeat)]
        rows = [128 * int(a) + int(b) for a, b, _, _ in of_head.view(repeat, SAMPLE_TOKENS, DIM)[0].tolist()]
        assert rows == sorted(set(rows))
        first = max(0, tokens - SAMPLE_WINDOW)
        assert (rows[0], rows[-1]) == (first, tokens - 1)
        # Evenly: no gap is wider than a token more than the mean one.
        widest = max(b - a for a, b in pairwise(rows))
        assert widest <= math.ceil((tokens - 1 - first) / (SAMPLE_TOKENS - 1)) + 1


def test_the_softmax_scale_is_in_the_sample():
    samples = QuerySamples(1, 1)
    samples.record(0, 0, torch.ones(SAMPLE_TOKENS, 1, DIM), 0.125)
    assert one(samples, 0).unique().tolist() == [0.125]


def test_few_tokens_change_nothing():
    samples = QuerySamples(1, 1)
    samples.record(0, 0, torch.ones(SAMPLE_TOKENS - 1, 1, DIM), 1.0)
    assert samples.of(torch.tensor([0])) is None
    samples.record(0, 0, torch.ones(SAMPLE_TOKENS, 1, DIM), 1.0)
    samples.record(0, 0, 2 * torch.ones(SAMPLE_TOKENS - 1, 1, DIM), 1.0)
    assert one(samples, 0).unique().tolist() == [1.0]


def test_a_newer_chunk_replaces_the_sample():
    samples = QuerySamples(1, 1)
    for value in (1.0, 2.0):
        samples.record(0, 0, torch.full((SAMPLE_TOKENS, 1, DIM), value), 1.0)
    assert one(samples, 0).unique().tolist() == [2.0]


def test_samples_of_many_requests_and_of_nobody():
    samples = QuerySamples(1, 1)
    assert samples.of(torch.tensor([3, -1])) is None
    for slot in (3, 7):
        samples.record(slot, 0, torch.full((SAMPLE_TOKENS, 1, DIM), float(slot)), 1.0)
    found = samples.of(torch.tensor([7, -1, 3, 4, 3]))
    assert found is not None
    assert [sample.unique().tolist() for sample in found] == [[7.0], [0.0], [3.0], [0.0], [3.0]]
    samples.clear()
    assert samples.of(torch.tensor([3, 7])) is None


def test_the_sample_updated_longest_ago_goes():
    samples = QuerySamples(1, 1)
    ones = torch.ones(SAMPLE_TOKENS, 1, DIM)
    for slot in range(MAX_REQUESTS):
        samples.record(slot, 0, ones, 1.0)
    samples.record(0, 0, ones, 1.0)
    samples.record(MAX_REQUESTS, 0, ones, 1.0)
    found = samples.of(torch.arange(MAX_REQUESTS + 1))
    assert found is not None
    assert torch.nonzero(~found.flatten(1).any(-1)).squeeze(-1).tolist() == [1]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38], ids=str)
def test_a_broken_query_does_not_reach_pages_that_others_share(broken):
    """Scores of NaN would merge every page that the request read last, shared ones too, into nothing."""
    samples = QuerySamples(1, 1)
    queries = torch.ones(SAMPLE_TOKENS, 1, DIM)
    queries[3, 0, 2] = broken
    samples.record(0, 0, queries, 1.0)
    sample = one(samples, 0)
    keys = torch.full((1, 1, 3, DIM), -(2.0**15))
    assert bool(importance(Entries(keys, keys, None), sample[None]).isfinite().all())
    # What the other queries ask is kept.
    assert int((sample == 1).all(-1).sum()) == SAMPLE_TOKENS - 1
