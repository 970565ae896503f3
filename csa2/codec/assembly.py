"""What the options of a server come to for one model: its codec and its ladder of formats, which belong together."""

from dataclasses import dataclass, replace

from csa2.codec.budgets import HeadLosses
from csa2.codec.channels import Rotation, default_classes
from csa2.codec.codec import PageCodec, make_codec
from csa2.codec.scorer import Scorer
from csa2.formats import MERGE, FormatLadder, check_geometry, even_heads, make_ladder
from csa2.options import CacheOptions
from sgl_kernels.page_layout import HeadLayout, PageGeometry
from sgl_kernels.rope import Rope


@dataclass(frozen=True)
class HeadCalibration:
    """What calibration says of the L x G heads of one rank."""

    orders: list[list[int]]
    """Channels of the keys of each head, the most important first; the two of a rotary pair together."""
    losses: HeadLosses
    scorer: Scorer | None = None


def codec_and_ladder(
    options: CacheOptions,
    geometry: PageGeometry,
    rotation: Rotation,
    known: HeadCalibration | None,
    rope: Rope | None = None,
) -> tuple[PageCodec, FormatLadder]:
    """Codec and ladder of `options`. Without a calibration every head gets the same bytes.

    Args:
        rope: how keys rotate; needed where the options separate them from their positions.

    Raises:
        PageFormatError: a geometry that the codec cannot store.
    """
    ladder = format_ladder(options, geometry, rotation, known)
    reduced = [head for name in options.reduced_formats for head in ladder.layouts[ladder.index(name)].heads]
    classes = tuple(() if head.basis == "identity" else head.key_classes for head in reduced)
    orders, scorer = (None, None) if known is None else (known.orders, known.scorer)
    return make_codec(geometry, rotation, classes, orders, rope, scorer), ladder


def format_ladder(
    options: CacheOptions, geometry: PageGeometry, rotation: Rotation, known: HeadCalibration | None
) -> FormatLadder:
    """The ladder alone, see `codec_and_ladder`: enough to know what pages take.

    Raises:
        PageFormatError: a geometry that the codec cannot store.
    """
    check_geometry(geometry)
    ladder = make_ladder(
        geometry,
        options.kv_format,
        options.old_page_format,
        None if options.shared_format == "tail" else options.shared_format,
        {name: _heads(name, geometry, rotation, known) for name in options.reduced_formats},
        channel_scales=options.key_scale == "channel",
        separated=options.rope == "separated",
    )
    if known is None:
        return ladder
    budgeted = ("k8v4", options.kv_format)
    layouts = [
        replace(layout, heads=known.losses.heads(layout.heads, geometry)) if layout.name in budgeted else layout
        for layout in ladder.layouts
    ]
    return replace(ladder, layouts=tuple(layouts))


def _heads(name: str, geometry: PageGeometry, rotation: Rotation, known: HeadCalibration | None) -> tuple[HeadLayout, ...]:
    """Pieces of the reduced format `name`."""
    all_alike = known is None and rotation.is_none
    even = even_heads(name, default_classes(geometry, merged=MERGE[name] > 1, all_alike=all_alike), geometry)
    return even if known is None else known.losses.heads(even, geometry)
