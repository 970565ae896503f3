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
    check_geometry(geometry)
    tail = options.old_page_format
    merge = MERGE.get(tail or "", 1)
    orders = None if known is None else known.orders
    classes = default_classes(geometry, merged=merge > 1, all_alike=orders is None and rotation.is_none)
    heads: tuple[HeadLayout, ...] = ()
    if tail in MERGE:
        heads = even_heads(tail, classes, geometry)
        if known is not None:
            heads = known.losses.heads(heads, geometry)
            classes = tuple(() if head.basis == "identity" else head.key_classes for head in heads)
    codec = make_codec(geometry, rotation, classes, orders, rope, None if known is None else known.scorer)
    ladder = make_ladder(
        geometry,
        options.kv_format,
        tail,
        None if options.shared_format == "tail" else options.shared_format,
        heads,
        channel_scales=options.key_scale == "channel",
        separated=options.rope == "separated",
    )
    if known is not None:
        budgeted = ("k8v4", options.kv_format)
        layouts = [
            replace(layout, heads=known.losses.heads(layout.heads, geometry)) if layout.name in budgeted else layout
            for layout in ladder.layouts
        ]
        ladder = replace(ladder, layouts=tuple(layouts))
    return codec, ladder
