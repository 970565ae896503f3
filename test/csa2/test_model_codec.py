"""The codec of a model: what it seals and opens, broken tokens in merged pages, and pages that come down rung by rung."""

import math
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
import torch
from codec_bounds import entry_norm_bounds, kept
from page_stores import merged_for
from torch import Tensor

from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.codec.codec import PageCodec
from csa2.formats import MERGE, FormatLadder
from csa2.options import CODE_FORMATS, CacheOptions
from sgl_kernels.page_codec.reference import Entries, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout

TAILS = tuple(MERGE)
CHAINS = sorted(
    {
        chain
        for codes, tail in product(CODE_FORMATS, (None, *TAILS))
        for length in (2, 3, 4)
        for chain in combinations(("fp8", "k8v4", codes, *filter(None, (tail,))), length)
    }
)
"""Every way down the ladder in two steps or more, for both 4-bit codes and every end."""


GEOMETRY = PageGeometry(3, 2, 64, 64, torch.bfloat16, (2,))
"""Three layers of two heads, the last layer with identity keys."""


def model(tail: str, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[PageCodec, FormatLadder]:
    """Codec and ladder of this geometry."""
    geometry = replace(GEOMETRY, page_size=size, dtype=dtype)
    return codec_and_ladder(CacheOptions(ratio=tail[-2]), geometry, make_rotation(64, neox=True), None)


def chain_model(chain: tuple[str, ...]) -> tuple[PageCodec, list[PageLayout]]:
    """The codec, and the layout of each step."""
    tail = chain[-1] if chain[-1] in MERGE else "csa2-2x"
    options = CacheOptions(ratio=tail[-2], kv_format="int4" if "int4" in chain else "fp4", shared_format="k8v4")
    codec, ladder = codec_and_ladder(options, GEOMETRY, make_rotation(64, neox=True), None)
    return codec, [ladder.layouts[ladder.index(name)] for name in chain]


def some_pages(n: int, size: int = 64, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Entries:
    """Tokens that resemble their neighbours, around a mean of their page, slow channels larger than fast ones."""
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, n, 6, size, 64, generator=random)
    mean = torch.randn(2, n, 6, 1, 64, generator=random)
    slow = torch.linspace(0.3, 1.5, 32).repeat(2)
    keys, values = ((x + x.roll(1, -2) + x.roll(2, -2)) / math.sqrt(3) for x in (keys, values))
    return Entries((keys * slow + mean[0]).to(dtype), (values + mean[1]).to(dtype), None)


def attention(entries: Entries, queries: Tensor) -> Tensor:
    """(n, heads, queries, D) float64 attention of queries (queries, D) over each page alone."""
    logits = queries.double() @ entries.keys.double().transpose(-1, -2)
    if entries.bias is not None:
        logits = logits + entries.bias.double()[..., None, :]
    return torch.softmax(logits, -1) @ entries.values.double()


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def some_queries(n: int, seed: int = 8, size: float = 0.5) -> Tensor:
    """(n, heads, 16, D) samples; every third page has none."""
    queries = torch.randn(n, 6, 16, 64, generator=torch.Generator().manual_seed(seed)) * size
    queries[2::3] = 0
    return queries


def assert_sealed(codec: PageCodec, entries: Entries, layout: PageLayout, queries: Tensor | None) -> None:
    """What comes back is what was merged, coded."""
    opened = codec.open(codec.seal(entries, layout, queries), layout)
    expected, observed = merged_for(codec, entries, layout, queries)
    assert opened.keys.shape == expected.keys.shape
    assert opened.keys.dtype == torch.float32
    bounds = entry_norm_bounds(expected.keys, expected.values, layout, codec.bases, observed)
    for got, want, bound in zip((opened.keys, opened.values), (expected.keys, expected.values), bounds, strict=True):
        assert bool(((got - want).double().norm(dim=-1) <= bound).all())
    if layout.is_merged:
        assert float((opened.bias - expected.bias).abs().max()) <= 1 / 32 + 1e-6


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("tail", TAILS)
def test_what_is_sealed_is_merged_and_then_coded(tail, size, sampled):
    codec, ladder = model(tail, size)
    for layout in ladder.layouts[1:]:
        assert layout.entries == size // MERGE.get(layout.name, 1)
        assert_sealed(codec, some_pages(4, size), layout, some_queries(4) if sampled else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_pages_open_as_they_were_written(dtype):
    codec, ladder = model("csa2-4x", dtype=dtype)
    entries = some_pages(2, dtype=dtype)
    pair = torch.stack((entries.keys, entries.values), 2).view(2, 3, 2, 2, 64, 64)
    packed = pair.transpose(2, 3).contiguous().view(2, -1).view(torch.uint8)
    opened = codec.open(packed, ladder.layouts[0])
    assert torch.equal(opened.keys, entries.keys.float())
    assert torch.equal(opened.values, entries.values.float())
    assert opened.bias is None


@pytest.mark.parametrize("tail", ["csa2-4x", "csa2-8x"])
def test_queries_decide_which_tokens_stay(tail):
    """Tokens that the sample of queries looks for keep their keys; without one those with large values and small keys do."""
    codec, ladder = model(tail)
    layout = ladder.layouts[-1]
    entries = some_pages(2)
    wanted = torch.arange(layout.entries) * (64 // layout.entries) + 1
    queries = torch.zeros(2, 6, layout.entries, 64)
    queries[1] = entries.keys[1, :, wanted].float() * 4  # the first page has no sample
    assert_sealed(codec, entries, layout, queries)
    expected, _ = merged_for(codec, entries, layout, queries)
    is_pivot = (expected.keys[:, :, :, None] == entries.keys.float()[:, :, None]).all(-1).any(2)
    assert float(is_pivot[1][:, wanted].float().mean()) > 0.9
    keys, values = entries.keys.float().norm(dim=-1), entries.values.float().norm(dim=-1)
    z = (keys - keys.mean(-1, keepdim=True)) / keys.std(-1, keepdim=True, correction=0)
    largest = (torch.softmax(-z, -1) * values).topk(layout.entries).indices
    assert bool(is_pivot[0].gather(-1, largest[0]).all())


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("whole_token", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_a_token_that_is_not_finite_is_merged_as_zeros(tail, whole_token, broken):
    codec, ladder = model(tail, dtype=torch.float32)
    layout = ladder.layouts[-1]
    entries, zeros = some_pages(2, dtype=torch.float32), some_pages(2, dtype=torch.float32)
    channels = slice(None) if whole_token else 9
    for x, zero in ((entries.keys, zeros.keys), (entries.values, zeros.values)):
        x[0, :, 20, channels], zero[0, :, 20, channels] = broken, 0.0
    packed = codec.seal(entries, layout)
    opened = codec.open(packed, layout)
    assert bool(opened.keys.isfinite().all())
    assert bool(opened.values.isfinite().all())
    assert torch.equal(packed, codec.seal(zeros, layout))


@pytest.mark.parametrize("tail", ["csa2-4x", "csa2-8x"])
def test_a_token_beyond_what_pages_hold_does_not_decide_how_a_page_is_merged(tail):
    """3e38 is finite in bf16: its square is not, and neither is a weight in units of such a mean."""
    codec, ladder = model(tail, dtype=torch.float32)
    layout = ladder.layouts[-1]
    entries, saturated = some_pages(2, dtype=torch.float32), some_pages(2, dtype=torch.float32)
    for x, y in ((entries.keys, saturated.keys), (entries.values, saturated.values)):
        x[0, :, 20], y[0, :, 20] = 3e38, 2.0**15
    packed = codec.seal(entries, layout)
    assert torch.equal(packed, codec.seal(saturated, layout))
    opened = codec.open(packed, layout)
    # One group is the broken token, and its key says so. The others are tokens of the page, in their order.
    expected, _ = merged_for(codec, saturated, layout, None)
    assert bool((expected.keys[0].abs().amax(-1) == 2.0**15).sum(-1).eq(1).all())
    assert float((opened.bias - expected.bias).abs().max()) <= 1 / 32 + 1e-6
    assert float(expected.bias.exp().sum(-1).min()) > layout.entries


def entries_left(entries: Entries, *steps: PageLayout, codec: PageCodec, queries: Tensor | None = None) -> list[Entries]:
    """What a page holds after each step of a demotion."""
    held = [Entries(entries.keys.float(), entries.values.float(), None)]
    for layout in steps:
        held.append(codec.open(codec.seal(held[-1], layout, queries), layout))
    return held


@pytest.mark.parametrize("chain", CHAINS, ids="->".join)
def test_a_chain_costs_no_more_than_its_steps(chain):
    """bf16 -> A -> B: each entry is off by no more than the bounds of all steps together, each taken from what was sealed.

    A merged page keeps keys of entries: those are off by what they were before, and by the last step. (Its values are means,
    which the next test follows.)
    """
    codec, layouts = chain_model(chain)
    entries = some_pages(8)
    held = entries_left(entries, *layouts, codec=codec)
    k_sum, v_sum = (torch.zeros(entries.keys.shape[:-1], dtype=torch.float64) for _ in range(2))
    keys, values = kept(entries.keys), kept(entries.values)
    for before, layout in zip(held, layouts, strict=False):
        sealed, _ = merged_for(codec, before, layout, None)
        if layout.is_merged:
            pivots = (sealed.keys[:, :, :, None] == before.keys[:, :, None]).all(-1).int().argmax(-1)
            keys, k_sum = keys.gather(2, pivots[..., None].expand_as(sealed.keys)), k_sum.gather(2, pivots)
        k_bound, v_bound = entry_norm_bounds(sealed.keys, sealed.values, layout, codec.bases)
        k_sum = k_sum + k_bound
        v_sum = v_sum + v_bound if not layout.is_merged else torch.full_like(k_sum, math.inf)
    assert bool(((held[-1].keys.double() - keys).norm(dim=-1) <= k_sum).all())
    if not layouts[-1].is_merged:
        assert bool(((held[-1].values.double() - values).norm(dim=-1) <= v_sum).all())


@pytest.mark.parametrize("chain", CHAINS, ids="->".join)
def test_a_chain_of_attention_costs_no_more_than_its_steps(chain):
    """The same for what queries read of a page, which holds for merged entries too: the triangle inequality, so nothing but
    the steps themselves was lost on the way. 1e-9 is the rounding of the sums in float64."""
    codec, layouts = chain_model(chain)
    held = entries_left(some_pages(8), *layouts, codec=codec)
    queries = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)) / 8
    read = [attention(entries, queries) for entries in held]
    steps = sum((b - a).norm(dim=-1) for a, b in pairwise(read))
    assert bool(((read[-1] - read[0]).norm(dim=-1) <= steps * (1 + 1e-9)).all())
    # Each step alone costs something.
    assert all(float((b - a).abs().max()) > 0 for a, b in pairwise(read))


@pytest.mark.parametrize("chain", CHAINS, ids="->".join)
def test_the_direct_way_is_not_worse_on_average(chain):
    """Errors of the steps are independent, so their squares add. In merged pages a chain may also choose other pivots, by
    chance better or worse ones: where those differ by a tenth, the mean of 64 x 6 pieces is off by 0.1 / sqrt(384)."""
    codec, layouts = chain_model(chain)
    entries = some_pages(64, seed=5)
    queries = torch.randn(32, 64, generator=torch.Generator().manual_seed(4)) / 8
    asked = queries.expand(64, 6, -1, -1)
    held = entries_left(entries, *layouts, codec=codec, queries=asked)
    direct = codec.open(codec.seal(entries, layouts[-1], asked), layouts[-1])
    truth = attention(entries, queries)
    chance = 1.01 if layouts[-1].is_merged else 1
    direct_error, chain_error = (rms(attention(x, queries) - truth) for x in (direct, held[-1]))
    assert direct_error <= chance * chain_error
    if not layouts[-1].is_merged:
        assert rms(direct.keys.double() - entries.keys.double()) <= rms(held[-1].keys.double() - entries.keys.double())
        assert rms(direct.values.double() - entries.values.double()) <= rms(
            held[-1].values.double() - entries.values.double()
        )


def test_a_codec_on_the_device_it_is_on():
    codec, ladder = model("csa2-2x")
    entries = some_pages(1)
    moved = codec.to("cpu")
    layout = ladder.layouts[-1]
    assert torch.equal(moved.seal(entries, layout), codec.seal(entries, layout))
    assert torch.equal(codec.seal(entries, layout), seal_pages(entries, layout, codec.bases))
