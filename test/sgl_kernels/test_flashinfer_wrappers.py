"""Attention split between FlashInfer and the Triton kernels.

FlashInfer itself needs a device. Here its wrappers are replaced by ones that hold calls against its real signatures, and
compute what it would, in float64, from nothing but what it gets.
"""

import math

import pytest
import torch
from flashinfer_stand_ins import Stand, StandDecode, StandPrefill, bound
from interpreted import interpreted
from paged_scenes import LAYERS, MIXED, Scene, as_written, make_scene, oracle

from sgl_kernels.errors import KernelLayoutError, PlanError
from sgl_kernels.flashinfer import wrappers
from sgl_kernels.flashinfer.plan import DenseFormat, dense_formats, plan_dense
from sgl_kernels.flashinfer.variant import SCALARS, TENSORS, jit_arguments
from sgl_kernels.flashinfer.views import bias_slab, layer_view
from sgl_kernels.flashinfer.wrappers import DenseAttention, FixedScales, GraphLimits, joined_partials
from sgl_kernels.page_layout import PageGeometry, plain_layout
from sgl_kernels.triton.attention import Partials, TritonAttention
from sgl_kernels.triton.launch import EXTEND_COLUMNS, decode_columns
from sgl_kernels.triton.plan import plan_batch, query_blocks

CPU = torch.device("cpu")
WORKSPACE = torch.zeros(16, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(wrappers, "flashinfer_classes", lambda: (StandDecode, StandPrefill))


def dense_of(scene: Scene, dtype: torch.dtype, **more) -> tuple[DenseAttention, tuple[DenseFormat, ...]]:
    formats = dense_formats(scene.layouts)
    heads = scene.geometry.num_kv_heads * scene.repeat
    return DenseAttention(formats, heads, dtype, scene.scale, WORKSPACE, **more), formats


def planned(scene: Scene, formats):
    return plan_dense(scene.table, scene.lengths, scene.formats, scene.offsets, formats, scene.geometry.page_size)


def triton_plan(scene: Scene, blocks):
    return plan_batch(
        scene.table, scene.lengths, scene.formats, scene.offsets, blocks,
        num_formats=len(scene.layouts), page_size=scene.geometry.page_size, splits=1,
    )  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_decode_with_plain_pages_read_by_flashinfer(layer):
    """The result of all pages, those of codes from the Triton kernels."""
    scene = make_scene([MIXED, 70, 64], (64, 2, 4, torch.float16), tail=0xFF)
    dense, formats = dense_of(scene, torch.float16)
    plan = planned(scene, formats)
    dense.plan(plan)
    query = scene.query(3, torch.float16)
    partials = dense.run(query, scene.arena, layer)
    kernels = TritonAttention(scene.layouts, scene.bases, torch.float16, torch.float16)
    with interpreted():
        out = kernels.attend(
            query.float(), scene.arena, triton_plan(scene, query_blocks([1] * 3, 1, CPU)), layer, scene.scale,
            columns=decode_columns(4), others=partials, formats=tuple(sorted(plan.rest)),
        )  # fmt: skip
    for i, held in enumerate(scene.held):
        want, error = oracle(scene, held, layer, query[i : i + 1], unit=2.0**-11)
        assert bool(((out[i : i + 1].double() - want).abs() <= error).all()), f"request {i}"


def test_extend_over_plain_pages_read_by_flashinfer():
    scene = make_scene([MIXED, 0, 70], (32, 1, 4, torch.float16), tail=0xFF)
    counts, layer = [3, 2, 1], 0
    dense, formats = dense_of(scene, torch.float16, extends=True)
    plan = planned(scene, formats)
    dense.plan(plan, counts)
    query = scene.query(6, torch.float16)
    keys, values = torch.randn(2, 6, 1, 32, generator=torch.Generator().manual_seed(3)).half()
    blocks = query_blocks(counts, EXTEND_COLUMNS // 4, CPU)
    kernels = TritonAttention(scene.layouts, scene.bases, torch.float16, torch.float16)
    with interpreted():
        new = kernels.attend_new(query, keys, values, blocks, scene.scale, EXTEND_COLUMNS)
        partials = joined_partials([new, dense.run(query, scene.arena, layer)])
        out = kernels.attend(
            query.float(), scene.arena, triton_plan(scene, blocks), layer, scene.scale,
            columns=EXTEND_COLUMNS, others=partials, formats=tuple(sorted(plan.rest)),
        )  # fmt: skip
    start = 0
    for i, (held, count) in enumerate(zip(scene.held, counts, strict=True)):
        part = slice(start, start + count)
        start += count
        fresh = as_written(*(x[part].transpose(0, 1)[None].expand(2, -1, -1, -1) for x in (keys, values)))
        want, error = oracle(scene, held.followed_by(fresh), layer, query[part], new=count, unit=2.0**-11)
        assert bool(((out[part].double() - want).abs() <= error).all()), f"request {i}"


SIZE = 16


def rows_of(dtype: torch.dtype, entries: int):
    return plain_layout(f"{dtype}/{entries}", PageGeometry(2, 2, 64, entries, dtype))


def test_e4m3_rows_and_merged_entries_have_parts_of_their_own():
    """Formats that the ladder does not have yet: bare E4M3 rows with fixed scales, and merged by two with biases."""
    e4m3 = torch.float8_e4m3fn
    formats = (DenseFormat(0, rows_of(torch.bfloat16, SIZE)), DenseFormat(1, rows_of(e4m3, SIZE)),
               DenseFormat(2, rows_of(e4m3, SIZE // 2), merge=2))  # fmt: skip
    random = torch.Generator().manual_seed(5)
    slot = formats[0].layout.page_bytes
    arena = torch.zeros(8 * slot, dtype=torch.uint8)
    for page in range(8):
        values = torch.randn(slot // 2, generator=random)
        kind = formats[page % 3].layout.geometry.dtype
        stored = values.to(kind).view(torch.uint8)
        arena[page * slot : page * slot + stored.numel()] = stored
    table, lengths = torch.tensor([[0, 1, 2, 4], [5, 3, 6, 0]]), torch.tensor([64, 37])
    kinds = torch.tensor([page % 3 for page in range(8)], dtype=torch.int8)
    slab = bias_slab(arena.numel(), formats[2], "cpu")
    slab.copy_(torch.randint(0, 60, slab.shape, generator=random, dtype=torch.uint8))
    scales = {1: FixedScales([2.0, 0.5], [3.0, 0.25]), 2: FixedScales([1.0, 0.5], [1.0, 2.0])}
    plan = plan_dense(table, lengths, kinds, torch.arange(8) * slot, formats, SIZE)
    dense = DenseAttention(formats, 8, torch.bfloat16, 0.125, WORKSPACE, scales=scales)
    dense.plan(plan)
    query = torch.randn(2, 8, 64, generator=random).bfloat16()
    layer = 1
    got = dense.run(query, arena, layer, {2: slab})
    assert got.out.shape == (3, 2, 8, 64)
    for part, one in enumerate(formats):
        view = layer_view(arena, one, layer).float().double()
        fixed = scales.get(one.index)
        for b in range(2):
            logits, values = [], []
            for depth in range(-(-int(lengths[b]) // SIZE)):
                page = int(table[b, depth])
                if int(kinds[page]) != one.index:
                    continue
                place = page * slot // one.layout.page_bytes
                used = min(SIZE, int(lengths[b]) - depth * SIZE) // one.merge
                k, v = (view[place, half, :, :used].repeat_interleave(4, 0) for half in (0, 1))
                size = torch.einsum("hd,hnd->hn", query[b].double(), k) * 0.125 * (fixed.keys[layer] if fixed else 1.0)
                if one.is_biased:
                    size = size + slab[place, layer, :, :used].repeat_interleave(4, 0).double() / 16
                logits.append(size)
                values.append(v * (fixed.values[layer] if fixed else 1.0))
            if not logits:
                assert bool((got.lse[part, b] == -math.inf).all())
                continue
            joint = torch.cat(logits, 1)
            want = torch.einsum("hn,hnd->hd", torch.softmax(joint, -1), torch.cat(values, 1))
            # Rounded to bf16, and once more by the scale of values.
            assert torch.allclose(got.out[part, b].double(), want, rtol=2.0**-7, atol=1e-6)
            assert torch.allclose(got.lse[part, b].double() * math.log(2), torch.logsumexp(joint, -1), rtol=0, atol=1e-5)


def made(one: DenseFormat, heads: int, **more) -> Stand:
    return DenseAttention((one,), heads, torch.bfloat16, 1.0, WORKSPACE, **more)._wrappers[0]


def test_which_wrapper_reads_what():
    plain, e4m3 = DenseFormat(0, rows_of(torch.bfloat16, 64)), DenseFormat(1, rows_of(torch.float8_e4m3fn, 64))
    merged, merged16 = (DenseFormat(2, rows_of(x, 32), merge=2) for x in (torch.float8_e4m3fn, torch.bfloat16))
    kinds = {
        (plain, 4): (StandDecode, False), (plain, 8): (StandDecode, True), (e4m3, 2): (StandDecode, True),
        (merged, 8): (StandPrefill, None), (merged16, 4): (StandDecode, False), (merged16, 8): (StandPrefill, None),
    }  # fmt: skip
    for (one, heads), (kind, cores) in kinds.items():
        stand = made(one, heads)
        assert type(stand) is kind
        assert stand.made.get("use_tensor_cores") is cores
        assert (stand.made["jit_args"] is not None) == one.is_biased
    assert type(made(plain, 2, extends=True)) is StandPrefill


def test_buffers_of_a_graph_are_as_large_as_flashinfer_asks():
    limits = GraphLimits(3, 50)
    decode = made(DenseFormat(0, rows_of(torch.bfloat16, 64)), 8, graph=limits).made
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    assert [decode[name].numel() for name in names] == [4, 50, 3]
    prefill = made(DenseFormat(0, rows_of(torch.bfloat16, 64)), 8, graph=limits, extends=True).made
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    assert [prefill[name].numel() for name in names] == [4, 4, 50, 3]
    assert all(prefill[name].dtype == torch.int32 for name in names)


def test_a_graph_runs_formats_without_pages_too():
    scene = make_scene([64], (64, 2, 4, torch.float16), only="fp4")
    for graph, parts in ((GraphLimits(1, 8), 1), (None, 0)):
        dense, formats = dense_of(scene, torch.float16, graph=graph)
        dense.plan(planned(scene, formats))
        partials = dense.run(scene.query(1, torch.float16), scene.arena, 0)
        assert partials.out.shape[0] == parts
        assert bool((partials.lse == -math.inf).all())


def test_plans_that_do_not_fit_are_named():
    scene = make_scene([130, 70], (64, 2, 4, torch.float16), only="plain")
    dense, formats = dense_of(scene, torch.float16, graph=GraphLimits(1, 8))
    with pytest.raises(PlanError, match="2 requests in a graph of 1"):
        dense.plan(planned(scene, formats))
    dense, formats = dense_of(scene, torch.float16, graph=GraphLimits(2, 4))
    with pytest.raises(PlanError, match="5 pages of one format in a graph with room for 4"):
        dense.plan(planned(scene, formats))
    with pytest.raises(PlanError, match="new tokens are for extend"):
        dense.plan(planned(scene, formats), [1, 1])
    with pytest.raises(PlanError, match="a plan of the formats"):
        dense.plan(planned(scene, ()))
    natural = Partials(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1), base2=False)
    with pytest.raises(PlanError, match="base 2 and natural"):
        joined_partials([natural, Partials(natural.out, natural.lse)])


def test_arguments_of_the_variant_are_those_that_flashinfer_takes():
    from flashinfer.jit.attention import gen_customize_batch_decode_module, gen_customize_batch_prefill_module

    arguments = jit_arguments(torch.bfloat16, torch.float8_e4m3fn, 128, tensor_cores=False)
    taken = bound(gen_customize_batch_decode_module, *arguments)
    assert (taken["additional_tensor_names"], taken["additional_scalar_names"]) == (list(TENSORS), list(SCALARS))
    assert taken["variant_name"] in taken["variant_decl"]
    bound(gen_customize_batch_prefill_module, "fa2", *arguments, **wrappers.PREFILL_OPTIONS)
    others = [jit_arguments(torch.bfloat16, torch.bfloat16, 128, tensor_cores=False)]
    others.append(jit_arguments(torch.bfloat16, torch.float8_e4m3fn, 64, tensor_cores=False))
    others.append(jit_arguments(torch.bfloat16, torch.float8_e4m3fn, 128, tensor_cores=True))
    assert len({uri for uri, *_ in (arguments, *others)}) == 4
    with pytest.raises(KernelLayoutError, match=r"queries of torch\.float32"):
        jit_arguments(torch.float32, torch.bfloat16, 128, tensor_cores=False)
