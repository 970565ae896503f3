"""What the options of a server come to for one model: its codec and its ladder of formats, which belong together."""

from csa2.codec.channels import Rotation
from csa2.codec.codec import PageCodec, make_codec
from csa2.formats import MERGE, FormatLadder, make_ladder
from csa2.options import CacheOptions
from sgl_kernels.page_layout import PageGeometry


def codec_and_ladder(
    options: CacheOptions, geometry: PageGeometry, rotation: Rotation, orders: list[list[int]] | None
) -> tuple[PageCodec, FormatLadder]:
    """Codec and ladder of `options`.

    Args:
        orders: channel order of each of the L x G heads, or None; see `make_codec`.

    Raises:
        PageFormatError: a geometry that the codec cannot store.
    """
    merged = MERGE.get(options.old_page_format or "", 1) > 1
    codec, classes = make_codec(geometry, rotation, orders, merged=merged)
    ladder = make_ladder(
        geometry,
        options.kv_format,
        options.old_page_format,
        None if options.shared_format == "tail" else options.shared_format,
        classes,
        channel_scales=options.key_scale == "channel",
    )
    return codec, ladder
