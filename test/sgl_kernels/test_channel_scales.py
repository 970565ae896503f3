"""Keys with a scale per channel in the flat basis: `--csa2-key-scale channel`."""

import pytest
import torch

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import CodecBases, Entries, open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, coded_layout, plain_layout
from sgl_kernels.paged_attention import reference
from sgl_kernels.paged_attention.cpu import CpuAttention
from sgl_kernels.paged_attention.plan import plan_pages

PAGES, GROUPS, REPEAT = 3, 2, 3


def sealed(dim: int, page_size: int = 64):
    geometry = PageGeometry(2, GROUPS, dim, page_size, torch.bfloat16, (1,))
    layout = coded_layout("fp4", "e2m1", "e2m1", geometry, channel_scales=True)
    bases = CodecBases(orthonormal_basis(dim))
    random = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, PAGES, 2 * GROUPS, page_size, dim, generator=random)
    keys[..., 3] += 5
    entries = Entries(keys, values, None)
    return layout, bases, entries, seal_pages(entries, layout, bases)


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("dim", [32, 64, 100, 128])
def test_keys_are_within_half_a_step_of_their_channel(dim, page_size):
    layout, bases, entries, packed = sealed(dim, page_size)
    opened = open_pages(packed, layout, bases)
    flat = bases.flat.double()
    before, after = (x.double()[:, :GROUPS] @ flat for x in (entries.keys, opened.keys))
    low, high = before.aminmax(dim=-2, keepdim=True)
    # Sixteen levels over the range, its midpoint rounded to E4M3 (1/16 of itself), the scale rounded up by at most 1/8.
    reach = (high - low) / 2 + (high + low).abs() / 2 / 16
    # 2^-10 is half the distance of E4M3's smallest numbers, 1e-5 the rounding of the two rotations in fp32.
    bound = (reach + 2.0**-10) * 9 / 8 / 7.5 / 2 + 1e-5
    assert bool(((after - before).abs() <= bound).all())


def test_the_same_bytes_as_a_scale_per_entry():
    layout = sealed(64)[0]
    assert layout.page_bytes == coded_layout("fp4", "e2m1", "e2m1", layout.geometry).page_bytes


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("layer", [0, 1])
def test_attention_reads_them(dim, layer):
    """Both implementations against float64 over what the pages open to."""
    layout, bases, _, packed = sealed(dim)
    layouts = (plain_layout("bf16", layout.geometry), layout)
    arena = packed.flatten().clone()
    offsets = torch.arange(PAGES) * layout.page_bytes
    formats = torch.ones(PAGES, dtype=torch.int8)
    opened = open_pages(packed, layout, bases)
    heads = slice(layer * GROUPS, (layer + 1) * GROUPS)
    keys, values = (x[:, heads].transpose(0, 1).flatten(1, 2).double() for x in (opened.keys, opened.values))
    query = torch.randn(1, GROUPS * REPEAT, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = query.double().view(GROUPS, REPEAT, dim) @ keys.transpose(-1, -2) * dim**-0.5
    want = (torch.softmax(logits, -1) @ values).view(1, GROUPS * REPEAT, dim)

    pages, lengths = torch.arange(PAGES)[None], torch.tensor([PAGES * 64])
    plan = plan_pages(pages, lengths, formats, offsets, layouts, 64)
    got = reference.decode(query, arena, plan, layer, dim**-0.5, bases)
    # fp32 sums of 192 terms of size 1: 1e-5 is far above their rounding.
    assert torch.allclose(got.double(), want, atol=1e-5)

    kernels = CpuAttention(layouts, bases)
    new = torch.zeros(1, GROUPS, dim, dtype=torch.bfloat16)
    batch = kernels.plan(pages, lengths, torch.tensor([1]), formats, offsets)
    compiled = kernels.attend(query, new, new, arena, batch, layer, dim**-0.5).double()
    # The new token has key and value zero: one more logit of 0.
    both = torch.cat((logits, torch.zeros(GROUPS, REPEAT, 1, dtype=torch.float64)), -1)
    want = (torch.softmax(both, -1)[..., :-1] @ values).view(1, GROUPS * REPEAT, dim)
    # int8 queries and 8-bit weights: at most 2 per cent of the output, where the 4-bit codes themselves cost 10.
    assert float((compiled - want).norm() / want.norm()) < 0.02
