"""Codes opened by the instructions of CUDA, emulated, and by their portable twin, interpreted: against the tables."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from codec_bounds import BITS, CODE_VALUES
from interpreted import interpreted
from ptx import run

from sgl_kernels.triton import codes
from sgl_kernels.triton.codes import code_unit, open_words, scale_value

ASSEMBLY = {
    "e2m1": codes.asm_e2m1(),
    "int4": codes.asm_int4("0x64106410"),
    "int4_asymmetric": codes.asm_int4("0x640f640f"),
    "lloyd2": codes.asm_lloyd2(),
    "e4m3": codes.asm_e4m3(),
}


def dwords(kind: str) -> np.ndarray:
    """Every half word in either half of a dword, and random ones; NaN of E4M3 left out, which no code is."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    words = np.concatenate((halves, halves << 16, np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)))
    if kind == "e4m3":
        words = words[((words[:, None].view(np.uint8) & 0x7F) != 0x7F).all(1)]
    return words


def expected(kind: str, words: np.ndarray) -> np.ndarray:
    """Code i of a dword lies in byte i % 4, at bit field i // 4."""
    index = np.arange(32 // BITS[kind])
    code = words[:, None] >> (8 * (index % 4) + BITS[kind] * (index // 4)).astype(np.uint32) & ((1 << BITS[kind]) - 1)
    return CODE_VALUES[kind][code]


@pytest.mark.parametrize("kind", ASSEMBLY)
def test_instructions_open_every_code(kind):
    words = dwords(kind)
    want = expected(kind, words)
    got = run(ASSEMBLY[kind], words, want.shape[1]).view(np.float16).astype(np.float64) * code_unit(kind)
    # Only the levels of lloyd2 are no numbers of fp16: rounded to 11 bits.
    assert np.abs(got - want).max() <= (2.0**-12 * 1.510 if kind == "lloyd2" else 0)


@triton.jit
def _open(words, out, KIND: tl.constexpr, CT: tl.constexpr, COUNT: tl.constexpr):
    n = tl.arange(0, 64)
    opened = open_words(tl.load(words + n)[:, None], KIND, CT, False)
    tl.store(out + n[:, None] * COUNT + tl.arange(0, COUNT)[None, :], opened.to(tl.float32))


@pytest.mark.parametrize("kind", ASSEMBLY)
@pytest.mark.parametrize("operands", [tl.float32, tl.float16], ids=str)
def test_the_twin_opens_every_code(operands, kind):
    words = np.arange(256, dtype=np.uint8)
    if kind == "e4m3":
        words[[0x7F, 0xFF]] = 0  # NaN, which no code is
    # Every byte in its place, and every nibble in others.
    words = (words.view(np.uint32) + (0 if kind == "e4m3" else 0x1020_4080)).astype(np.uint32)
    want = expected(kind, words)
    out = torch.zeros(want.shape)
    with interpreted(__name__):
        _open[(1,)](torch.from_numpy(words.view(np.int32)), out, kind, operands, want.shape[1])
    got = out.double().numpy() * code_unit(kind)
    assert np.abs(got - want).max() <= (2.0**-12 * 1.510 if kind == "lloyd2" else 0)


@triton.jit
def _scales(byte, out):
    n = tl.arange(0, 256)
    tl.store(out + n, scale_value(tl.load(byte + n)))


def test_every_scale():
    from codec_bounds import UE5M3_VALUES

    out = torch.zeros(256)
    with interpreted(__name__):
        _scales[(1,)](torch.arange(256).to(torch.uint8), out)
    assert out.double().tolist() == UE5M3_VALUES.tolist()
