"""Samples of the queries that running requests asked."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2.codec.importance import observed_attention
from csa2.codec.queries import DECODE_INTERVAL, MAX_REQUESTS, SAMPLE_TOKENS, SAMPLE_WINDOW, QuerySamples
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
        samples.record_extend(5, layer, numbered(tokens, GROUPS * repeat, layer), 1.0)
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
    samples.record_extend(0, 0, torch.ones(SAMPLE_TOKENS, 1, DIM), 0.125)
    assert one(samples, 0).unique().tolist() == [0.125]


def test_few_tokens_do_not_replace_many():
    samples = QuerySamples(1, 1)
    samples.record_extend(0, 0, torch.ones(SAMPLE_TOKENS, 1, DIM), 1.0)
    samples.record_extend(0, 0, 2 * torch.ones(SAMPLE_TOKENS - 1, 1, DIM), 1.0)
    assert one(samples, 0).unique().tolist() == [1.0]


@pytest.mark.parametrize("tokens", [1, 2, SAMPLE_TOKENS - 1])
def test_few_tokens_are_a_sample_where_there_is_none(tokens):
    samples = QuerySamples(1, 1)
    samples.record_extend(0, 0, numbered(tokens, 1), 1.0)
    assert one(samples, 0)[0, :, 1].unique().tolist() == list(range(tokens))


def test_layers_do_not_see_each_other():
    samples = QuerySamples(2, 1)
    samples.record_extend(0, 1, torch.ones(3, 1, DIM), 1.0)
    assert [bool(of_layer.any()) for of_layer in one(samples, 0)] == [False, True]
    # Few tokens are better than none in the layer that has none.
    samples.record_extend(0, 0, 2 * torch.ones(3, 1, DIM), 1.0)
    assert [of_layer.unique().tolist() for of_layer in one(samples, 0)] == [[2.0], [1.0]]


def test_generated_tokens_take_the_place_of_the_oldest():
    samples = QuerySamples(1, 2)
    samples.record_extend(0, 0, -torch.ones(SAMPLE_TOKENS, 4, DIM), 1.0)
    for step in range(SAMPLE_TOKENS + 3):
        query = torch.arange(4.0)[:, None].expand(4, DIM) + 8 * step
        samples.record_decode(0, 0, query, 1.0, DECODE_INTERVAL * (5 + step))
        sample = one(samples, 0).view(2, 2, SAMPLE_TOKENS, DIM)
        newest = sample[..., (5 + step) % SAMPLE_TOKENS, 0]
        assert newest.flatten().tolist() == [8.0 * step + head for head in range(4)]
        assert int((sample[1, 1, :, 0] >= 0).sum()) == min(step + 1, SAMPLE_TOKENS)


def test_a_newer_chunk_replaces_the_sample():
    samples = QuerySamples(1, 1)
    for value in (1.0, 2.0):
        samples.record_extend(0, 0, torch.full((SAMPLE_TOKENS, 1, DIM), value), 1.0)
    assert one(samples, 0).unique().tolist() == [2.0]


def test_samples_of_many_requests_and_of_nobody():
    samples = QuerySamples(1, 1)
    assert samples.of(torch.tensor([3, -1])) is None
    for slot in (3, 7):
        samples.record_extend(slot, 0, torch.full((SAMPLE_TOKENS, 1, DIM), float(slot)), 1.0)
    found = samples.of(torch.tensor([7, -1, 3, 4, 3]))
    assert found is not None
    assert [sample.unique().tolist() for sample in found] == [[7.0], [0.0], [3.0], [0.0], [3.0]]
    samples.clear()
    assert samples.of(torch.tensor([3, 7])) is None


def test_the_sample_updated_longest_ago_goes():
    samples = QuerySamples(1, 1)
    ones = torch.ones(SAMPLE_TOKENS, 1, DIM)
    for slot in range(MAX_REQUESTS):
        samples.record_extend(slot, 0, ones, 1.0)
    samples.record_extend(0, 0, ones, 1.0)
    samples.record_extend(MAX_REQUESTS, 0, ones, 1.0)
    found = samples.of(torch.arange(MAX_REQUESTS + 1))
    assert found is not None
    assert torch.nonzero(~found.flatten(1).any(-1)).squeeze(-1).tolist() == [1]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38], ids=str)
def test_a_broken_query_does_not_reach_pages_that_others_share(broken):
    """Scores of NaN would merge every page that the request read last, shared ones too, into nothing."""
    samples = QuerySamples(1, 1)
    queries = torch.ones(SAMPLE_TOKENS, 1, DIM)
    queries[3, 0, 2] = broken
    samples.record_extend(0, 0, queries, 1.0)
    sample = one(samples, 0)
    keys = torch.full((1, 1, 3, DIM), -(2.0**15))
    assert bool(observed_attention(Entries(keys, keys, None), sample[None]).isfinite().all())
    # What the other queries ask is kept.
    assert int((sample == 1).all(-1).sum()) == SAMPLE_TOKENS - 1
    samples.record_decode(0, 0, queries[3], 1.0, 5 * DECODE_INTERVAL)
    assert bool(observed_attention(Entries(keys, keys, None), one(samples, 0)[None]).isfinite().all())


def test_a_slot_that_changes_hands_has_a_new_reader():
    samples = QuerySamples(1, 1)
    slots = torch.tensor([3, 5])
    first = samples.readers(slots, ["a", "b"]).tolist()
    assert len(set(first)) == 2
    assert samples.readers(slots.flip(0), ["b", "a"]).tolist() == first[::-1]
    a, c = samples.readers(slots, ["a", "c"]).tolist()
    assert a == first[0]
    assert c not in first
    # Retracted and come back to another slot: another reader too, whose pages are written anew.
    assert samples.readers(torch.tensor([4]), ["a"]).item() not in {*first, c}
