"""Numbers to codes, and pages opened and sealed by the Triton kernels in the interpreter, against the torch codec.

Whole re-encodings are in `test/csa2/test_triton_sealing.py`.
"""

import pytest
import torch
import triton
import triton.language as tl
from hard_pages import FORMATS, UNEVEN, bases_of, biases, geometry, layout_of, normal, weights
from interpreted import interpreted

from sgl_kernels import codes as num
from sgl_kernels.page_codec.reference import Entries, open_pages, seal_pages
from sgl_kernels.page_layout import PageLayout, coded_layout, plain_layout
from sgl_kernels.triton.codec import TritonPageCodec
from sgl_kernels.triton.encode import encode_codes, encode_e4m3, encode_ue5m3, finite

STORED = [kind for kind in num.CODE_BITS if kind != "int3"]


@triton.jit
def _encode(values, out, KIND: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, encode_codes(tl.load(values + n), KIND))


@triton.jit
def _encode_bytes(values, means, scales, raised, kept, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(values + n)
    tl.store(means + n, encode_e4m3(x))
    tl.store(scales + n, encode_ue5m3(tl.abs(x), False))
    tl.store(raised + n, encode_ue5m3(tl.abs(x), True))
    tl.store(kept + n, finite(x))


def numbers() -> torch.Tensor:
    """(8192,) fp32: eighths up to 16, sixteen numbers of each power of two, the neighbours of all these, and random ones."""
    steps = 2.0 ** torch.arange(-20, 18)[:, None] * (1 + torch.arange(16) / 16)
    exact = torch.cat((torch.arange(-128, 128) / 8, steps.flatten(), -steps.flatten()))
    up, down = (torch.nextafter(exact, torch.full_like(exact, end)) for end in (torch.inf, -torch.inf))
    near = torch.cat((exact, up, down))
    return torch.cat((near, 4 * torch.randn(8192 - near.numel(), generator=torch.Generator().manual_seed(0))))


@pytest.mark.parametrize("kind", STORED)
def test_numbers_get_the_codes_of_the_reference(kind):
    values = numbers()
    out = torch.empty(values.shape, dtype=torch.int32)
    with interpreted(__name__):
        _encode[(1,)](values, out, kind, values.numel())
    assert torch.equal(out.to(torch.uint8), num.encode_codes(values, kind))


def test_means_and_scales_get_the_bytes_of_the_reference():
    values = numbers()
    means, scales, raised = torch.empty(3, values.numel(), dtype=torch.int32)
    kept = torch.empty_like(values)
    with interpreted(__name__):
        _encode_bytes[(1,)](values, means, scales, raised, kept, values.numel())
    assert torch.equal(means.to(torch.uint8), num.encode_e4m3(values))
    assert torch.equal(scales.to(torch.uint8), num.encode_ue5m3(values.abs()))
    assert torch.equal(raised.to(torch.uint8), num.encode_ue5m3(values.abs(), round_up=True))
    assert torch.equal(kept, values.clamp(-num.SATURATION, num.SATURATION))


def int2_layout(g) -> PageLayout:
    return coded_layout("int2", "int2", "int2", g)


def channel_layout(g) -> PageLayout:
    return coded_layout("channel", "int4", "e2m1", g, channel_scales=True)


CASES = [(name, dim, size) for name, dim, size in zip(
    ("int2", "channel", *FORMATS, UNEVEN),
    (64, 128, 64, 80, 128, 64, 96, 64, 128, 100, 64),
    (64, 32, 64, 32, 64, 128, 64, 64, 64, 32, 64), strict=True)]  # fmt: skip


@pytest.mark.parametrize(("name", "dim", "size"), CASES)
def test_pages_are_opened_and_sealed_as_by_the_reference(name, dim, size):
    """Bytes differ only where fp32 sums of another order decide: sums of at most 256 numbers are off by some 2^-21 of their
    size, which moves one rounding in a hundred thousand; a mean that moves takes a line of codes along."""
    g = geometry(dim, 3, torch.bfloat16, size)
    special = {"int2": int2_layout, "channel": channel_layout}.get(name)
    layout, bases = layout_of(name, g) if special is None else special(g), bases_of(g)
    codec = TritonPageCodec([plain_layout("plain", g), layout], bases)
    entries = Entries(normal(layout, 2, 1) + normal(layout, 1, 3)[:, :, :1], normal(layout, 2, 2), biases(layout, 2))
    weight = weights(layout, 2)
    weight[1] = 0
    want = seal_pages(entries, layout, bases, weight)
    arena = torch.full((64 + want.numel(),), 0xFF, dtype=torch.uint8)
    arena[64:] = want.flip(0).reshape(-1)
    with interpreted():
        packed = codec.seal(entries, 1, weight)
        opened = codec.open(arena, 64 + torch.tensor([1, 0]) * layout.page_bytes, 1)
    assert float((packed != want).float().mean()) < 1e-3
    known = open_pages(want, layout, bases)
    # Dot products of up to 256 numbers below 20, of which a row of the basis has the norm 1.
    assert torch.allclose(opened.keys, known.keys, rtol=0, atol=20 * 256 * 2.0**-24)
    assert torch.allclose(opened.values, known.values, rtol=0, atol=20 * 256 * 2.0**-24)
    if layout.is_merged:
        assert torch.equal(opened.bias, known.bias)


def test_a_merged_format_without_biases_is_refused():
    g = geometry(64)
    layout = layout_of("csa2-4x", g)
    codec = TritonPageCodec([plain_layout("plain", g), layout], bases_of(g))
    with pytest.raises(ValueError, match="bias"):
        codec.seal(Entries(normal(layout, 1), normal(layout, 1), None), 1, weights(layout, 1))
