"""Lines of codes: byte positions by the letter of `page_layout`, and the way back."""

import numpy as np
import pytest
import torch
from codec_bounds import BITS, code_places
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sgl_kernels.codes import CODE_BITS
from sgl_kernels.errors import PageLayoutError
from sgl_kernels.lines import pack_lines, unpack_lines
from sgl_kernels.page_layout import LANES, STORED_KINDS, code_bytes, contraction_width

KINDS = sorted(STORED_KINDS)
fixed = settings(derandomize=True, deadline=None, max_examples=150)
shapes = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.integers(1, 70), st.integers(1, 70))


def some_codes(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << CODE_BITS[kind], shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@fixed
@given(st.sampled_from(KINDS), shapes, st.integers(0, 2**31))
@example("lloyd2", ([1], 16, 24), 0)
@example("lloyd2", ([1], 17, 8), 0)
@example("e4m3", ([1], 1, 2), 0)
@example("int4", ([0], 64, 64), 0)
def test_codes_come_back(kind, shape, seed):
    lead, lanes, contraction = shape
    codes = some_codes(kind, *lead, lanes, contraction, seed=seed)
    packed = pack_lines(codes, kind)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*lead, code_bytes(kind, lanes, contraction))
    assert torch.equal(unpack_lines(packed, kind, lanes, contraction), codes)


@fixed
@given(st.sampled_from(KINDS), shapes, st.integers(0, 2**31))
def test_every_code_lies_where_the_letter_says_and_nothing_else_is_set(kind, shape, seed):
    _, lanes, contraction = shape
    codes = some_codes(kind, lanes, contraction, seed=seed)
    byte, bit, size = code_places(kind, lanes, contraction)
    want = np.zeros(size, dtype=np.int64)
    # Places do not overlap, so adding is setting.
    np.add.at(want, byte, codes.numpy().astype(np.int64) << bit)
    assert want.max(initial=0) < 256
    assert size == code_bytes(kind, lanes, contraction)
    assert pack_lines(codes, kind).tolist() == want.tolist()


@fixed
@given(st.sampled_from(KINDS), st.integers(1, 300), st.integers(1, 300))
def test_code_bytes_are_whole_lines_and_one_half_line(kind, lanes, contraction):
    width, blocks = contraction_width(kind), -(-lanes // 16)
    groups, rest = divmod(contraction, width)
    last = 0 if rest == 0 else 32 if rest <= width // 2 else 64
    assert code_bytes(kind, lanes, contraction) == blocks * (64 * groups + last)
    assert code_bytes(kind, lanes, contraction) * 8 >= lanes * contraction * BITS[kind]


def test_a_line_is_what_a_dot_product_instruction_reads():
    """Written out: 64 bytes of 4-bit codes are 16 entries of 8 channels, low nibbles 0..3, high nibbles 4..7."""
    codes = some_codes("int4", 16, 8)
    line = pack_lines(codes, "int4").view(16, 4)
    assert torch.equal(line & 15, codes[:, :4])
    assert torch.equal(line >> 4, codes[:, 4:])
    codes = some_codes("lloyd2", 16, 16)
    line = pack_lines(codes, "lloyd2").view(16, 4)
    for field in range(4):
        assert torch.equal((line >> 2 * field) & 3, codes[:, 4 * field : 4 * field + 4])
    codes = some_codes("e4m3", 16, 4)
    assert torch.equal(pack_lines(codes, "e4m3").view(16, 4), codes)


def test_lines_are_ordered_by_group_and_then_by_lane_block():
    codes = torch.zeros(32, 16, dtype=torch.uint8)
    for group in range(2):
        for block in range(2):
            codes[16 * block : 16 * block + 16, 8 * group : 8 * group + 8] = 1 + 2 * group + block
    packed = pack_lines(codes, "e2m1").view(4, 64)
    assert [sorted(set(line.tolist())) for line in packed] == [[0x11], [0x22], [0x33], [0x44]]


def test_half_a_group_is_a_half_line():
    """24 two-bit channels are a line and a half for each 16 entries."""
    codes = some_codes("lloyd2", 16, 24)
    packed = pack_lines(codes, "lloyd2")
    assert packed.numel() == 96
    words = packed[64:].view(16, 2)
    for field in range(4):
        assert torch.equal((words >> 2 * field) & 3, codes[:, 16 + 2 * field : 18 + 2 * field])


@pytest.mark.parametrize("kind", KINDS)
def test_codes_beyond_the_end_are_zero_and_not_read(kind):
    codes = some_codes(kind, 5, 3) | 1
    packed = pack_lines(codes, kind)
    byte, bit, size = code_places(kind, 5, 3)
    held = np.zeros(size, dtype=np.int64)
    np.bitwise_or.at(held, byte, ((1 << CODE_BITS[kind]) - 1) << np.broadcast_to(bit, byte.shape))
    mask = torch.from_numpy(held).to(torch.uint8)
    assert not (packed & ~mask).any()
    assert torch.equal(unpack_lines(packed | ~mask, kind, 5, 3), codes)


def test_packing_leaves_its_input_alone_and_takes_strided_codes():
    codes = some_codes("int4", 2, 24, 16)
    before = codes.clone()
    turned = pack_lines(codes.transpose(-1, -2), "int4")
    assert torch.equal(codes, before)
    assert torch.equal(turned, pack_lines(codes.transpose(-1, -2).contiguous(), "int4"))
    assert LANES == 16


def test_codes_of_3_bits_are_not_packed():
    assert sorted({*KINDS, "int3"}) == sorted(CODE_BITS)
    codes = some_codes("int3", 16, 16)
    for refused in (lambda: pack_lines(codes, "int3"), lambda: unpack_lines(codes, "int3", 16, 16)):
        with pytest.raises(PageLayoutError, match="codes of 3 bits, which do not fill a byte: a page can hold e4m3"):
            refused()
    with pytest.raises(PageLayoutError, match="'int5' does not exist"):
        pack_lines(codes, "int5")
