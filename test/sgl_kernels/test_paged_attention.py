"""Attention over pages of mixed formats: against attention in float64 over the pages opened by the letter."""

import math

import pytest
import torch
from codec_bounds import U16, U32
from hard_pages import FORMATS, layout_of
from paged_scenes import (
    ALL_FORMATS,
    FLAT,
    LAYERS,
    LENGTHS,
    MIXED,
    SHAPES,
    UNIT,
    Scene,
    as_written,
    eager_attention,
    make_scene,
    oracle,
    rms,
)
from torch import Tensor

from sgl_kernels.page_layout import PageGeometry, plain_layout
from sgl_kernels.paged_attention import reference
from sgl_kernels.paged_attention.reference import decode, extend, gather_blocks, merge, open_plain


def assert_decoded(scene: Scene, query: Tensor, layer: int) -> Tensor:
    """Decode the batch and compare every request with the oracle; the output."""
    out = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
    assert out.dtype == torch.float32
    assert out.shape == query.shape
    for i, held in enumerate(scene.held):
        want, bound = oracle(scene, held, layer, query[i : i + 1])
        assert bool(((out[i : i + 1] - want).abs() <= bound).all()), f"request {i}"
    return out


def decode_bound(scene: Scene, query: Tensor, layer: int) -> Tensor:
    """(B, H, D) the bounds of a decode, to compare two of them."""
    return torch.cat([oracle(scene, held, layer, query[i : i + 1])[1] for i, held in enumerate(scene.held)])


# Where bytes lie


def test_pages_of_an_odd_slab_read_their_own_bytes():
    """A block whose size has a higher power of two than a slab was read from the wrong place (head_dim 80, 3 heads)."""
    for dim in range(32, 257, 2):
        for heads in (1, 2, 3, 5, 7, 8):
            g = PageGeometry(1, heads, dim, 64, torch.bfloat16)
            slab = plain_layout("bf16", g).page_bytes
            for name in FORMATS:
                layout = layout_of(name, g)
                arena = torch.zeros(4 * slab, dtype=torch.uint8)
                offsets = torch.tensor([slab, 3 * slab])
                arena[slab : slab + layout.page_bytes] = 1
                arena[3 * slab : 3 * slab + layout.page_bytes] = 3
                blocks = gather_blocks(arena, offsets, layout, 0)
                assert (blocks == torch.tensor([[1], [3]])).all(), (dim, heads, name)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(32, 1), (64, 3), (80, 3), (100, 2), (256, 1)])
def test_new_tokens_are_stored_where_the_layout_says(dim, heads, dtype):
    g = PageGeometry(2, heads, dim, 64, dtype)
    layout = plain_layout("plain", g)
    random = torch.Generator().manual_seed(1)
    arena = torch.zeros(5 * layout.page_bytes, dtype=torch.uint8)
    offsets = torch.tensor([3, 1, 3, 0, 1]) * layout.page_bytes
    slots = torch.tensor([0, 63, 17, 5, 62])
    rows = reference.plain_rows(offsets, slots, layout)
    want = arena.view(dtype).view(5, 2, 2, heads, 64, dim).clone()
    for layer in (1, 0):
        keys, values = (torch.randn(5, heads, dim, generator=random).to(dtype) for _ in range(2))
        reference.write_plain(arena, rows, layout, layer, keys, values)
        for i, (page, slot) in enumerate(zip((offsets // layout.page_bytes).tolist(), slots.tolist(), strict=True)):
            want[page, layer, 0, :, slot] = keys[i]
            want[page, layer, 1, :, slot] = values[i]
        k, v = open_plain(arena, offsets, layout, layer)
        assert torch.equal(k[torch.arange(5), :, slots], keys)
        assert torch.equal(v[torch.arange(5), :, slots], values)
    assert torch.equal(arena.view(dtype).view(want.shape), want)


def test_values_are_stored_in_the_dtype_of_the_page():
    g = PageGeometry(1, 1, 32, 64, torch.bfloat16)
    layout = plain_layout("bf16", g)
    arena = torch.zeros(layout.page_bytes, dtype=torch.uint8)
    keys = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    rows = reference.plain_rows(torch.tensor([0]), torch.tensor([2]), layout)
    reference.write_plain(arena, rows, layout, 0, keys, 2 * keys)
    k, v = open_plain(arena, torch.tensor([0]), layout, 0)
    assert torch.equal(k[0, 0, 2], keys[0, 0].bfloat16())
    assert torch.equal(v[0, 0, 2], (2 * keys)[0, 0].bfloat16())


# Decode


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_of_a_mixed_batch(shape, layer):
    scene = make_scene(LENGTHS, shape)
    for dtype in (torch.float32, torch.bfloat16):
        assert_decoded(scene, scene.query(len(LENGTHS), dtype), layer)


@pytest.mark.parametrize("only", ALL_FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("repeat", range(1, 9))
def test_decode_of_one_format_and_every_query_group(repeat, layer, only):
    scene = make_scene([64, 192], (32, 2, repeat, torch.bfloat16), only=only)
    assert_decoded(scene, scene.query(2), layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_decode_with_sharp_logits(layer):
    """Long queries: one token takes nearly all the weight, and merging pages must neither overflow nor lose it."""
    scene = make_scene([129, MIXED], (64, 2, 2, torch.bfloat16))
    assert_decoded(scene, scene.query(2) * 50, layer)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("values", [1, 64 * 64 * 2 * 2, 3 * 64 * 64 * 2 * 2])
def test_the_workspace_changes_nothing(values, layer, monkeypatch):
    scene = make_scene([*LENGTHS, 640], (64, 2, 3, torch.bfloat16))
    query = scene.query(len(LENGTHS) + 1)
    whole = assert_decoded(scene, query, layer)
    monkeypatch.setattr(reference, "WORKSPACE_VALUES", values)
    pieces = assert_decoded(scene, query, layer)
    # The pages are the same and each is added to its request in the same order: only the products are cut differently.
    assert torch.allclose(whole, pieces, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_decode_of_a_request_does_not_depend_on_its_neighbours(layer):
    scene = make_scene(LENGTHS, (80, 1, 5, torch.bfloat16))
    query = scene.query(len(LENGTHS))
    batch = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
    bound = decode_bound(scene, query, layer)
    for i in range(len(LENGTHS)):
        alone = decode(query[i : i + 1], scene.arena, scene.plan(i), layer, scene.scale, scene.bases)
        assert bool(((alone[0] - batch[i]).abs() <= 2 * bound[i]).all())
    # A broken query stays where it is.
    query[2] = math.nan
    broken = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
    others = [i for i in range(len(LENGTHS)) if i != 2]
    assert torch.equal(broken[others], batch[others])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_page_shared_by_two_requests(layer):
    scene = make_scene([128, 100], (64, 1, 2, torch.bfloat16))
    scene.table[1, 0] = scene.table[0, 0]
    first, second = scene.held
    scene.held[1] = first.between(0, 64).followed_by(second.between(64, 100))
    assert_decoded(scene, scene.query(2), layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_rubbish_in_free_places_never_reaches_decode(layer):
    shape = (64, 2, 2, torch.bfloat16)
    clean, dirty = (make_scene(LENGTHS, shape, rubbish=byte) for byte in (0, 0xFF))
    query = clean.query(len(LENGTHS))
    outputs = [decode(query, s.arena, s.plan(), layer, s.scale, s.bases) for s in (clean, dirty)]
    assert bool(outputs[1].isfinite().all())
    assert torch.equal(*outputs)


def test_decode_of_bf16_queries_leaves_only_the_rounding_of_the_result():
    """Decode computes in fp32 whatever the query is; eager attention in bf16 rounds at every step."""
    scene = make_scene([256], (64, 2, 2, torch.bfloat16))
    query = scene.query(1, torch.bfloat16)
    out = decode(query, scene.arena, scene.plan(), FLAT, scene.scale, scene.bases).bfloat16()
    want, bound = oracle(scene, scene.held[0], FLAT, query)
    assert bool(((out - want).abs() <= bound + U16 * (want.abs() + bound)).all())
    assert rms(out - want) < rms(eager_attention(scene, scene.held[0], FLAT, query, 0) - want)


# Extend


def assert_extended(scene: Scene, tokens: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Extend request 0 and compare with the oracle: output, what it should be, and what eager attention gives."""
    g = scene.geometry
    query = scene.query(tokens, g.dtype)
    random = torch.Generator().manual_seed(99)
    keys, values = torch.randn(2, tokens, g.num_kv_heads, g.head_dim, generator=random).to(g.dtype)
    out = extend(query, keys, values, scene.arena, scene.plan(0), layer, scene.scale, scene.bases)
    assert out.dtype == g.dtype
    assert out.shape == query.shape
    new = as_written(*(x.transpose(0, 1).expand(2, -1, -1, -1) for x in (keys, values)))
    held = scene.held[0].followed_by(new)
    unit = 0.0 if g.dtype == torch.float32 else UNIT[g.dtype]
    want, bound = oracle(scene, held, layer, query, new=tokens, unit=unit)
    assert bool(((out.double() - want).abs() <= bound).all())
    return out.double(), want, eager_attention(scene, held, layer, query, tokens)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extend_over_a_mixed_prefix(shape, layer):
    for length, tokens in ((129, 5), (MIXED, 65)):
        out, want, eager = assert_extended(make_scene([length], shape, tail=0xFF), tokens, layer)
        assert_as_exact_as_eager(out, want, eager, UNIT[shape[3]])


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("length", [0, *LENGTHS, 200])
def test_extend_of_every_length(length, tokens):
    # Behind the prefix lies NaN: a page that is being filled must be read up to its last token and no further.
    assert_extended(make_scene([length], (32, 2, 2, torch.float32), tail=0xFF), tokens, FLAT)


@pytest.mark.parametrize("repeat", range(1, 9))
def test_extend_with_every_query_group(repeat):
    assert_extended(make_scene([MIXED], (32, 2, repeat, torch.float32)), 7, FLAT)


def test_extend_without_a_prefix_is_plain_causal_attention():
    scene = make_scene([0], (64, 2, 3, torch.float32))
    assert scene.plan(0).parts == ()
    out, want, _ = assert_extended(scene, 9, FLAT)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5)


def assert_as_exact_as_eager(out: Tensor, want: Tensor, eager: Tensor, unit: float) -> None:
    """On the same opened pages eager attention rounds k, v, logits, weights and output. So do we, but q' for the logits;
    the way back through the basis, the weights of the merge and its sum round the output three times more, by `unit` of it
    each at most."""
    assert rms(out - want) <= rms(eager - want) + 3 * unit * rms(want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("only", ALL_FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_extend_is_as_exact_as_eager_attention_in_every_format(layer, only, dtype):
    scene = make_scene([256], (64, 2, 2, dtype), only=only)
    assert_as_exact_as_eager(*assert_extended(scene, 64, layer), UNIT[dtype])


@pytest.mark.parametrize("layer", LAYERS)
def test_rubbish_in_free_places_never_reaches_extend(layer):
    shape = (64, 2, 2, torch.bfloat16)
    outputs = [assert_extended(make_scene([MIXED], shape, rubbish=b, tail=b), 7, layer)[0] for b in (0, 0xFF)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_new_token_extends_as_it_decodes(layer):
    """Decode finds the new token in its page, extend gets it beside the pages; in fp32 both say the same."""
    scene = make_scene([MIXED], (64, 2, 2, torch.float32))
    query = scene.query(1)
    whole = assert_decoded(scene, query, layer)
    new = [x[layer][:, -1].float()[None] for x in (scene.held[0].keys, scene.held[0].values)]
    scene.lengths[0] -= 1
    split = extend(query, *new, scene.arena, scene.plan(0), layer, scene.scale, scene.bases)
    assert bool(((whole - split).abs() <= 2 * decode_bound(scene, query, layer)).all())


# Merge


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_merged_partials_are_the_attention_over_everything(parts):
    random = torch.Generator().manual_seed(parts)
    logits = torch.randn(3, 4, parts, 10, generator=random).double() * 8
    values = torch.randn(3, 4, parts, 10, 16, generator=random).double()
    out = (torch.softmax(logits, -1)[..., None, :] @ values).squeeze(-2)
    lse = torch.logsumexp(logits, -1)
    want = (torch.softmax(logits.flatten(2), -1)[..., None, :] @ values.flatten(2, 3)).squeeze(-2)
    got = merge([(out[:, :, i].float(), lse[:, :, i].float()) for i in range(parts)])
    # lse is rounded to fp32: off by U |lse|, and so is every weight.
    bound = float(values.abs().max()) * U32 * (4 * float(lse.abs().max()) + 2 * parts + 40)
    assert float((got - want).abs().max()) <= bound


def test_one_partial_is_returned_as_it_is():
    out = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert merge([(out, torch.zeros(2))]) is out


def test_partials_without_weight_or_far_apart():
    ones, twos = torch.full((1, 4), 1.0), torch.full((1, 4), 2.0)
    assert merge([(ones, torch.tensor([-math.inf])), (twos, torch.tensor([3.0]))]).tolist() == twos.tolist()
    assert merge([(ones, torch.tensor([900.0])), (twos, torch.tensor([-900.0]))]).tolist() == ones.tolist()
    assert merge([(ones, torch.tensor([500.0])), (twos, torch.tensor([500.0]))]).tolist() == [[1.5] * 4]


def test_merge_keeps_the_dtype_of_the_first_partial():
    parts = [(torch.ones(1, 4, dtype=torch.bfloat16), torch.zeros(1)), (torch.zeros(1, 4), torch.zeros(1))]
    merged = merge(parts)
    assert merged.dtype == torch.bfloat16
    assert merged.tolist() == [[0.5] * 4]
