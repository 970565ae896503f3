"""Keys that are separated from their positions: bytes, what comes back near and far from the origin, attention, refusals."""

from dataclasses import replace

import pytest
import torch
from codec_bounds import (
    entry_norm_bounds,
    kept,
    open_by_the_letter,
    rotated,
    rotation_slack,
    rounding_slack,
)
from hard_pages import (
    FORMATS,
    PAGE_SIZES,
    REDUCED,
    UNEVEN,
    bases_of,
    biases,
    geometry,
    hard_entries,
    layout_of,
    normal,
    positions_of,
    rope_of,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_scenes import LAYERS, MIXED, SHAPES, UNIT, Scene, as_written, make_scene, oracle

from sgl_kernels.cpu.tables import piece_table
from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.page_codec.positions import gather_first_positions, gather_positions
from sgl_kernels.page_codec.reference import Entries, open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout, plain_layout
from sgl_kernels.paged_attention.reference import decode, extend
from sgl_kernels.rope import TABLE_ROWS, Rope

FAR = 781 * 128
"""Position 99968: angles of 10^5 radians, of which fp32 products would lose a hundredth."""
ORIGINS = [0, 128, FAR]


def rotation_error(x: torch.Tensor) -> torch.Tensor:
    return rotation_slack(x).unsqueeze(-1)


@settings(deadline=None)  # a position beyond all others grows the table
@given(st.integers(0, 300_000), st.integers(0, 9), st.sampled_from([32, 64, 80]))
def test_a_turn_is_that_of_complex_numbers_and_can_be_undone(position, seed, dim):
    rope = rope_of(dim)
    keys = torch.randn(2, 3, dim, generator=torch.Generator().manual_seed(seed))
    positions = torch.tensor([position, position + 1, position // 2]).expand(2, -1)
    turned = rope.rotate(keys, positions)
    assert bool(((turned - rotated(keys, positions, rope)).abs() <= rotation_error(keys)).all())
    back = rope.unrotate(turned, positions)
    assert bool(((back - keys).abs() <= 2 * rotation_error(keys)).all())
    assert torch.equal(turned[..., 2 * len(rope.pairs) :], keys[..., 2 * len(rope.pairs) :])


def test_angles_do_not_depend_on_how_the_table_grew():
    asked = torch.tensor([3, TABLE_ROWS - 1, TABLE_ROWS, FAR])
    at_once, stepwise = (Rope(rope_of(64).pairs, rope_of(64).frequencies) for _ in range(2))
    for position in asked:
        stepwise.cos_sin(position[None])
    assert all(torch.equal(a, b) for a, b in zip(at_once.cos_sin(asked), stepwise.cos_sin(asked), strict=True))


@pytest.mark.parametrize("name", [*FORMATS, UNEVEN])
@pytest.mark.parametrize("size", PAGE_SIZES)
def test_positions_cost_four_bytes_a_page_and_one_a_merged_entry(size, name):
    g = geometry(64, 3, size=size)
    rotated_keys, layout = layout_of(name, g), layout_of(name, g, separated=True)
    assert layout.is_separated
    assert not rotated_keys.is_separated
    assert layout.heads == rotated_keys.heads
    offsets = sum(head.entries for head in layout.heads) if layout.is_merged else 0
    more = -(-(4 + offsets) // 64) * 64
    assert layout.position_bytes == 4 + offsets
    assert rotated_keys.position_bytes == 0
    assert layout.page_bytes == rotated_keys.page_bytes + more
    assert layout.metadata_bytes == rotated_keys.metadata_bytes + more


def test_documented_bytes():
    g = PageGeometry(1, 1, 64, 64, torch.bfloat16)
    assert layout_of("fp4", g, separated=True).page_bytes == 4352 + 64
    assert layout_of("fp8", g, separated=True).page_bytes == 8448 + 64


def sealed(layout: PageLayout, first: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[Entries, torch.Tensor]:
    """Entries with `keys`, which are not rotated, at positions from `first` on; and their pages."""
    rope, n = rope_of(layout.geometry.head_dim), len(keys)
    positions = positions_of(layout, n, first)
    entries = Entries(rope.rotate(keys, positions), values, biases(layout, n), positions)
    return entries, seal_pages(entries, layout, bases_of(layout.geometry), weights(layout, n))


@pytest.mark.parametrize("first", ORIGINS)
@pytest.mark.parametrize("name", [*FORMATS, UNEVEN])
@pytest.mark.parametrize(("dim", "heads", "size"), [(64, 3, 64), (80, 2, 32), (128, 1, 128)])
def test_opening_follows_the_letter_of_the_layout(dim, heads, size, name, first):
    layout = layout_of(name, geometry(dim, heads, torch.float32, size), separated=True)
    bases = bases_of(layout.geometry)
    entries, packed = sealed(layout, first, normal(layout, 3, 1), normal(layout, 3, 2))
    opened, letter = open_pages(packed, layout, bases), open_by_the_letter(packed, layout, bases)
    assert torch.equal(opened.positions, entries.positions)
    assert torch.equal(letter.positions, entries.positions)
    behind = torch.cat((torch.zeros(64, dtype=torch.uint8), packed.flatten()))
    places = 64 + torch.arange(3) * layout.page_bytes
    assert gather_first_positions(behind, places, layout).tolist() == [first + i * size for i in range(3)]
    for layer in LAYERS:
        found = gather_positions(behind, places, layout, layer)
        of_layer = entries.positions[:, layer * heads : (layer + 1) * heads]
        assert torch.equal(found, of_layer[..., : max(head.entries for head in layout.layer_heads(layer))])
    slack = (rounding_slack(entries.keys) * dim**0.5).squeeze(-1) + rotation_slack(letter.keys)
    assert bool(((opened.keys.double() - letter.keys).norm(dim=-1) <= slack).all())


@pytest.mark.parametrize("first", ORIGINS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", PAGE_SIZES)
def test_keys_come_back_rotated_and_off_by_no_more_than_their_code(size, name, first):
    """The bound of rotated keys holds for keys without rotation: a turn does not change the size of an error. Keys are
    turned back and forth once, which rounds twice."""
    layout = layout_of(name, geometry(64, 3, torch.float32, size), separated=True)
    bases = bases_of(layout.geometry)
    keys, values = hard_entries(layout, 4)
    keys = keys.clamp(-(2.0**14), 2.0**14)  # no turn saturates
    entries, packed = sealed(layout, first, keys, values)
    opened = open_pages(packed, layout, bases)
    slack = 2 * rotation_slack(entries.keys)
    bound = entry_norm_bounds(
        bases.rope.unrotate(entries.keys, entries.positions), values, layout, bases, weights(layout, len(keys))
    )
    want = rotated(bases.rope.unrotate(entries.keys, entries.positions), entries.positions, bases.rope)
    assert bool(((opened.keys - want).norm(dim=-1) <= bound[0] + slack).all())
    assert bool(((want - kept(entries.keys)).norm(dim=-1) <= slack).all())
    # Values have no position.
    assert bool(((opened.values - kept(values)).norm(dim=-1) <= bound[1]).all())
    rotated_layout = layout_of(name, layout.geometry)
    same = open_pages(seal_pages(entries, rotated_layout, bases, weights(layout, len(keys))), rotated_layout, bases)
    assert torch.equal(opened.values, same.values)


def test_a_constant_is_taken_out_of_fast_pairs_too():
    """What the page mean of rotated keys cannot hold, the mean of keys without rotation holds exactly (up to E4M3)."""
    g = geometry(64, 1, torch.float32)
    keys = normal(layout_of("fp4", g), 4, 1) * 0.1
    keys[..., 0] += 16  # the fastest pair
    error = {}
    for separated in (False, True):
        layout = layout_of("fp4", g, separated=separated)
        positions = positions_of(layout_of("fp4", g, separated=True), 4, 0)
        entries = Entries(rope_of(64).rotate(keys, positions), normal(layout, 4, 2), None, positions)
        opened = open_pages(seal_pages(entries, layout, bases_of(g)), layout, bases_of(g))
        error[separated] = float((opened.keys - entries.keys)[:, 0].norm())
    assert error[True] < error[False] / 4


@pytest.mark.parametrize("chain", [("fp8", "fp4"), ("fp4", "csa2-2x"), ("fp4", "k8v4")], ids="->".join)
def test_a_page_is_coded_again_at_its_own_positions(chain):
    g = geometry(64, 2, torch.float32)
    first, second = (layout_of(name, g, separated=True) for name in chain)
    bases = bases_of(g)
    entries, packed = sealed(first, FAR, normal(first, 2, 1), normal(first, 2, 2))
    held = open_pages(packed, first, bases)
    again = open_pages(seal_pages(held, second, bases), second, bases)
    assert torch.equal(again.positions, entries.positions)
    bound = entry_norm_bounds(bases.rope.unrotate(held.keys, held.positions), held.values, second, bases)[0]
    slack = 3 * rotation_slack(entries.keys)
    assert bool(((again.keys - held.keys).double().norm(dim=-1) <= bound + slack).all())


@pytest.mark.parametrize("shape", SHAPES[:8:2], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("origin", [0, FAR])
def test_attention_is_that_of_the_oracle(origin, layer, shape):
    """Pages of all formats in one request, merged ones among them, near the origin and far from it."""
    scene = make_scene([MIXED, 65, 1], shape, separated_at=origin)
    query = scene.query(3)
    out = decode(query, scene.arena, scene.plan(), layer, scene.scale, scene.bases)
    for i, held in enumerate(scene.held):
        want, bound = oracle(scene, held, layer, query[i : i + 1])
        assert bool(((out[i : i + 1] - want).abs() <= bound).all())
    assert_extends(scene, layer, shape[3])


def assert_extends(scene: Scene, layer: int, dtype: torch.dtype) -> None:
    g = scene.geometry
    random = torch.Generator().manual_seed(5)
    keys, values = (torch.randn(5, g.num_kv_heads, g.head_dim, generator=random).to(dtype) for _ in range(2))
    query = scene.query(5, dtype)
    out = extend(query, keys, values, scene.arena, scene.plan(0), layer, scene.scale, scene.bases)
    written = as_written(*(x.transpose(0, 1).expand(2, -1, -1, -1) for x in (keys, values)))
    unit = 0.0 if dtype == torch.float32 else UNIT[dtype]
    want, bound = oracle(scene, scene.held[0].followed_by(written), layer, query, new=5, unit=unit)
    assert bool(((out - want).abs() <= bound).all())


@pytest.mark.parametrize("name", ["fp4", *REDUCED])
def test_compiled_code_refuses_what_it_would_misread(name):
    g = geometry(64, 2)
    layouts = (plain_layout("bf16", g), layout_of(name, g, separated=True))
    with pytest.raises(KernelLayoutError, match=f"format '{name}' has keys that are separated from their positions"):
        piece_table(layouts, bases_of(g))


def entries_at(layout: PageLayout, positions: torch.Tensor | None) -> Entries:
    return Entries(normal(layout, 1), normal(layout, 1), biases(layout, 1), positions)


def test_what_is_missing_is_named():
    layout = layout_of("fp4", geometry(64), separated=True)
    bases, positions = bases_of(layout.geometry), positions_of(layout, 1, 64)
    with pytest.raises(ValueError, match="needs the positions of its entries"):
        seal_pages(entries_at(layout, None), layout, bases)
    with pytest.raises(ValueError, match="needs the rotation of the model"):
        seal_pages(entries_at(layout, positions), layout, replace(bases, rope=None))


@pytest.mark.parametrize("name", ["fp4", "csa2-4x"])
def test_positions_that_are_not_those_of_a_page(name):
    layout = layout_of(name, geometry(64), separated=True)
    bases, positions = bases_of(layout.geometry), positions_of(layout, 1, 64)
    wrong = [positions + 40, positions * 2, positions - 128, positions + 2**31]
    if not layout.is_merged:
        wrong.append(positions.flip(-1))
    for each in wrong:
        with pytest.raises(ValueError, match="position"):
            seal_pages(entries_at(layout, each), layout, bases)
