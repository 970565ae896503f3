"""The formats a page can have, in the order of the demotion ladder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from csa2.errors import PageFormatError
from sgl_kernels.page_layout import (
    HeadLayout,
    KeyClass,
    PageGeometry,
    PageLayout,
    coded_layout,
    plain_layout,
    reduced_layout,
)

PLAIN = 0
"""Index of the format in which pages are written."""
FP8 = 1
UNMAPPED = -1

HEAD_DIMS = range(32, 257, 2)
"""Channels of a head that the codec can store."""
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MODEL_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in _DTYPE_NAMES)
"""Model dtypes whose pages can be compressed."""
_CODES = {"fp4": "e2m1", "int4": "int4"}
MERGE = {"csa2-2x": 1, "csa2-4x": 2, "csa2-8x": 4}
"""Formats with reduced key channels, and how many tokens share an entry."""

HeadClasses = tuple[tuple[KeyClass, ...], ...]
"""Key classes of each of the L x G heads in the reduced formats; an empty one keeps all its channels."""


@dataclass(frozen=True)
class FormatLadder:
    """Layouts from the largest to the smallest; a page moves only towards the end."""

    layouts: tuple[PageLayout, ...]
    warm: int
    """Format of private pages between the hot and the warm window: the 4-bit one."""
    tail: int
    """Format of private pages beyond the warm window."""
    shared: int | None
    """Format of shared pages while memory is not short; None: the same as private ones."""
    merges: bool = False
    """Whether the smallest format merges tokens on another rank, even if it does not on this one."""

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

    @property
    def is_separated(self) -> bool:
        """Whether coded pages hold keys without their rotation, and positions."""
        return self.layouts[self.warm].is_separated

    @property
    def end(self) -> int:
        """Index of the smallest format."""
        return len(self.layouts) - 1

    @property
    def guard(self) -> int:
        """Smallest format of the first page of a sequence: the end of the ladder, or 4 bits where the end merges tokens."""
        return self.warm if self.merges or self.layouts[self.end].is_merged else self.end

    def index(self, name: str) -> int:
        """Index of the format called `name`; "bf16" means the model dtype and "fp4" the 4-bit rung of either code.

        Raises:
            PageFormatError: no such format.
        """
        aliases = {"bf16": PLAIN, "fp4": self.warm}
        if name in self.names:
            return self.names.index(name)
        if name in aliases:
            return aliases[name]
        raise PageFormatError(f"page format {name!r} does not exist: choose one of {', '.join(self.names)}")


def make_ladder(
    geometry: PageGeometry,
    kv_format: str,
    tail: str | None = None,
    shared: str | None = "fp8",
    reduced: Mapping[str, tuple[HeadLayout, ...]] = MappingProxyType({}),
    *,
    channel_scales: bool = False,
    separated: bool = False,
) -> FormatLadder:
    """The ladder for one model: model dtype, FP8, 4 bits, then the `reduced` formats.

    Args:
        kv_format: codes of the 4-bit rung, "fp4" or "int4".
        tail: format of old private pages; None is the 4-bit one.
        shared: format of shared pages; None treats them like private ones.
        reduced: the pieces of each format of `MERGE` that pages can get, the largest format first.
        channel_scales: keys of the 4-bit rung have a scale per channel instead of one per entry.
        separated: coded pages hold keys without their rotation, and positions.

    Raises:
        PageFormatError: a geometry that the codec cannot store, or a format that does not exist.
    """
    check_geometry(geometry)
    if kv_format not in _CODES:
        raise PageFormatError(f"kv format {kv_format!r} does not exist: choose one of {', '.join(_CODES)}")
    four_bit = _CODES[kv_format]
    layouts = [plain_layout(_DTYPE_NAMES[geometry.dtype], geometry), coded_layout("fp8", "e4m3", "e4m3", geometry)]
    # Only where it is used: every format in use costs a part-filled slab.
    if "k8v4" in (tail, shared):
        layouts.append(coded_layout("k8v4", "e4m3", four_bit, geometry))
    warm = len(layouts)
    layouts.append(coded_layout(kv_format, four_bit, four_bit, geometry, channel_scales=channel_scales))
    layouts.extend(PageLayout(name, geometry, heads, basis_set=i) for i, (name, heads) in enumerate(reduced.items()))
    if separated:
        layouts = [replace(layout, is_separated=not layout.is_plain) for layout in layouts]
    ladder = FormatLadder(tuple(layouts), warm, warm, PLAIN)
    return FormatLadder(
        ladder.layouts,
        warm,
        warm if tail is None else ladder.index(tail),
        None if shared is None else ladder.index(shared),
    )


def even_heads(name: str, classes: HeadClasses, geometry: PageGeometry) -> tuple[HeadLayout, ...]:
    """Pieces of the format `name` of `MERGE` if every head gets the same bytes.

    Args:
        classes: key classes of each of the L x G heads; empty for one that keeps the identity basis.
    """
    return reduced_layout(name, classes, "lloyd2", MERGE[name], geometry).heads


def check_geometry(geometry: PageGeometry) -> None:
    """Refuse what the codec cannot store.

    Raises:
        PageFormatError: names the dtype, head dim or page size and what is allowed.
    """
    if geometry.dtype not in _DTYPE_NAMES:
        allowed = ", ".join(_DTYPE_NAMES.values())
        raise PageFormatError(f"KV dtype {geometry.dtype} cannot be compressed: the model dtype must be one of {allowed}")
    if geometry.head_dim not in HEAD_DIMS:
        raise PageFormatError(f"head_dim {geometry.head_dim} cannot be compressed: it must be an even number from 32 to 256")


def packing(slab_bytes: int, page_bytes: Sequence[int]) -> tuple[int, ...]:
    """Pages of each format that one slab holds."""
    return tuple(slab_bytes // size for size in page_bytes)
