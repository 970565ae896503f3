"""Triton attention on a device against attention in float64. Skipped without one; see docs/gpu.md."""

import pytest
import torch
from paged_scenes import ALL_FORMATS, LAYERS, MIXED, UNIT, Scene, as_written, make_scene, oracle
from torch import Tensor

from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.triton.attention import TritonAttention
from sgl_kernels.triton.launch import EXTEND_COLUMNS, decode_columns
from sgl_kernels.triton.plan import BatchPlan, QueryBlocks, plan_batch, query_blocks

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]


def kernels_of(scene: Scene) -> TritonAttention:
    reduced = None if scene.bases.reduced is None else scene.bases.reduced.to(GPU)
    return TritonAttention(scene.layouts, CodecBases(scene.bases.flat.to(GPU), reduced))


def plan_of(scene: Scene, blocks: QueryBlocks, splits: int = 3) -> BatchPlan:
    table, lengths, formats, offsets = (x.to(GPU) for x in (scene.table, scene.lengths, scene.formats, scene.offsets))
    return plan_batch(
        table, lengths, formats, offsets, blocks,
        num_formats=len(scene.layouts), page_size=scene.geometry.page_size, splits=splits,
    )  # fmt: skip


def assert_close(scene: Scene, query: Tensor, layer: int, out: Tensor) -> None:
    # Codes meet fp16, plain pages their own dtype, and the output is rounded to that of the query.
    unit = max(UNIT[query.dtype], UNIT[torch.float16])
    for i, held in enumerate(scene.held):
        want, bound = oracle(scene, held, layer, query[i : i + 1], unit=unit)
        assert bool(((out[i : i + 1].double().cpu() - want).abs() <= bound).all()), f"request {i}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("only", ALL_FORMATS)
def test_decode_of_every_format(only, layer, dtype):
    scene = make_scene([640, 65, 1], (128, 3, 4, dtype), only=only, tail=0xFF)
    query = scene.query(3, dtype)
    out = kernels_of(scene).attend(
        query.to(GPU), scene.arena.to(GPU), plan_of(scene, query_blocks([1] * 3, 1, GPU)), layer, scene.scale,
        columns=decode_columns(4),
    )  # fmt: skip
    assert_close(scene, query, layer, out)


@pytest.mark.parametrize("only", ["fp4", "csa2-8x"])
def test_more_pages_than_a_run(only):
    scene = make_scene([150 * 64], (128, 2, 8, torch.bfloat16), only=only)
    query = scene.query(1, torch.bfloat16)
    plan = plan_of(scene, query_blocks([1], 1, GPU), splits=1)
    out = kernels_of(scene).attend(query.to(GPU), scene.arena.to(GPU), plan, 0, scene.scale, columns=decode_columns(8))
    assert_close(scene, query, 0, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_extend_over_mixed_pages(layer, dtype):
    scene, count = make_scene([MIXED], (128, 2, 4, dtype), tail=0xFF), 130
    query = scene.query(count, dtype)
    keys, values = torch.randn(2, count, 2, 128, generator=torch.Generator().manual_seed(3)).to(dtype)
    plan = plan_of(scene, query_blocks([count], EXTEND_COLUMNS // 4, GPU), splits=1)
    arguments = (x.to(GPU) for x in (query, keys, values, scene.arena))
    out = kernels_of(scene).extend(*arguments, plan, layer, scene.scale, columns=EXTEND_COLUMNS)
    fresh = as_written(*(x.transpose(0, 1)[None].expand(2, -1, -1, -1) for x in (keys, values)))
    want, bound = oracle(scene, scene.held[0].followed_by(fresh), layer, query, new=count, unit=UNIT[dtype])
    assert bool(((out.double().cpu() - want).abs() <= bound).all())


def test_a_graph_replays_with_another_page_table():
    """Plan and attention are captured; then two requests change places in the tables at the same addresses."""
    scene = make_scene([640, 640], (128, 2, 4, torch.bfloat16))
    query, kernels, arena = scene.query(2, torch.bfloat16).to(GPU), kernels_of(scene), scene.arena.to(GPU)
    table, lengths, formats, offsets = (x.to(GPU) for x in (scene.table, scene.lengths, scene.formats, scene.offsets))
    blocks = query_blocks([1, 1], 1, GPU)

    def step() -> Tensor:
        plan = plan_batch(table, lengths, formats, offsets, blocks, num_formats=len(scene.layouts), page_size=64, splits=2)
        return kernels.attend(query, arena, plan, 0, scene.scale, columns=decode_columns(4))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    table.copy_(table.flip(0))
    query.copy_(query.flip(0))
    graph.replay()
    assert_close(scene, query.flip(0).cpu(), 0, out.flip(0))
