"""The ladder of `--csa2-ratio auto`: every smaller format beside each other, each as if it were alone."""

import pytest
import torch
from torch import Tensor

from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.codec.queries import QuerySamples
from csa2.codec.sealing import CompiledSealer, ReferenceSealer, Sealer, Wave
from csa2.formats import MERGE, PLAIN
from csa2.options import CacheOptions
from sgl_kernels.page_layout import PageGeometry

GEOMETRY = PageGeometry(2, 2, 64, 64, torch.bfloat16, (1,))
ROTATION = make_rotation(64, neox=True)
PAGES = 3


def sealed(options: CacheOptions, name: str, sealer: type[Sealer]) -> tuple[Tensor, Tensor]:
    """Bytes of random pages in the format `name` of the ladder of `options`, and the keys they open to."""
    codec, ladder = codec_and_ladder(options, GEOMETRY, ROTATION, None)
    size = ladder.page_bytes[PLAIN]
    plain = torch.randn(PAGES, size // 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    arena = plain.view(torch.uint8).flatten()
    at = torch.arange(PAGES)
    index = ladder.index(name)
    wave = Wave(torch.zeros_like(at), at * size, torch.full_like(at, index), torch.full_like(at, -1))
    packed = sealer(ladder.layouts, codec).seal(arena, wave, QuerySamples(2, 2))[index]
    return packed, codec.open(packed, ladder.layouts[index]).keys


@pytest.mark.parametrize("name", MERGE)
@pytest.mark.parametrize("sealer", [ReferenceSealer, CompiledSealer])
def test_each_format_is_what_it_is_alone(name, sealer):
    alone, keys = sealed(CacheOptions(ratio=name.removeprefix("csa2-").removesuffix("x")), name, sealer)
    among, opened = sealed(CacheOptions(), name, sealer)
    assert torch.equal(alone, among)
    assert torch.equal(keys, opened)


def test_the_ladder_has_every_rung_and_starts_at_4_bits():
    codec, ladder = codec_and_ladder(CacheOptions(), GEOMETRY, ROTATION, None)
    assert ladder.names == ("bf16", "fp8", "fp4", *MERGE)
    assert ladder.tail == ladder.warm
    assert [layout.basis_set for layout in ladder.layouts[-3:]] == [0, 1, 2]
    assert codec.bases.reduced is not None
    assert codec.bases.reduced.shape[0] == 3 * 2 * 2
    assert list(ladder.page_bytes) == sorted(ladder.page_bytes, reverse=True)
