"""The learned correction of the score: what it starts as, what it leaves alone, and what the codec does with it."""

from dataclasses import replace

import pytest
import torch

from csa2.calibrate.fingerprint import ModelShape
from csa2.calibrate.scorer_training import hidden_units, parameters
from csa2.check.formats import cache_options
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.codec.importance import observed_attention
from csa2.codec.merging import merge_heads
from csa2.codec.scorer import LIMIT, SCALARS, Scorer, scalar_features
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageGeometry

N, LAYERS, GROUPS, S, D, UNITS = 3, 2, 2, 64, 64, 4
HEADS = LAYERS * GROUPS
FEATURES = 2 * D + SCALARS


def random_scorer(seed: int = 0, outer: float = 1.0) -> Scorer:
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(HEADS, FEATURES, 1 + UNITS, generator=random) / FEATURES**0.5
    weights[..., 0] *= outer
    offsets = torch.randn(HEADS, 1 + UNITS, generator=random)
    offsets[..., 0] *= outer
    return Scorer(weights, offsets, outer * torch.randn(HEADS, UNITS, generator=random))


@pytest.fixture(scope="module")
def pages() -> tuple[Entries, torch.Tensor]:
    """Entries and a sample of queries to each page."""
    random = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, N, HEADS, S, D, generator=random)
    return Entries(keys, values, None), torch.randn(N, HEADS, 5, D, generator=random) * 0.3


def codec_of(tail: str, scorer: Scorer | None):
    geometry = PageGeometry(LAYERS, GROUPS, D, S, torch.bfloat16)
    codec, ladder = codec_and_ladder(cache_options(tail), geometry, make_rotation(D, neox=True), None)
    return replace(codec, scorer=scorer), ladder.layouts[ladder.tail]


def test_it_starts_as_the_training_free_score(pages):
    """Last layer zero, whatever the first one holds: not a bit of a page changes."""
    entries, queries = pages
    scorer = random_scorer(outer=0.0)
    assert torch.equal(scorer.correction(entries, observed_attention(entries, queries)), torch.ones(N, HEADS, S))
    for tail in ("csa2-4x", "csa2-8x"):
        free, layout = codec_of(tail, None)
        codec, _ = codec_of(tail, scorer)
        assert torch.equal(codec.seal(entries, layout, queries), free.seal(entries, layout, queries))


def test_the_codec_merges_by_the_corrected_score(pages):
    entries, queries = pages
    scorer = random_scorer()
    seen = []

    def merging(entries, importance, *more):
        seen.append(importance)
        return merge_heads(entries, importance, *more)

    free, layout = codec_of("csa2-8x", None)
    codec, _ = codec_of("csa2-8x", scorer)
    assert not torch.equal(codec.seal(entries, layout, queries), free.seal(entries, layout, queries))
    for one in (codec, free):
        one.merged(entries, layout, queries, merging)
    corrected, plain = seen
    assert torch.equal(corrected, plain * scorer.correction(entries, observed_attention(entries, queries)))


def test_formats_that_do_not_merge_are_not_touched(pages):
    entries, queries = pages
    for tail in ("fp4", "csa2-2x"):
        free, layout = codec_of(tail, None)
        codec, _ = codec_of(tail, random_scorer())
        assert torch.equal(codec.seal(entries, layout, queries), free.seal(entries, layout, queries))


def test_pages_without_a_sample_and_merged_ones_are_left_alone(pages):
    entries, queries = pages
    scorer = random_scorer()
    queries = queries.clone()
    queries[1] = 0
    factor = scorer.correction(entries, observed_attention(entries, queries))
    assert torch.equal(factor[1], torch.ones(HEADS, S))
    assert not torch.equal(factor[0], torch.ones(HEADS, S))
    bias = torch.zeros(N, HEADS, S)
    bias[0, 1, 5] = 0.5
    merged = Entries(entries.keys, entries.values, bias)
    factor = scorer.correction(merged, observed_attention(merged, queries))
    assert torch.equal(factor[0, 1], torch.ones(S))
    assert not torch.equal(factor[0, 2], torch.ones(S))


def test_the_formula(pages):
    """Against the definition over features laid side by side, in fp64."""
    entries, queries = pages
    observed = observed_attention(entries, queries)
    scorer = random_scorer(outer=0.5)
    x = torch.cat(
        [entries.keys - entries.keys.mean(-2, keepdim=True), entries.values, scalar_features(entries, observed)], -1
    ).double()
    wide = scorer.map(torch.Tensor.double)
    hidden = x @ wide.weights + wide.offsets[:, None]
    f = hidden[..., 0] + (torch.nn.functional.silu(hidden[..., 1:]) * wide.outer[:, None]).sum(-1)
    gate = torch.sigmoid(f)
    expected = (gate / (1 - gate)).float()
    # Sums of 132 products in fp32 are within 1e-5 of their size, which the exponential makes relative.
    torch.testing.assert_close(scorer.correction(entries, observed), expected, rtol=1e-4, atol=0)


def test_keys_count_relative_to_the_page_mean(pages):
    """What rotates slowly is a constant in a page: it must not look like an important token. Sizes are taken out here."""
    entries, queries = pages
    scorer = random_scorer()
    scorer.weights[:, 2 * D :] = 0
    moved = Entries(entries.keys + 8.0, entries.values, None)
    observed = observed_attention(entries, queries)
    # Adding 8 to fp32 keys near 1 costs their last 3 bits.
    torch.testing.assert_close(scorer.correction(moved, observed), scorer.correction(entries, observed), rtol=1e-4, atol=0)


def test_extreme_weights_give_finite_scores(pages):
    entries, queries = pages
    huge = random_scorer().map(lambda tensor: tensor * 1e6)
    factor = huge.correction(entries, observed_attention(entries, queries))
    assert bool(((factor >= torch.tensor(-LIMIT).exp()) & (factor <= torch.tensor(LIMIT).exp())).all())


def test_it_moves_with_its_codec(pages):
    codec, _ = codec_of("csa2-4x", random_scorer())
    moved = codec.to("meta")
    assert moved.scorer is not None
    assert {moved.scorer.weights.device.type, moved.scorer.offsets.device.type, moved.scorer.outer.device.type} == {"meta"}
    assert codec_of("csa2-4x", None)[0].to("cpu").scorer is None


@pytest.mark.parametrize(
    ("shape", "units"),
    [
        (ModelShape(32, 32, 32, 128), 8),  # Llama 2 7B
        (ModelShape(32, 32, 8, 128), 16),  # Llama 3 8B
        (ModelShape(28, 28, 4, 128), 16),  # Qwen2.5 7B
        (ModelShape(30, 9, 3, 64), 16),  # the demo model
    ],
)
def test_a_few_million_weights_at_most(shape, units):
    assert hidden_units(shape) == units
    assert parameters(shape, units) <= 4_000_000
    heads = shape.num_layers * shape.num_kv_heads
    features = 2 * shape.head_dim + SCALARS
    scorer = Scorer(torch.empty(heads, features, 1 + units), torch.empty(heads, 1 + units), torch.empty(heads, units))
    assert scorer.parameters == parameters(shape, units)
