"""Compiled attention over pages of mixed formats, for every instruction set of this CPU, against float64."""

import math

import pytest
import torch
from paged_scenes import ALL_FORMATS, LAYERS, MIXED, PLAIN, SHAPES, UNIT, Held, Scene, as_written, make_scene, oracle
from torch import Tensor

from sgl_kernels.cpu import isa as isas
from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.page_layout import PageGeometry, plain_layout
from sgl_kernels.paged_attention import reference
from sgl_kernels.paged_attention.cpu import CpuAttention

ISAS = isas.available()


def new_tokens(scene: Scene, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Query (T, H, D), keys and values (T, G, D) of new tokens in the model dtype, as views with a gap between tokens."""
    g = scene.geometry
    heads = g.num_kv_heads * scene.repeat
    random = torch.Generator().manual_seed(3)
    joint = torch.randn(sum(counts), (heads + 2 * g.num_kv_heads) * g.head_dim, generator=random).to(g.dtype)
    q, k, v = joint.split([heads * g.head_dim, g.num_kv_heads * g.head_dim, g.num_kv_heads * g.head_dim], -1)
    shape = (len(joint), -1, g.head_dim)
    return q.unflatten(1, shape[1:]), k.unflatten(1, shape[1:]), v.unflatten(1, shape[1:])


def attend(scene: Scene, counts: list[int], layer: int, isa: str) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Output, log-sum-exp, and the new tokens."""
    kernels = CpuAttention(scene.layouts, scene.bases, isa)
    plan = kernels.plan(scene.table, scene.lengths, torch.tensor(counts), scene.formats, scene.offsets)
    q, k, v = new_tokens(scene, counts)
    lse = torch.full(q.shape[:2], math.nan)
    out = kernels.attend(q, k, v, scene.arena, plan, layer, scene.scale, lse)
    assert out.dtype == q.dtype
    return out, lse, (q, k, v)


def assert_close(scene: Scene, counts: list[int], layer: int, isa: str) -> None:
    """Every request within the bound of its own input."""
    out, lse, (q, k, v) = attend(scene, counts, layer, isa)
    # Model dtypes other than bfloat16 are computed in fp32, and only the output is rounded.
    unit = UNIT[q.dtype] if q.dtype != torch.float32 else 0.0
    start = 0
    for request, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        fresh = as_written(*(x[rows].transpose(0, 1)[None].expand(2, -1, -1, -1) for x in (k, v)))
        held = scene.held[request].followed_by(fresh)
        want, bound = oracle(scene, held, layer, q[rows], new=count, unit=unit)
        excess = ((out[rows].double() - want).abs() - bound).max()
        assert bool(excess <= 0), f"request {request}: {float(excess)} beyond the bound"
        assert_lse(scene, held, layer, q[rows], lse[rows], count)


def assert_lse(scene: Scene, held: Held, layer: int, query: Tensor, lse: Tensor, new: int) -> None:
    repeat = scene.repeat
    logits = query.double().transpose(0, 1) @ held.keys[layer].repeat_interleave(repeat, 0).transpose(-1, -2) * scene.scale
    logits = logits + held.bias[layer].repeat_interleave(repeat, 0)[:, None]
    n = held.keys.shape[2]
    future = torch.ones(new, new, dtype=torch.bool).triu(1)
    logits[..., n - new :] = logits[..., n - new :].masked_fill(future, -math.inf)
    # A log-sum-exp is off by at most the largest error of a logit; |q'| |k'| bounds those of its rounded operands.
    size = query.double().norm(dim=-1).max() * held.key_terms[layer].norm(dim=-1).max() * scene.scale
    tolerance = float(size) * (2 * UNIT[query.dtype] if query.dtype == torch.bfloat16 else 2.0**-18) + 2.0**-16
    assert torch.allclose(lse.double().transpose(0, 1), torch.logsumexp(logits, -1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_batches(shape, layer, isa):
    scene = make_scene([0, 1, 63, 64, 65, 129, MIXED], shape)
    assert_close(scene, [5, 1, 2, 16, 1, 3, 17], layer, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_pages_of_other_sizes(layer, size, isa):
    scene = make_scene([size - 1, size, 9 * size + 1], (64, 2, 2, torch.bfloat16), size=size)
    assert_close(scene, [2, 1, 3], layer, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("counts", [[1], [2], [130], [700], [1300]], ids=str)
def test_many_new_tokens(counts, isa):
    """More rows than a block, than a chunk of entries and than a task takes."""
    scene = make_scene([0], (64, 1, 3, torch.bfloat16))
    assert_close(scene, counts, 0, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("only", ALL_FORMATS)
def test_long_prefix_of_one_format(only, isa):
    """More pages than a chunk takes, and parts of a prefix on several threads."""
    scene = make_scene([1536, 70], (64, 3, 3, torch.bfloat16), only=only)
    assert_close(scene, [16, 1], 0, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads_gives_the_same_result(threads, isa):
    """Parts of a prefix are merged; the number of parts follows the number of threads."""
    scene = make_scene([1024 + 5, 64], (64, 2, 2, torch.float32))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert_close(scene, [7, 3], 0, isa)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_stale_bytes_behind_the_last_token_do_not_leak(dtype, isa):
    """0xFF is NaN in every dtype, and lies in all places that are not mapped or not yet written."""
    scene = make_scene([65, 1, 130], (64, 2, 2, dtype), tail=0xFF)
    out, lse, _ = attend(scene, [2, 1, 1], 0, isa)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    assert_close(scene, [2, 1, 1], 0, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_logit_far_below_the_others_counts_nothing(isa):
    """An attention sink: everything else falls below the smallest float."""
    scene = make_scene([128], (64, 1, 1, torch.float32), only=PLAIN)
    kernels = CpuAttention(scene.layouts, scene.bases, isa)
    plan = kernels.plan(scene.table, scene.lengths, torch.tensor([1]), scene.formats, scene.offsets)
    q, k, v = torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), torch.zeros(1, 1, 64)
    q[..., 0], k[..., 0], v[..., 1] = 1e4, 1e3, 2.0
    out = kernels.attend(q, k, v, scene.arena, plan, 0, scene.scale)
    assert torch.equal(out, v)


def test_an_unmapped_page_is_an_error():
    scene = make_scene([128], SHAPES[0])
    kernels = CpuAttention(scene.layouts, scene.bases, "scalar")
    scene.formats[scene.table[0, 1]] = -1
    with pytest.raises(ValueError, match=r"page \d+ is read but not mapped"):
        kernels.plan(scene.table, scene.lengths, torch.tensor([1]), scene.formats, scene.offsets)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("only", ALL_FORMATS)
def test_one_new_token_over_long_prefixes(only, layer, isa):
    """Decode reads pages as they lie; int8 queries and weights stay far inside what bf16 may be off."""
    for shape in (
        (64, 3, 3, torch.bfloat16),
        (80, 1, 1, torch.bfloat16),
        (128, 2, 8, torch.bfloat16),
        (32, 1, 16, torch.bfloat16),
    ):
        scene = make_scene([640, 70, 1], shape, only=only)
        assert_close(scene, [1, 1, 1], layer, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("only", ALL_FORMATS)
@pytest.mark.parametrize("size", [1000.0, 1e-3])
def test_an_outlier_query_channel_does_not_drown_the_others(size, only, isa):
    """One channel of the query far from the rest: the flat basis spreads it, the identity basis quantises beside it."""
    scene = make_scene([256], (64, 1, 2, torch.bfloat16), only=only)
    kernels = CpuAttention(scene.layouts, scene.bases, isa)
    plan = kernels.plan(scene.table, scene.lengths, torch.tensor([1]), scene.formats, scene.offsets)
    q, k, v = new_tokens(scene, [1])
    q = q.clone()
    q[..., 5] *= size
    out = kernels.attend(q, k, v, scene.arena, plan, 0, scene.scale)
    held = scene.held[0].followed_by(as_written(*(x.transpose(0, 1)[None].expand(2, -1, -1, -1) for x in (k, v))))
    want, bound = oracle(scene, held, 0, q, new=1, unit=UNIT[q.dtype])
    assert bool(((out.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(8))
def test_random_page_tables(seed, isa):
    """Requests of any length, shared pages and new tokens of any number, against each request alone."""
    random = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (1,), generator=random))
    lengths = torch.randint(0, 700, (count,), generator=random).tolist()
    counts = torch.randint(1, 20, (count,), generator=random).tolist()
    shape = SHAPES[int(torch.randint(len(SHAPES), (1,), generator=random))]
    scene = make_scene(lengths, shape, tail=0xFF, seed=seed)
    assert_close(scene, counts, seed % 2, isa)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(32, 1), (64, 3), (100, 2)])
def test_new_tokens_are_stored_as_the_reference_stores_them(dim, heads, dtype):
    g = PageGeometry(2, heads, dim, 64, dtype)
    layout = plain_layout(PLAIN, g)
    offsets = torch.tensor([3, 1, 3, 0, 1]) * layout.page_bytes
    rows = reference.plain_rows(offsets, torch.tensor([0, 63, 17, 5, 62]), layout)
    joint = torch.randn(5, 2 * heads * dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    keys, values = (x.unflatten(1, (heads, dim)) for x in joint.split(heads * dim, -1))
    kernels = CpuAttention((layout,), CodecBases(torch.eye(dim)), "scalar")
    want, got = (torch.zeros(5 * layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    for layer in (1, 0):
        reference.write_plain(want, rows, layout, layer, keys, values)
        kernels.write_plain(got, rows, layout, layer, keys, values)
    assert torch.equal(got, want)
