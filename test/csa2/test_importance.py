"""Attention that entries can expect: against sampled queries, and what must not change it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from csa2.codec.importance import attention_share, observed_attention
from sgl_kernels.page_codec.reference import Entries

DIM, ENTRIES, REPEAT = 8, 12, 2
by_all = pytest.mark.parametrize("by", ["nothing", "queries"])


def some_entries(pages: int = 2, heads: int = 3, seed: int = 0) -> Entries:
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, pages, heads, ENTRIES, DIM, generator=random)
    return Entries(keys, values, None)


def some_queries(pages: int = 2, heads: int = 3, seed: int = 6) -> Tensor:
    return torch.randn(pages, heads, 5, DIM, generator=torch.Generator().manual_seed(seed))


def known(by: str, pages: int = 2, heads: int = 3) -> dict[str, Any]:
    """What is known beside the entries."""
    return {"queries": some_queries(pages, heads)} if by == "queries" else {}


def share_of(entries: Entries, *, queries: Tensor | None = None) -> Tensor:
    """Both steps: what the sample pays, and where there is none what can be expected."""
    return attention_share(entries, observed_attention(entries, queries))


def test_without_a_sample_small_keys_expect_most():
    """One deviation of the size is one nat."""
    entries = some_entries()
    size = entries.keys.double().norm(dim=-1)
    z = (size - size.mean(-1, keepdim=True)) / size.std(-1, keepdim=True, correction=0)
    assert torch.allclose(share_of(entries).double(), torch.softmax(-z, -1), rtol=1e-5)


@by_all
def test_shares_add_up_to_one(by):
    share = share_of(some_entries(), **known(by))
    assert share.shape == (2, 3, ENTRIES)
    assert bool((share > 0).all())
    assert torch.allclose(share.sum(-1), torch.ones(2, 3))


def test_observed_attention_is_the_mean_of_the_queries():
    entries, queries = some_entries(), some_queries()
    logits = torch.einsum("nhmd,nhed->nhme", queries.double(), entries.keys.double())
    want = (logits.exp() / logits.exp().sum(-1, keepdim=True)).mean(2)
    observed = observed_attention(entries, queries)
    assert torch.allclose(observed.double(), want, rtol=1e-5)
    # A sample decides, whatever the sizes of the keys say.
    assert torch.equal(attention_share(entries, observed), observed)


def test_a_page_without_a_sample_observes_nothing():
    entries, queries = some_entries(3), some_queries(3)
    queries[1] = 0
    observed = observed_attention(entries, queries)
    assert not observed[1].any()
    assert not observed_attention(entries, None).any()
    got = attention_share(entries, observed)
    assert torch.equal(got[1], share_of(entries)[1])
    assert torch.equal(got[[0, 2]], share_of(entries, queries=queries)[[0, 2]])


@by_all
def test_any_basis_will_do(by):
    """Keys and queries in another orthonormal basis, values in a third one."""
    entries, given = some_entries(), known(by)
    bases = torch.linalg.qr(torch.randn(2, DIM, DIM, generator=torch.Generator().manual_seed(4))).Q
    turned = Entries(entries.keys @ bases[0], entries.values @ bases[1], None)
    before = share_of(entries, **given)
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
    if by == "queries":
        given = {"queries": given["queries"].flip(2)}
    assert torch.allclose(share_of(entries, **given), before, rtol=1e-5)


@pytest.mark.parametrize("by", ["queries"])
def test_an_entry_that_stands_for_many_counts_as_many(by):
    """A bias of log 3 is three equal entries."""
    entries, given = some_entries(1, 3), known(by, 1)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@by_all
def test_entries_of_any_dtype(by, dtype):
    entries, given = some_entries(), known(by)
    half = Entries(entries.keys.to(dtype), entries.values.to(dtype), None)
    got = share_of(half, **given)
    assert got.dtype == torch.float32
    assert torch.equal(got, share_of(Entries(half.keys.float(), half.values.float(), None), **given))
