"""New tokens: stored in plain pages, and attending to the pages before them and to themselves, in the interpreter."""

import math

import pytest
import torch
from interpreted import interpreted
from paged_scenes import ALL_FORMATS, LAYERS, MIXED, PLAIN, UNIT, Scene, as_written, make_scene, oracle

from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.page_layout import PageGeometry, plain_layout
from sgl_kernels.paged_attention import reference
from sgl_kernels.triton.attention import TritonAttention
from sgl_kernels.triton.launch import EXTEND_COLUMNS
from sgl_kernels.triton.plan import plan_batch, query_blocks

CPU = torch.device("cpu")


def check(scene: Scene, counts: list[int], layer: int, operands: torch.dtype, *, splits: int = 1) -> None:
    """Every request within the bound of its own input, in keys and values with a gap between tokens."""
    g = scene.geometry
    kernels = TritonAttention(scene.layouts, scene.bases, operands, operands)
    blocks = query_blocks(counts, EXTEND_COLUMNS // scene.repeat, CPU)
    plan = plan_batch(
        scene.table, scene.lengths, scene.formats, scene.offsets, blocks,
        num_formats=len(scene.layouts), page_size=g.page_size, splits=splits,
    )  # fmt: skip
    query = scene.query(sum(counts))
    joint = torch.randn(sum(counts), 2, g.num_kv_heads, g.head_dim, generator=torch.Generator().manual_seed(3))
    keys, values = joint[:, 0], joint[:, 1]
    lse = torch.full(query.shape[:2], math.nan)
    present = sorted(set(scene.formats[scene.formats >= 0].tolist())) or [0]
    with interpreted():
        out = kernels.extend(
            query, keys, values, scene.arena, plan, layer, scene.scale, columns=EXTEND_COLUMNS, formats=present, lse=lse
        )
    assert bool(lse.isfinite().all())
    start = 0
    for request, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        fresh = as_written(*(x[rows].transpose(0, 1)[None].expand(2, -1, -1, -1) for x in (keys, values)))
        held = scene.held[request].followed_by(fresh)
        unit = 0.0 if operands == torch.float32 else UNIT[operands]
        want, bound = oracle(scene, held, layer, query[rows], new=count, unit=unit)
        excess = ((out[rows].double() - want).abs() - bound).max()
        assert bool(excess <= 0), f"request {request}: {float(excess)} beyond the bound"


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("only", ALL_FORMATS)
def test_every_format(only, layer):
    check(make_scene([128, 65], (32, 3, 2, torch.bfloat16), only=only), [3, 2], layer, torch.float32)


@pytest.mark.parametrize("only", ["fp4", "csa2-2x", "csa2-4x", "fp8", PLAIN])
def test_operands_of_fp16(only):
    for layer in LAYERS:
        check(make_scene([128], (64, 1, 3, torch.float16), only=only), [4], layer, torch.float16)


def test_several_blocks_of_several_requests():
    """Requests without pages before, of one token, and of more tokens than a block has columns."""
    check(make_scene([0, 70, 64, 129], (32, 1, 4, torch.float32), tail=0xFF), [67, 1, 33, 2], 0, torch.float32, splits=2)


@pytest.mark.parametrize("shape", [(100, 1, 2, torch.float32), (80, 1, 7, torch.bfloat16)], ids=str)
def test_mixed_pages(shape):
    check(make_scene([MIXED], shape, tail=0xFF), [2], 1, torch.float32)


@pytest.mark.parametrize("size", [32, 128])
def test_pages_of_other_sizes(size):
    for only in ("csa2-8x", "uneven"):
        check(make_scene([2 * size + 1], (32, 3, 1, torch.float32), size=size, only=only), [2], 0, torch.float32)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(32, 1), (64, 3), (100, 2)])
def test_new_tokens_are_stored_as_the_reference_stores_them(dim, heads, dtype):
    layout = plain_layout(PLAIN, PageGeometry(2, heads, dim, 64, dtype))
    rows = reference.plain_rows(torch.tensor([3, 1, 3, 0, 1]) * layout.page_bytes, torch.tensor([0, 63, 17, 5, 62]), layout)
    joint = torch.randn(6, 2 * heads * dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    keys, values = (x.unflatten(1, (heads, dim)) for x in joint.split(heads * dim, -1))
    kernels = TritonAttention((layout,), CodecBases(torch.eye(dim)))
    want, got = (torch.zeros(5 * layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    padded = torch.cat((rows, torch.tensor([-1])))  # a CUDA graph has more tokens than there are
    with interpreted():
        for layer in (1, 0):
            reference.write_plain(want, rows, layout, layer, keys[:5], values[:5])
            kernels.write_plain(got, padded, layer, keys, values)
    assert torch.equal(got, want)
