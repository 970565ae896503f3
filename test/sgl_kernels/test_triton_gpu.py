"""Triton attention on a device against attention in float64, and sealing against the torch codec. Skipped without one; see
docs/gpu.md."""

import pytest
import torch
from hard_pages import bases_of, biases, geometry, layout_of, normal, weights
from paged_scenes import ALL_FORMATS, LAYERS, MIXED, PLAIN, UNIT, Scene, as_written, make_scene, oracle
from torch import Tensor

from sgl_kernels.page_codec.reference import CodecBases, Entries, open_pages, seal_pages
from sgl_kernels.page_layout import plain_layout
from sgl_kernels.triton.attention import TritonAttention
from sgl_kernels.triton.codec import TritonPageCodec
from sgl_kernels.triton.launch import EXTEND_COLUMNS, decode_columns
from sgl_kernels.triton.plan import BatchPlan, QueryBlocks, plan_batch, query_blocks

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]


def on_device(bases: CodecBases) -> CodecBases:
    return CodecBases(bases.flat.to(GPU), None if bases.reduced is None else bases.reduced.to(GPU))


def kernels_of(scene: Scene) -> TritonAttention:
    return TritonAttention(scene.layouts, on_device(scene.bases))


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


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ALL_FORMATS[1:])
def test_pages_are_sealed_and_opened_as_by_the_torch_codec(name, dim):
    """See test_triton_codec.py, which does this in the interpreter, for the bounds."""
    g = geometry(dim, 3, torch.bfloat16)
    layout, bases = layout_of(name, g), bases_of(g)
    codec = TritonPageCodec([plain_layout(PLAIN, g), layout], on_device(bases))
    keys, values, bias = normal(layout, 3, 1) + normal(layout, 1, 3)[:, :, :1], normal(layout, 3, 2), biases(layout, 3)
    weight = weights(layout, 3)
    want = seal_pages(Entries(keys, values, bias), layout, bases, weight)
    entries = Entries(keys.to(GPU), values.to(GPU), None if bias is None else bias.to(GPU))
    packed = codec.seal(entries, 1, weight.to(GPU)).cpu()
    assert float((packed != want).float().mean()) < 1e-3
    opened = codec.open(want.view(-1).to(GPU), torch.arange(3, device=GPU) * layout.page_bytes, 1)
    known = open_pages(want, layout, bases)
    for got, wanted in ((opened.keys, known.keys), (opened.values, known.values)):
        assert torch.allclose(got.cpu(), wanted, rtol=0, atol=20 * 256 * 2.0**-24)
    if opened.bias is not None:
        assert torch.equal(opened.bias.cpu(), known.bias)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_plain_pages_are_opened_exactly(dtype):
    g = geometry(128, 2, dtype)
    layout = plain_layout(PLAIN, g)
    pages = torch.randn(3, 2, 2, 2, 64, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    pages[0, 0, 0, 0, 3] = torch.inf
    pages[0, 0, 0, 0, 4] = torch.nan
    data = pages.view(-1).view(torch.uint8).to(GPU)
    opened = TritonPageCodec([layout], on_device(bases_of(g))).open(data, torch.arange(3, device=GPU) * layout.page_bytes, 0)
    wanted = pages.float().nan_to_num(0, 0, 0)
    assert torch.equal(opened.keys.cpu(), wanted[:, :, 0].flatten(1, 2))
    assert torch.equal(opened.values.cpu(), wanted[:, :, 1].flatten(1, 2))
