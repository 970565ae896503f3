"""Triton attention over pages of mixed formats, in the interpreter, against attention in float64."""

import math

import pytest
import torch
from interpreted import interpreted
from paged_scenes import ALL_FORMATS, LAYERS, MIXED, PLAIN, SHAPES, UNIT, Scene, make_scene, oracle
from torch import Tensor

from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.paged_attention import reference
from sgl_kernels.triton.attention import Partials, TritonAttention
from sgl_kernels.triton.launch import decode_columns
from sgl_kernels.triton.plan import check_mapped, plan_batch, query_blocks

CPU = torch.device("cpu")
OPERANDS = [torch.float32, torch.float16]
"""Types of the operands of matrix products. On a device plain pages of bf16 have bf16, which the interpreter cannot do."""


def decode(
    scene: Scene, query: Tensor, layer: int, operands: torch.dtype, *, splits: int = 2, others: Partials | None = None
) -> tuple[Tensor, Tensor]:
    """Output in fp32, and log-sum-exp of base 2, of one token of each request."""
    count = len(scene.lengths)
    kernels = TritonAttention(scene.layouts, scene.bases, operands, operands)
    plan = plan_batch(
        scene.table, scene.lengths, scene.formats, scene.offsets, query_blocks([1] * count, 1, CPU),
        num_formats=len(scene.layouts), page_size=scene.geometry.page_size, splits=splits,
    )  # fmt: skip
    present = sorted(set(scene.formats[scene.formats >= 0].tolist()))
    lse = torch.full(query.shape[:2], math.nan)
    columns = decode_columns(scene.repeat)
    with interpreted():
        out = kernels.attend(
            query.float(), scene.arena, plan, layer, scene.scale, columns=columns, others=others, formats=present, lse=lse
        )
    return out, lse


def assert_close(scene: Scene, query: Tensor, layer: int, operands: torch.dtype, out: Tensor, lse: Tensor) -> None:
    """Every request within the bound of its own input: of fp32 throughout, or of the operands rounded to fp16."""
    unit = 0.0 if operands == torch.float32 else UNIT[operands]
    for i, held in enumerate(scene.held):
        if held.keys.shape[2] == 0:
            assert bool((lse[i] == -math.inf).all())
            assert bool((out[i] == 0).all())
            continue
        want, bound = oracle(scene, held, layer, query[i : i + 1], unit=unit)
        excess = ((out[i : i + 1].double() - want).abs() - bound).max()
        assert bool(excess <= 0), f"request {i}: {float(excess)} beyond the bound"
        keys = held.keys[layer].repeat_interleave(scene.repeat, 0)
        logits = (query[i].double()[:, None] * keys.transpose(0, 1).transpose(0, 1)).sum(-1) * scene.scale
        logits = logits + held.bias[layer].repeat_interleave(scene.repeat, 0)
        # Off by at most the largest error of a logit, which |q'| |k'| bounds.
        size = float(query.double().norm(dim=-1).max() * held.key_terms[layer].norm(dim=-1).max()) * scene.scale
        tolerance = size * (2 * unit if unit else 2.0**-18) + 2.0**-16
        assert torch.allclose(lse[i].double() * math.log(2), torch.logsumexp(logits, -1), rtol=0, atol=tolerance)


def check(scene: Scene, layer: int, operands: torch.dtype, *, splits: int = 2, times: float = 1.0) -> None:
    query = scene.query(len(scene.lengths)) * times
    assert_close(scene, query, layer, operands, *decode(scene, query, layer, operands, splits=splits))


@pytest.mark.parametrize("operands", OPERANDS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("only", ALL_FORMATS)
def test_every_format(only, layer, operands):
    check(make_scene([128, 65], (32, 3, 2, torch.bfloat16), only=only), layer, operands)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] >= 64], ids=str)
def test_mixed_pages_of_every_shape(shape):
    check(make_scene([MIXED], shape), SHAPES.index(shape) % 2, torch.float32, splits=1)


@pytest.mark.parametrize("only", ["csa2-4x", "fp4", PLAIN])
def test_more_query_heads_than_small_blocks_have_columns(only):
    """Multi-query attention: one token of 48 heads takes the block of extend."""
    assert [decode_columns(group) for group in (1, 7, 32, 33, 128)] == [8, 8, 32, 128, 128]
    check(make_scene([70, 129], (32, 1, 48, torch.float32), only=only), 0, torch.float32)


def test_too_many_query_heads_are_refused():
    with pytest.raises(KernelLayoutError, match="129 query heads to a KV head: the Triton kernels take up to 128"):
        decode_columns(129)


@pytest.mark.parametrize("only", ["csa2-8x", "uneven", "fp4", PLAIN])
@pytest.mark.parametrize("size", [32, 128])
def test_pages_of_other_sizes(size, only):
    for layer in LAYERS:
        check(make_scene([2 * size + 1], (32, 3, 1, torch.float32), size=size, only=only), layer, torch.float32)


@pytest.mark.parametrize("only", ["csa2-8x", "fp4"])
def test_more_pages_than_a_run(only):
    """66 pages are two runs; in 8x the last tile of a run is not full."""
    check(make_scene([66 * 32], (32, 1, 1, torch.float32), size=32, only=only), 0, torch.float32, splits=1)


def test_requests_of_any_length_in_one_batch():
    check(make_scene([0, 1, 63, 64, 65, 129], (32, 2, 2, torch.float16)), 0, torch.float16, splits=3)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_the_number_of_splits_changes_nothing(splits):
    """Five parts of three pages: some parts are empty."""
    check(make_scene([192], (32, 1, 3, torch.float32), only="csa2-4x"), 0, torch.float32, splits=splits)


@pytest.mark.parametrize("operands", OPERANDS, ids=str)
@pytest.mark.parametrize("times", [50.0, 1e-4])
def test_long_and_short_queries(times, operands):
    """One token takes nearly all the weight, or none does: fp16 must neither overflow nor lose anything."""
    for layer in LAYERS:
        check(make_scene([129], (32, 2, 2, torch.float32)), layer, operands, times=times)


@pytest.mark.parametrize("only", ["fp4", "csa2-2x", "fp8"])
@pytest.mark.parametrize("size", [1000.0, 1e-3])
def test_an_outlier_query_channel_does_not_drown_the_others(size, only):
    scene = make_scene([128], (64, 1, 2, torch.float16), only=only)
    for layer in LAYERS:
        query = scene.query(1)
        query[..., 5] *= size
        assert_close(scene, query, layer, torch.float16, *decode(scene, query, layer, torch.float16))


def test_rubbish_in_free_places_and_behind_the_last_token_never_reaches_decode():
    """0xFF is NaN in every dtype and in E4M3."""
    for layer in LAYERS:
        results = []
        for byte in (0, 0xFF):
            scene = make_scene([3 * 64 + 1, 1], (32, 2, 2, torch.bfloat16), rubbish=byte, tail=byte)
            results.append(decode(scene, scene.query(2), layer, torch.float32)[0])
        assert torch.equal(*results)


def test_a_broken_query_stays_where_it_is():
    scene = make_scene([64, 70], (32, 1, 2, torch.float32), only="csa2-4x")
    query = scene.query(2)
    whole = decode(scene, query, 0, torch.float32)[0]
    query[1, 0] = math.nan
    broken = decode(scene, query, 0, torch.float32)[0]
    assert torch.equal(broken[0], whole[0])
    assert torch.equal(broken[1, 1], whole[1, 1])


@pytest.mark.parametrize("base2", [True, False])
def test_partial_results_of_others_join(base2):
    """As FlashInfer gives them, of base 2, and others natural: the same as if all pages were read here."""
    scene = make_scene([129, 70, 64], (32, 2, 2, torch.float32))
    query = scene.query(3)
    whole, whole_lse = decode(scene, query, 0, torch.float32)
    out, lse = torch.randn(2, 3, 4, 32, generator=torch.Generator().manual_seed(0)), torch.randn(2, 3, 4)
    lse[1, 2] = -math.inf  # a part with nothing
    out[1, 2] = math.nan
    got, got_lse = decode(scene, query, 0, torch.float32, others=Partials(out, lse if base2 else lse * math.log(2), base2))
    parts = torch.stack((whole_lse, *lse)).double() * math.log(2)
    weight = torch.softmax(parts, 0)[..., None]
    want = (weight * torch.stack((whole, out[0], out[1].nan_to_num())).double()).sum(0)
    assert torch.allclose(got.double(), want, rtol=0, atol=1e-5)  # fp32 of values up to 4
    assert torch.allclose(got_lse.double() * math.log(2), torch.logsumexp(parts, 0), rtol=0, atol=1e-5)


def test_the_reference_says_the_same():
    scene = make_scene([MIXED], (32, 3, 3, torch.float32))
    query = scene.query(1)
    for layer in LAYERS:
        want = reference.decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
        bound = oracle(scene, scene.held[0], layer, query)[1]
        got = decode(scene, query, layer, torch.float32)[0]
        assert bool(((got - want).abs() <= 2 * bound).all())


def test_an_unmapped_page_is_an_error():
    scene = make_scene([128], SHAPES[0])
    scene.formats[scene.table[0, 1]] = -1
    with pytest.raises(ValueError, match=r"page \d+ is read but not mapped"):
        check_mapped(scene.table, scene.lengths, scene.formats, 64)


def test_pages_that_the_kernels_do_not_read_are_refused():
    scene = make_scene([64], (32, 1, 1, torch.float32), separated_at=0)
    with pytest.raises(KernelLayoutError, match="separated from their positions"):
        TritonAttention(scene.layouts, scene.bases)
    scene = make_scene([64], (34, 1, 1, torch.float32), only=PLAIN)
    with pytest.raises(KernelLayoutError, match="multiples of 4"):
        TritonAttention(scene.layouts[:1], scene.bases)
