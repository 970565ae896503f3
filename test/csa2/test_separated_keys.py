"""Keys separated from their positions: the oracle's logits near and far from the origin, and pages that know their place."""

import math

import pytest
import torch
from codec_bounds import bias_error, entry_norm_bounds, rotated, rotation_slack
from page_stores import CLASSES, GEOMETRY, SIZE, make_store, some_tokens
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation, reduced_bases
from csa2.codec.codec import PageCodec
from csa2.codec.importance import attention_share, observed_attention
from csa2.codec.merging import merge_entries, merge_heads
from csa2.codec.rope import ROPE_TYPES, make_rope
from csa2.errors import IntegrityError, OptionError
from csa2.formats import MERGE, PLAIN, even_heads, make_ladder
from csa2.options import CacheOptions
from csa2.store import PageStore
from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import CodecBases, Entries
from sgl_kernels.page_layout import PageGeometry
from sgl_kernels.paged_attention.reference import plain_rows, write_plain
from sgl_kernels.rope import Rope

FAR = 781 * 128
"""Position 99968."""
THETA = 10000.0
PARAMETERS = {
    "default": {"rope_type": "default", "rope_theta": THETA},
    "linear": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
ROTARY_DIMS = {"all": 64, "partial": 32}


def by_the_formula(parameters: dict, pairs: int) -> Tensor:
    """(pairs,) frequencies in float64, from the definitions (Su et al. 2021; Chen et al. 2023; Llama 3.1)."""
    found = []
    for j in range(pairs):
        frequency = parameters["rope_theta"] ** (-j / pairs)
        if parameters["rope_type"] == "linear":
            frequency /= parameters["factor"]
        if parameters["rope_type"] == "llama3":
            low, high, window = (
                parameters[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            )
            wavelength = 2 * math.pi / frequency
            if wavelength > window / low:
                frequency /= parameters["factor"]
            elif wavelength >= window / high:
                smooth = (window / wavelength - low) / (high - low)
                frequency *= (1 - smooth) / parameters["factor"] + smooth
        found.append(frequency)
    return torch.tensor(found, dtype=torch.float64)


def rope_of(kind: str, rotary_dim: int = 64, *, neox: bool = True) -> Rope:
    return make_rope(make_rotation(rotary_dim, neox=neox), PARAMETERS[kind])


@pytest.mark.parametrize("kind", ROPE_TYPES)
@pytest.mark.parametrize("rotary_dim", [32, 64, 128])
def test_frequencies_are_those_of_the_definition_and_of_transformers(rotary_dim, kind):
    rope = rope_of(kind, rotary_dim)
    assert torch.allclose(rope.frequencies, by_the_formula(PARAMETERS[kind], rotary_dim // 2), rtol=2.0**-20, atol=0)
    if kind != "default":
        config = LlamaConfig(hidden_size=2 * rotary_dim, num_attention_heads=2, rope_parameters=PARAMETERS[kind])
        theirs, scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        assert torch.allclose(rope.frequencies, theirs.double(), rtol=2.0**-20, atol=0)
        assert scaling == 1.0


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "yarn"),
        ({"rope_type": "dynamic", "factor": 4.0}, "dynamic"),
        ({"rope_type": "longrope"}, "longrope"),
        ({"type": "su"}, "su"),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "mrope"),
        ({"rope_type": "default", "use_fope": True}, "fope"),
    ],
)
def test_other_kinds_are_refused_by_name(parameters, name):
    with pytest.raises(OptionError, match=f"does not know the rotary embedding '{name}'.*default, linear, llama3"):
        make_rope(make_rotation(64, neox=True), {"rope_theta": THETA, **parameters})


def test_a_model_that_does_not_rotate_is_refused():
    with pytest.raises(OptionError, match="needs a model with a rotary embedding"):
        make_rope(make_rotation(0, neox=True), {"rope_theta": THETA})


def some_page(size: int, rope: Rope, first: int) -> tuple[Tensor, Entries]:
    """Keys without rotation in float64, with a constant in every channel; and the page that a model would write."""
    random = torch.Generator().manual_seed(size)
    keys, values = torch.randn(2, 2, 2, size, 64, generator=random)
    keys = keys + 2 * torch.randn(2, 2, 1, 64, generator=random)
    positions = (first + torch.arange(size) + size * torch.arange(2)[:, None])[:, None].expand(keys.shape[:-1])
    return keys.double(), Entries(rotated(keys, positions, rope).float(), values, None, positions)


@pytest.mark.parametrize("first", [0, FAR])
@pytest.mark.parametrize("rotary_dim", ROTARY_DIMS.values(), ids=list(ROTARY_DIMS))
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("kind", ROPE_TYPES)
@pytest.mark.parametrize("variant", ["rotated", "separated"])
def test_a_page_far_from_its_origin_gives_the_logits_of_the_oracle(variant, kind, neox, rotary_dim, first):
    """The oracle takes keys without rotation, turns them as complex numbers in float64 by frequencies from the definition
    (with the rounding to fp32 of those of the model), and keeps those of the pivots. A logit may be off by what the format
    may lose of the key, times the size of the query; in `separated` of the key without rotation."""
    rope = rope_of(kind, rotary_dim, neox=neox)
    exact = by_the_formula(PARAMETERS[kind], rotary_dim // 2)
    query = torch.randn(2, 2, 5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 8
    geometry = PageGeometry(2, 1, 64, 64, torch.float32, (1,))
    for tail in MERGE:
        options = CacheOptions(ratio=tail[-2], rope=variant)
        codec, ladder = codec_and_ladder(options, geometry, make_rotation(rotary_dim, neox=neox), None, rope)
        for layout in ladder.layouts[1:]:
            plain, entries = some_page(64, rope, first)
            opened = codec.open(codec.seal(entries, layout), layout)
            merged = pivots_of(entries, layout)
            slots = merged.positions - entries.positions[..., :1]
            kept = plain.gather(-2, slots.unsqueeze(-1).expand_as(merged.keys))
            truth = rotated(kept, merged.positions, rope)
            coded = kept.float() if variant == "separated" else truth.float()
            bound = entry_norm_bounds(coded, merged.values, layout, codec.bases)[0] + 4 * rotation_slack(truth)
            logits, wanted = (query @ keys.double().transpose(-1, -2) for keys in (opened.keys, truth))
            allowed = query.norm(dim=-1, keepdim=True) * bound.unsqueeze(-2)
            assert bool(((logits - wanted).abs() <= allowed).all()), layout.name
            if layout.is_merged:
                assert bool(((opened.bias - merged.bias).abs() <= bias_error(merged.bias) + 1e-6).all())
            # Frequencies are fp32, as the model's own: their rounding grows with the position.
            drift = 2.0**-20 * (first + 128) * float(exact.max())
            defined = rotated(kept, merged.positions, Rope(rope.pairs, exact))
            assert float((defined - truth).norm(dim=-1).max()) <= drift * float(kept.norm(dim=-1).max())


def pivots_of(entries: Entries, layout) -> Entries:
    """Entries as the layout holds them, not coded."""
    if not layout.is_merged:
        return entries
    share = attention_share(entries, observed_attention(entries, None))
    return merge_entries(entries, share * entries.values.norm(dim=-1), layout.entries)


def test_heads_with_budgets_of_their_own_keep_the_positions_of_their_pivots():
    rope = rope_of("default")
    plain, entries = some_page(64, rope, FAR)
    merged = merge_heads(entries, torch.rand(entries.keys.shape[:-1]), [64, 16])
    for head, count in enumerate((64, 16)):
        slots = (merged.positions - entries.positions[..., :1])[:, head, :count]
        kept = plain[:, head].gather(1, slots[..., None].expand(-1, -1, 64))
        truth = rotated(kept, merged.positions[:, head, :count], rope)
        assert bool(((merged.keys[:, head, :count] - truth).norm(dim=-1) <= rotation_slack(truth)).all())
        assert bool((merged.bias[:, head, count:] == -math.inf).all())


# In the page store.

ROPE = make_rope(make_rotation(32, neox=True), PARAMETERS["default"])
CODEC = PageCodec(
    CodecBases(orthonormal_basis(32), reduced_bases(CLASSES, [make_rotation(32, neox=True).prior_order(32)] * 2, 32), ROPE)
)
LADDER = make_ladder(
    GEOMETRY, "fp4", "csa2-4x", "fp8", {"csa2-4x": even_heads("csa2-4x", CLASSES, GEOMETRY)}, separated=True
)


def new_store() -> PageStore:
    return make_store(ladder=LADDER, codec=CODEC)


def write_at(store: PageStore, page: int, position: int, count: int = SIZE, first_slot: int = 0) -> Tensor:
    """Tokens without rotation (n, 2, L, G, D), written to `page` as a model does, the first slot at `position`."""
    tokens = some_tokens(count, page * 3).double()
    slots = torch.arange(first_slot, first_slot + count)
    positions = position + slots
    turned = rotated(tokens[:, 0].permute(1, 2, 0, 3), positions, ROPE).permute(2, 0, 1, 3)
    store.record_writes(page * SIZE + slots, positions)
    layout = store.ladder.layouts[PLAIN]
    rows = plain_rows(store.arena.offsets[torch.full_like(slots, page)], slots, layout)
    for layer in range(GEOMETRY.num_layers):
        write_plain(store.arena.buffer, rows, layout, layer, turned[:, layer].float(), tokens[:, 1, layer].float())
    return tokens


def test_a_page_keeps_its_place_on_the_whole_ladder():
    store = new_store()
    pages, begin = torch.tensor([3, 5, 7]), [0, 6 * SIZE, 6249 * SIZE]
    store.map_pages(pages)
    for page, position in zip(pages.tolist(), begin, strict=True):
        write_at(store, page, position, SIZE - 1)
        write_at(store, page, position, 1, SIZE - 1)
    written = store.read(pages)
    for index in range(1, len(LADDER.layouts)):
        store._reencode(pages, torch.full((3,), index))
        store.check_integrity()
        assert store.arena.formats[pages].tolist() == [index] * 3
        read = store.read(pages)
        slots = read.positions - torch.tensor(begin)[:, None, None]
        assert bool(((slots >= 0) & (slots < SIZE)).all())
        # Every entry is the key of the token at its position: no other one is as near.
        assert torch.equal(torch.cdist(read.keys, written.keys).argmin(-1), slots)


def test_a_page_that_changes_hands_forgets_where_it_began():
    store = new_store()
    store.map_pages(torch.tensor([3]))
    write_at(store, 3, 4 * SIZE)
    store.unmap_pages(torch.tensor([3]))
    store.map_pages(torch.tensor([3]))
    write_at(store, 3, 9 * SIZE)
    store.seal(torch.tensor([3]))
    store.check_integrity()
    assert int(store.facts.position[3]) == 9 * SIZE


@pytest.mark.parametrize("position", [4 * SIZE + 1, 5 * SIZE, 4 * SIZE - 1])
def test_a_token_at_another_position_is_a_fault(position):
    store = new_store()
    store.map_pages(torch.tensor([3]))
    write_at(store, 3, 4 * SIZE, 2)
    with pytest.raises(IntegrityError, match="page 3"):
        write_at(store, 3, position, 2, 2)


def test_a_page_that_begins_inside_a_page_is_a_fault():
    store = new_store()
    store.map_pages(torch.tensor([3]))
    with pytest.raises(IntegrityError, match=f"every page at a multiple of {SIZE}"):
        write_at(store, 3, 4 * SIZE + 1, 2)


def test_positions_must_be_given():
    store = new_store()
    store.map_pages(torch.tensor([3]))
    with pytest.raises(IntegrityError, match="positions that nobody gave"):
        store.record_writes(torch.tensor([3 * SIZE]))


def test_the_padding_page_may_be_written_anywhere():
    store = new_store()
    store.record_writes(torch.tensor([0, 0, 1]), torch.tensor([0, 77, 5]))
    store.check_integrity()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_position_that_got_lost_is_found(sealed):
    store = new_store()
    store.map_pages(torch.tensor([3]))
    write_at(store, 3, 4 * SIZE)
    if sealed:
        assert store.seal(torch.tensor([3])) == 1
    store.check_integrity()
    store.facts.position[3] = 5 * SIZE if sealed else -1
    with pytest.raises(IntegrityError, match="position"):
        store.check_integrity()
