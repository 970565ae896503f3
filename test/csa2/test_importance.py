"""Attention that entries can expect: against sampled queries, and what must not change it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from csa2.codec.importance import QueryMoments, attention_share, expected_attention, observed_attention
from sgl_kernels.page_codec.reference import Entries

DIM, ENTRIES, REPEAT = 8, 12, 2
by_all = pytest.mark.parametrize("by", ["nothing", "moments", "queries"])


def some_entries(pages: int = 2, heads: int = 3, seed: int = 0) -> Entries:
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, pages, heads, ENTRIES, DIM, generator=random)
    return Entries(keys, values, None)


def some_moments(heads: int = 3, size: float = 0.5, seed: int = 1) -> QueryMoments:
    """Queries with a mean and correlated channels; means and deviations near `size`."""
    random = torch.Generator().manual_seed(seed)
    root = torch.randn(heads, REPEAT, DIM, DIM, generator=random) * size / math.sqrt(DIM)
    return QueryMoments(torch.randn(heads, REPEAT, DIM, generator=random) * size, root @ root.transpose(-1, -2))


def some_queries(pages: int = 2, heads: int = 3, seed: int = 6) -> Tensor:
    return torch.randn(pages, heads, 5, DIM, generator=torch.Generator().manual_seed(seed))


def known(by: str, pages: int = 2, heads: int = 3) -> dict[str, Any]:
    """What is known beside the entries."""
    return {"nothing": {}, "moments": {"moments": some_moments(heads)}, "queries": {"queries": some_queries(pages, heads)}}[
        by
    ]


def share_of(entries: Entries, *, queries: Tensor | None = None, moments: QueryMoments | None = None) -> Tensor:
    """Both steps: what the sample pays, and where there is none what can be expected."""
    return attention_share(entries, observed_attention(entries, queries), moments)


def scores(keys: Tensor, moments: QueryMoments) -> Tensor:
    """(pages, heads, E) mean of the query heads in float64, by the formula: E exp(q . k) = exp(mean . k + k Cov k / 2)."""
    out = torch.zeros(keys.shape[:-1], dtype=torch.float64)
    for head in range(keys.shape[1]):
        for mean, covariance in zip(moments.mean[head].double(), moments.covariance[head].double(), strict=True):
            k = keys[:, head].double()
            expected = (k @ mean + ((k @ covariance) * k).sum(-1) / 2).exp()
            out[:, head] += expected / expected.sum(-1, keepdim=True) / REPEAT
    return out


def test_expected_attention_is_the_formula():
    entries, moments = some_entries(), some_moments()
    got = expected_attention(entries.keys, moments)
    assert torch.allclose(got.double(), scores(entries.keys, moments), rtol=1e-5)
    assert torch.allclose(got.sum(-1), torch.ones(2, 3))


def test_moments_against_sampled_queries():
    """The mean of exp(q . k) over many queries. For a normal q . k of deviation s the mean of n samples is off by
    sqrt((exp(s^2) - 1) / n) of itself: with s at most 1.2 and n = 200000 by 0.4 per cent; six times that is no chance."""
    entries, moments = some_entries(1, 1), some_moments(1, 0.2)
    random = torch.Generator().manual_seed(2)
    keys = entries.keys[0, 0].double()
    want = torch.zeros(ENTRIES, dtype=torch.float64)
    for mean, covariance in zip(moments.mean[0].double(), moments.covariance[0].double(), strict=True):
        root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(DIM))
        noise = torch.randn(200_000, DIM, generator=random, dtype=torch.float64)
        assert float(((keys @ covariance) * keys).sum(-1).max()) < 1.2**2
        expected = ((mean + noise @ root.T) @ keys.T).exp().mean(0)
        want += expected / expected.sum() / REPEAT
    assert torch.allclose(expected_attention(entries.keys, moments)[0, 0].double(), want, rtol=0.025)


@by_all
def test_shares_add_up_to_one(by):
    share = share_of(some_entries(), **known(by))
    assert share.shape == (2, 3, ENTRIES)
    assert bool((share > 0).all())
    assert torch.allclose(share.sum(-1), torch.ones(2, 3))


def test_where_nothing_is_known_all_entries_expect_the_same():
    assert torch.allclose(share_of(some_entries()), torch.full((2, 3, ENTRIES), 1 / ENTRIES))


def test_moments_are_used_where_there_is_no_sample():
    entries, moments = some_entries(), some_moments()
    assert torch.allclose(share_of(entries, moments=moments).double(), scores(entries.keys, moments), rtol=1e-4)


def test_a_constant_in_all_keys_changes_nothing_but_through_the_covariance():
    """Attention does not see what is added to all logits; the part of the formula without covariance does not either."""
    entries = some_entries()
    moments = QueryMoments(some_moments().mean, torch.zeros(3, REPEAT, DIM, DIM))
    shift = torch.randn(DIM, generator=torch.Generator().manual_seed(3))
    moved = expected_attention(entries.keys + shift, moments=moments)
    assert torch.allclose(moved, expected_attention(entries.keys, moments), rtol=1e-4)


def test_observed_attention_is_the_mean_of_the_queries():
    entries, queries = some_entries(), some_queries()
    logits = torch.einsum("nhmd,nhed->nhme", queries.double(), entries.keys.double())
    want = (logits.exp() / logits.exp().sum(-1, keepdim=True)).mean(2)
    observed = observed_attention(entries, queries)
    assert torch.allclose(observed.double(), want, rtol=1e-5)
    # A sample decides, whatever the moments say.
    assert torch.equal(attention_share(entries, observed, some_moments()), observed)


def test_a_page_without_a_sample_observes_nothing():
    entries, queries, moments = some_entries(3), some_queries(3), some_moments()
    queries[1] = 0
    observed = observed_attention(entries, queries)
    assert not observed[1].any()
    assert not observed_attention(entries, None).any()
    got = attention_share(entries, observed, moments)
    assert torch.equal(got[1], share_of(entries, moments=moments)[1])
    assert torch.equal(got[[0, 2]], share_of(entries, queries=queries)[[0, 2]])


@by_all
def test_any_basis_will_do(by):
    """Keys, moments and queries in another orthonormal basis, values in a third one."""
    entries, given = some_entries(), known(by)
    bases = torch.linalg.qr(torch.randn(2, DIM, DIM, generator=torch.Generator().manual_seed(4))).Q
    turned = Entries(entries.keys @ bases[0], entries.values @ bases[1], None)
    before = share_of(entries, **given)
    if by == "moments":
        moments = given["moments"]
        given = {"moments": QueryMoments(moments.mean @ bases[0], bases[0].T @ moments.covariance @ bases[0])}
    if by == "queries":
        given = {"queries": given["queries"] @ bases[0]}
    assert torch.allclose(share_of(turned, **given), before, rtol=1e-4, atol=1e-7)


@by_all
def test_the_order_of_entries_pages_and_queries_does_not_matter(by):
    entries, given = some_entries(4), known(by, 4)
    before = share_of(entries, **given)
    order = torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(5))
    shuffled = share_of(Entries(entries.keys[:, :, order], entries.values[:, :, order], None), **given)
    assert torch.allclose(shuffled, before[..., order], rtol=1e-5)
    of_one = {"queries": given["queries"][2:3]} if by == "queries" else given
    one = share_of(Entries(entries.keys[2:3], entries.values[2:3], None), **of_one)
    assert torch.allclose(one, before[2:3], rtol=1e-5)
    # The query heads of a KV head and the queries of a sample count alike.
    if by == "moments":
        moments = given["moments"]
        given = {"moments": QueryMoments(moments.mean.flip(1), moments.covariance.flip(1))}
    if by == "queries":
        given = {"queries": given["queries"].flip(2)}
    assert torch.allclose(share_of(entries, **given), before, rtol=1e-5)


@by_all
def test_an_entry_that_stands_for_many_counts_as_many(by):
    """A bias of log 3 is three equal entries; with moments for each query head alone."""
    entries, given = some_entries(1, 3), known(by, 1)
    if by == "moments":
        given = {"moments": QueryMoments(some_moments().mean[:, :1], some_moments().covariance[:, :1])}
    bias = torch.zeros(1, 3, ENTRIES)
    bias[..., 4] = math.log(3)
    biased = share_of(Entries(entries.keys, entries.values, bias), **given)
    repeated = torch.tensor([*range(ENTRIES), 4, 4])
    apart = share_of(Entries(entries.keys[:, :, repeated], entries.values[:, :, repeated], None), **given)
    together = apart[..., :ENTRIES].clone()
    together[..., 4] += apart[..., ENTRIES:].sum(-1)
    assert torch.allclose(biased, together, rtol=1e-4)


@by_all
def test_extreme_keys_give_finite_shares(by):
    entries = some_entries()
    keys = entries.keys.clone()
    keys[0, 0, 3] = 2.0**15
    keys[0, 1] = -(2.0**15)
    keys[1] = 0
    got = share_of(Entries(keys, entries.values, None), **known(by))
    assert bool(got.isfinite().all())
    assert bool((got >= 0).all())
    if by == "moments":
        assert int(got[0, 0].argmax()) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@by_all
def test_entries_of_any_dtype(by, dtype):
    entries, given = some_entries(), known(by)
    half = Entries(entries.keys.to(dtype), entries.values.to(dtype), None)
    got = share_of(half, **given)
    assert got.dtype == torch.float32
    assert torch.equal(got, share_of(Entries(half.keys.float(), half.values.float(), None), **given))


def test_moments_move_with_the_codec():
    moments = some_moments()
    assert torch.equal(moments.to("cpu").mean, moments.mean)
    assert torch.equal(moments.to("cpu").covariance, moments.covariance)
