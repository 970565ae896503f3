"""Attention over pages of mixed formats: against attention in float64 over the pages opened by the letter."""

import math
from dataclasses import dataclass, field, fields

import numpy as np
import pytest
import torch
from codec_bounds import E4M3_VALUES, U16, U32, open_by_the_letter
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout, coded_layout, plain_layout
from sgl_kernels.paged_attention import reference
from sgl_kernels.paged_attention.plan import PagePlan, plan_pages
from sgl_kernels.paged_attention.reference import decode, extend, gather_blocks, merge, open_plain

FLAT, IDENTITY = 0, 1
LAYERS = [FLAT, IDENTITY]
LENGTHS = [1, 63, 64, 65, 127, 128, 129]
UNIT = {torch.float32: U32, torch.float16: 2.0**-11, torch.bfloat16: U16}
# head_dim, KV heads, query heads per KV head, dtype of the model, 4-bit codes
SHAPES = [
    (32, 1, 1, torch.float32, "fp4"),
    (32, 2, 3, torch.bfloat16, "int4"),
    (64, 3, 3, torch.bfloat16, "fp4"),
    (64, 1, 8, torch.float16, "int4"),
    (64, 2, 7, torch.float32, "fp4"),
    (80, 3, 1, torch.bfloat16, "fp4"),
    (80, 1, 5, torch.float32, "int4"),
    (96, 2, 4, torch.float16, "fp4"),
    (100, 1, 6, torch.bfloat16, "int4"),
    (112, 1, 2, torch.float32, "fp4"),
    (128, 2, 4, torch.bfloat16, "int4"),
    (128, 1, 7, torch.float32, "fp4"),
    (256, 1, 3, torch.bfloat16, "fp4"),
]


LIKELY = 6.0
"""Rounding errors are independent and centred, so a sum of them stays below this many times its deviation: a chance of
2 exp(-18) per value to be wrong about it (Higham and Mary 2019)."""


@dataclass
class Held:
    """Entries of one request in float64, axes (L, G, n, D)."""

    keys: Tensor
    values: Tensor
    key_terms: Tensor
    """Size of the terms that add up to a key in the basis in which it is stored: |code s| + |mean| <= |k'| + 2 |mean|."""
    value_terms: Tensor
    coded: Tensor
    """(n,) bool."""

    def followed_by(self, other: "Held") -> "Held":
        parts = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return Held(**{name: torch.cat(pair, 0 if name == "coded" else 2) for name, pair in parts.items()})


def as_written(keys: Tensor, values: Tensor) -> Held:
    """Entries stored as they are; keys and values (L, G, n, D)."""
    k, v = keys.double(), values.double()
    return Held(k, v, k.abs(), v.abs(), torch.zeros(k.shape[2], dtype=torch.bool))


@dataclass
class Scene:
    """An arena with the pages of some requests in it, and what they hold."""

    geometry: PageGeometry
    repeat: int
    layouts: tuple[PageLayout, ...]
    arena: Tensor
    formats: Tensor
    offsets: Tensor
    table: Tensor
    lengths: Tensor
    basis: Tensor
    held: list[Held] = field(default_factory=list)

    @property
    def scale(self) -> float:
        return self.geometry.head_dim**-0.5

    def plan(self, *requests: int) -> PagePlan:
        chosen = torch.tensor(requests) if requests else torch.arange(len(self.lengths))
        return plan_pages(
            self.table[chosen], self.lengths[chosen], self.formats, self.offsets, self.layouts, self.geometry.page_size
        )

    def query(self, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
        heads = self.geometry.num_kv_heads * self.repeat
        random = torch.Generator().manual_seed(11)
        return torch.randn(tokens, heads, self.geometry.head_dim, generator=random).to(dtype)


def make_scene(
    lengths: list[int], shape: tuple, *, only: int | None = None, rubbish: int = 0xFF, tail: int = 0, seed: int = 0
) -> Scene:
    """Pages of every format in turn, last partial pages plain.

    Args:
        only: the format of all full pages.
        rubbish: byte in every place that no page holds; 0xFF is NaN in every dtype and in E4M3.
        tail: byte behind the last token of a partial page; the store maps pages zeroed.
    """
    dim, groups, repeat, dtype, small = shape
    geometry = PageGeometry(2, groups, dim, 64, dtype, (IDENTITY,))
    layouts = (
        plain_layout("plain", geometry),
        coded_layout("fp8", "e4m3", geometry),
        coded_layout(small, {"fp4": "e2m1", "int4": "int4"}[small], geometry),
    )
    random = torch.Generator().manual_seed(seed)
    used = [-(-length // 64) for length in lengths]
    num_pages = sum(used) + 3
    plain_bytes = layouts[0].page_bytes
    arena = torch.full((num_pages * plain_bytes,), rubbish, dtype=torch.uint8)
    # Page p in slab p of one plain page; never in the order of the requests.
    order = torch.randperm(num_pages - 1, generator=random) + 1
    scene = Scene(
        geometry,
        repeat,
        layouts,
        arena,
        torch.full((num_pages,), -1, dtype=torch.int8),
        torch.arange(num_pages) * plain_bytes,
        torch.zeros(len(lengths), max(*used, 1), dtype=torch.int64),
        torch.tensor(lengths),
        orthonormal_basis(dim),
    )
    taken = 0
    empty = torch.empty(2, groups, 0, dim)
    for request, length in enumerate(lengths):
        held = as_written(empty, empty)
        for depth in range(used[request]):
            page, taken = int(order[taken]), taken + 1
            scene.table[request, depth] = page
            valid = min(64, length - depth * 64)
            index = (taken % 3 if only is None else only) if valid == 64 else 0
            held = held.followed_by(place(scene, page, index, valid, tail, random))
        scene.held.append(held)
    return scene


def place(scene: Scene, page: int, index: int, valid: int, tail: int, random: torch.Generator) -> Held:
    """Fill one page and say what it holds."""
    g, layout = scene.geometry, scene.layouts[index]
    content = torch.randn(2, g.num_layers, g.num_kv_heads, 64, g.head_dim, generator=random)
    content += torch.randn(2, g.num_layers, g.num_kv_heads, 1, g.head_dim, generator=random)
    content = content.to(g.dtype)
    scene.formats[page] = index
    if index == 0:
        data = content.transpose(0, 1).contiguous()
        data.view(torch.uint8)[..., valid:, :] = tail
        stored = data.view(torch.uint8).reshape(-1)
        held = as_written(*content[:, :, :, :valid])
    else:
        # Any slot of the slab that the page fits in.
        slots = scene.layouts[0].page_bytes // layout.page_bytes
        scene.offsets[page] += page % slots * layout.page_bytes
        stored = seal_pages(content[0][None], content[1][None], layout, scene.basis).view(-1)
        k, v = (x[0] for x in open_by_the_letter(stored[None], layout, scene.basis))
        wide = scene.basis.double()
        in_basis = torch.stack((k @ wide, v @ wide))
        in_basis[0, IDENTITY] = k[IDENTITY]
        blocks = stored.view(g.num_layers, -1)
        for stored_as, part in zip(in_basis, ("k_means", "v_means"), strict=True):
            start = layout.offsets[part]
            means = E4M3_VALUES[blocks[:, start : start + g.num_kv_heads * g.head_dim].numpy()]
            size = 2 * torch.from_numpy(np.abs(means)).view(g.num_layers, g.num_kv_heads, 1, g.head_dim)
            stored_as.abs_().add_(size)
        held = Held(k, v, in_basis[0], in_basis[1], torch.ones(64, dtype=torch.bool))
    start = int(scene.offsets[page])
    scene.arena[start : start + layout.page_bytes] = stored
    return held


def oracle(scene: Scene, held: Held, layer: int, query: Tensor, *, new: int = 0, unit: float = 0.0) -> tuple[Tensor, Tensor]:
    """Attention in float64 of `query` (T, H, D) over `held`, the last `new` entries causal; and how far off it may be.

    The bound follows the errors of this very input, to first order (and `exp` of the largest logit error beyond it):

    - fp32: a logit is a dot product of length D with the basis and another with the key, 2 D + 16 roundings of terms
      that the norms bound: delta = scale 6 sqrt(2 D + 16) U |q| |terms|. The sum over n entries, the way back through
      the basis and the exponential (20 units) are n + D + 64 roundings of the weighted terms.
    - In low precision with unit u, in the basis, q' and k' are rounded once each: delta += scale 6 sqrt(2) u
      |q' * terms|. Weights, output and merge are rounded: 3 u of the weighted |v|. v' and the output in the basis are
      rounded before they go through the basis: 2 u of the weighted terms, added up with the squares of the basis. fp16
      weights below 2^-14 are off by 2^-25.

    An error delta of the logits moves the output by sum p delta (|v| + |out|).
    """
    groups, n, dim = held.keys.shape[1:]
    repeat = query.shape[1] // groups
    wide = scene.basis.double()

    def per_query_head(x: Tensor) -> Tensor:
        return x[layer].repeat_interleave(repeat, 0)

    q = query.double().transpose(0, 1)
    keys, values = per_query_head(held.keys), per_query_head(held.values)
    key_terms, value_terms = per_query_head(held.key_terms), per_query_head(held.value_terms)
    logits = q @ keys.transpose(-1, -2) * scene.scale
    if new:
        future = torch.ones(new, new, dtype=torch.bool).triu(1)
        logits[..., n - new :] = logits[..., n - new :].masked_fill(future, -math.inf)
    p = torch.softmax(logits, -1)
    out = p @ values

    delta = (
        scene.scale * LIKELY * math.sqrt(2 * dim + 16) * U32 * q.norm(dim=-1)[..., None] * key_terms.norm(dim=-1)[:, None]
    )
    folded = held.coded & (layer == FLAT)
    term_norms = torch.where(
        folded,
        ((q @ wide).square() @ key_terms.square().transpose(-1, -2)).sqrt(),
        (q.square() @ key_terms.square().transpose(-1, -2)).sqrt(),
    )
    delta = delta + scene.scale * LIKELY * math.sqrt(2) * unit * term_norms
    moved = (p * delta) @ values.abs() + (p * delta).sum(-1, keepdim=True) * out.abs()
    moved = moved * math.exp(2 * float(delta.max()))
    weighted = p @ value_terms
    through_basis = (p[..., held.coded] @ value_terms[:, held.coded]).square() @ wide.square()
    rounded = LIKELY * math.sqrt(n + dim + 64) * U32 * weighted.norm(dim=-1, keepdim=True)
    rounded = rounded + unit * (3 * (p @ values.abs()) + 2 * LIKELY * through_basis.sqrt())
    rounded = rounded + (n * 2.0**-25 * float(values.abs().max()) if unit else 0.0)
    return out.transpose(0, 1), (moved + rounded).transpose(0, 1)


def assert_decoded(scene: Scene, query: Tensor, layer: int) -> Tensor:
    """Decode the batch and compare every request with the oracle; the output."""
    out = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.basis)
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
            for codes in ("e4m3", "e2m1"):
                layout = coded_layout(codes, codes, g)
                arena = torch.zeros(4 * slab, dtype=torch.uint8)
                offsets = torch.tensor([slab, 3 * slab])
                arena[slab : slab + layout.page_bytes] = 1
                arena[3 * slab : 3 * slab + layout.page_bytes] = 3
                blocks = gather_blocks(arena, offsets, layout, 0)
                assert (blocks == torch.tensor([[1], [3]])).all(), (dim, heads, codes)


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


@pytest.mark.parametrize("only", [0, 1, 2])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("repeat", range(1, 9))
def test_decode_of_one_format_and_every_query_group(repeat, layer, only):
    scene = make_scene([64, 192], (32, 2, repeat, torch.bfloat16, "fp4"), only=only)
    assert_decoded(scene, scene.query(2), layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_decode_with_sharp_logits(layer):
    """Long queries: one token takes nearly all the weight, and merging pages must neither overflow nor lose it."""
    scene = make_scene([129, 300], (64, 2, 2, torch.bfloat16, "fp4"))
    assert_decoded(scene, scene.query(2) * 50, layer)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("values", [1, 64 * 64 * 2 * 2, 3 * 64 * 64 * 2 * 2])
def test_the_workspace_changes_nothing(values, layer, monkeypatch):
    scene = make_scene([*LENGTHS, 640], (64, 2, 3, torch.bfloat16, "fp4"))
    query = scene.query(len(LENGTHS) + 1)
    whole = assert_decoded(scene, query, layer)
    monkeypatch.setattr(reference, "WORKSPACE_VALUES", values)
    pieces = assert_decoded(scene, query, layer)
    # The pages are the same and each is added to its request in the same order: only the products are cut differently.
    assert torch.allclose(whole, pieces, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_decode_of_a_request_does_not_depend_on_its_neighbours(layer):
    scene = make_scene(LENGTHS, (80, 1, 5, torch.bfloat16, "fp4"))
    query = scene.query(len(LENGTHS))
    batch = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.basis)
    bound = decode_bound(scene, query, layer)
    for i in range(len(LENGTHS)):
        alone = decode(query[i : i + 1], scene.arena, scene.plan(i), layer, scene.scale, scene.basis)
        assert bool(((alone[0] - batch[i]).abs() <= 2 * bound[i]).all())
    # A broken query stays where it is.
    query[2] = math.nan
    broken = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.basis)
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(broken[others], batch[others])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_page_shared_by_two_requests(layer):
    scene = make_scene([128, 100], (64, 1, 2, torch.bfloat16, "fp4"))
    scene.table[1, 0] = scene.table[0, 0]
    first, second = scene.held
    shared = Held(*(getattr(first, f.name)[..., :64, :] for f in fields(Held) if f.name != "coded"), first.coded[:64])
    own = Held(*(getattr(second, f.name)[..., 64:, :] for f in fields(Held) if f.name != "coded"), second.coded[64:])
    scene.held[1] = shared.followed_by(own)
    assert_decoded(scene, scene.query(2), layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_rubbish_in_free_places_never_reaches_decode(layer):
    shape = (64, 2, 2, torch.bfloat16, "fp4")
    clean, dirty = (make_scene(LENGTHS, shape, rubbish=byte) for byte in (0, 0xFF))
    query = clean.query(len(LENGTHS))
    outputs = [decode(query, s.arena, s.plan(), layer, s.scale, s.basis) for s in (clean, dirty)]
    assert bool(outputs[1].isfinite().all())
    assert torch.equal(*outputs)


def test_decode_of_bf16_queries_leaves_only_the_rounding_of_the_result():
    """Decode computes in fp32 whatever the query is; eager attention in bf16 rounds at every step."""
    scene = make_scene([256], (64, 2, 2, torch.bfloat16, "fp4"))
    query = scene.query(1, torch.bfloat16)
    out = decode(query, scene.arena, scene.plan(), FLAT, scene.scale, scene.basis).bfloat16()
    want, bound = oracle(scene, scene.held[0], FLAT, query)
    assert bool(((out - want).abs() <= bound + U16 * (want.abs() + bound)).all())
    assert rms(out - want) < rms(eager_attention(scene, scene.held[0], FLAT, query, 0) - want)


# Extend


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def eager_attention(scene: Scene, held: Held, layer: int, query: Tensor, new: int) -> Tensor:
    """Attention as models write it: products in the dtype of the query, softmax in fp32; (T, H, D) float64."""
    dtype, n = query.dtype, held.keys.shape[2]
    repeat = query.shape[1] // held.keys.shape[1]
    keys, values = (x[layer].to(dtype).repeat_interleave(repeat, 0) for x in (held.keys, held.values))
    logits = (query.transpose(0, 1) @ keys.transpose(-1, -2)) * scene.scale
    if new:
        future = torch.ones(new, new, dtype=torch.bool).triu(1)
        logits[..., n - new :] = logits[..., n - new :].masked_fill(future, -math.inf)
    return (torch.softmax(logits, -1, dtype=torch.float32).to(dtype) @ values).transpose(0, 1).double()


def assert_extended(scene: Scene, tokens: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Extend request 0 and compare with the oracle: output, what it should be, and what eager attention gives."""
    g = scene.geometry
    query = scene.query(tokens, g.dtype)
    random = torch.Generator().manual_seed(99)
    keys, values = torch.randn(2, tokens, g.num_kv_heads, g.head_dim, generator=random).to(g.dtype)
    out = extend(query, keys, values, scene.arena, scene.plan(0), layer, scene.scale, scene.basis)
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
    for length, tokens in ((129, 5), (256, 65)):
        out, want, eager = assert_extended(make_scene([length], shape, tail=0xFF), tokens, layer)
        assert_as_exact_as_eager(out, want, eager, UNIT[shape[3]])


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("length", [0, *LENGTHS, 200])
def test_extend_of_every_length(length, tokens):
    # Behind the prefix lies NaN: a page that is being filled must be read up to its last token and no further.
    assert_extended(make_scene([length], (32, 2, 2, torch.float32, "fp4"), tail=0xFF), tokens, FLAT)


@pytest.mark.parametrize("repeat", range(1, 9))
def test_extend_with_every_query_group(repeat):
    assert_extended(make_scene([129], (32, 2, repeat, torch.float32, "fp4")), 7, FLAT)


def test_extend_without_a_prefix_is_plain_causal_attention():
    scene = make_scene([0], (64, 2, 3, torch.float32, "fp4"))
    assert scene.plan(0).parts == ()
    out, want, _ = assert_extended(scene, 9, FLAT)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5)


def assert_as_exact_as_eager(out: Tensor, want: Tensor, eager: Tensor, unit: float) -> None:
    """On the same opened pages eager attention rounds k, v, logits, weights and output. So do we, but q' for the logits;
    the way back through the basis and the merge round the output twice more, by `unit` of it each at most."""
    assert rms(out - want) <= rms(eager - want) + 2 * unit * rms(want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("only", [0, 1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_extend_is_as_exact_as_eager_attention_in_every_format(layer, only, dtype):
    scene = make_scene([256], (64, 2, 2, dtype, "fp4"), only=only)
    assert_as_exact_as_eager(*assert_extended(scene, 64, layer), UNIT[dtype])


@pytest.mark.parametrize("layer", LAYERS)
def test_rubbish_in_free_places_never_reaches_extend(layer):
    shape = (64, 2, 2, torch.bfloat16, "fp4")
    outputs = [assert_extended(make_scene([129], shape, rubbish=b, tail=b), 7, layer)[0] for b in (0, 0xFF)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_new_token_extends_as_it_decodes(layer):
    """Decode finds the new token in its page, extend gets it beside the pages; in fp32 both say the same."""
    scene = make_scene([129], (64, 2, 2, torch.float32, "fp4"))
    query = scene.query(1)
    whole = assert_decoded(scene, query, layer)
    new = [x[layer][:, -1].float()[None] for x in (scene.held[0].keys, scene.held[0].values)]
    scene.lengths[0] -= 1
    split = extend(query, *new, scene.arena, scene.plan(0), layer, scene.scale, scene.basis)
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
