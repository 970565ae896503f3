"""The formats a page can have, in the order of the demotion ladder."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from csa2.errors import PageFormatError
from sgl_kernels.page_layout import PageGeometry, PageLayout, coded_layout, plain_layout

PLAIN = 0
"""Index of the format in which pages are written."""
FP8 = 1
SMALL = 2
"""Index of the smallest format, the end of the ladder."""
UNMAPPED = -1

HEAD_DIMS = range(32, 257, 2)
"""Channels of a head that the codec can store."""
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MODEL_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in _DTYPE_NAMES)
"""Model dtypes whose pages can be compressed."""
_CODES = {"fp4": "e2m1", "int4": "int4"}


@dataclass(frozen=True)
class FormatLadder:
    """Layouts from the largest to the smallest; a page moves only towards the end."""

    layouts: tuple[PageLayout, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names in ladder order: ("bf16", "fp8", "fp4")."""
        return tuple(layout.name for layout in self.layouts)

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page in each format."""
        return tuple(layout.page_bytes for layout in self.layouts)

    @property
    def geometry(self) -> PageGeometry:
        """Geometry shared by all formats."""
        return self.layouts[0].geometry

    def index(self, name: str) -> int:
        """Index of the format called `name`; "bf16" means the model dtype and "fp4" the 4-bit rung of either code.

        Raises:
            PageFormatError: no such format.
        """
        aliases = {"bf16": PLAIN, "fp8": FP8, "fp4": SMALL}
        if name in self.names:
            return self.names.index(name)
        if name in aliases:
            return aliases[name]
        raise PageFormatError(f"page format {name!r} does not exist: choose one of {', '.join(self.names)}")


def make_ladder(geometry: PageGeometry, kv_format: str) -> FormatLadder:
    """The ladder for one model: model dtype, FP8, then 4 bits with `kv_format` codes ("fp4" or "int4").

    Raises:
        PageFormatError: a geometry that the codec cannot store.
    """
    if geometry.dtype not in _DTYPE_NAMES:
        allowed = ", ".join(_DTYPE_NAMES.values())
        raise PageFormatError(f"KV dtype {geometry.dtype} cannot be compressed: the model dtype must be one of {allowed}")
    if geometry.head_dim not in HEAD_DIMS:
        raise PageFormatError(f"head_dim {geometry.head_dim} cannot be compressed: it must be an even number from 32 to 256")
    if kv_format not in _CODES:
        raise PageFormatError(f"kv format {kv_format!r} does not exist: choose one of {', '.join(_CODES)}")
    return FormatLadder(
        (
            plain_layout(_DTYPE_NAMES[geometry.dtype], geometry),
            coded_layout("fp8", "e4m3", geometry),
            coded_layout(kv_format, _CODES[kv_format], geometry),
        )
    )


def packing(slab_bytes: int, page_bytes: Sequence[int]) -> tuple[int, ...]:
    """Pages of each format that one slab holds."""
    return tuple(slab_bytes // size for size in page_bytes)
