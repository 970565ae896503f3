"""The calibration of the served model: checked before anything is spawned, cut to what a rank holds."""

import logging
from pathlib import Path
from typing import Any

from csa2.calibrate.artefact import check_model, load
from csa2.codec.assembly import HeadCalibration
from csa2.codec.channels import Rotation
from csa2.errors import CalibrationError
from csa2.options import CacheOptions
from sgl_kernels.page_layout import PageGeometry

logger = logging.getLogger(__name__)


def check_calibration(options: CacheOptions, model_path: str) -> None:
    """Load the calibration that `options` name and compare it with the model, if that lies in a local folder.

    Raises:
        CalibrationError: it cannot be read, or belongs to another model.
    """
    if options.calibration is None:
        return
    calibration = load(Path(options.calibration))
    if Path(model_path).is_dir():
        check_model(calibration, Path(model_path), source=options.calibration)


def head_calibration(
    options: CacheOptions, geometry: PageGeometry, start_layer: int, rotation: Rotation
) -> HeadCalibration | None:
    """What the calibration says of the heads of this rank, or None without one.

    Raises:
        CalibrationError: the calibration has other layers, heads, channels or rotary pairs than the model.
    """
    if options.calibration is None:
        if options.reduced_formats:
            logger.warning(
                "csa2: no --csa2-calibration, so --csa2-ratio %s keeps the slowest rotary pairs of each key and gives "
                "every head the same bytes; `csa2 calibrate` finds what loses several times less",
                options.ratio,
            )
        else:
            logger.info("csa2: no --csa2-calibration: all heads get the same bytes; `csa2 calibrate` finds what loses less")
        return None
    calibration = load(Path(options.calibration))
    shape = calibration.config.shape
    layers = range(start_layer, start_layer + geometry.num_layers)
    heads = _local_heads(shape.num_kv_heads, geometry.num_kv_heads)
    if layers.stop > shape.num_layers or heads.stop > shape.num_kv_heads or geometry.head_dim != shape.head_dim:
        raise CalibrationError(
            f"--csa2-calibration {options.calibration} has {shape.num_layers} layers of {shape.num_kv_heads} KV heads with "
            f"{shape.head_dim} channels, the model has other ones: make one for it with `csa2 calibrate`"
        )
    known = calibration.of(layers, heads)
    if not all(rotation.keeps_pairs(order) for order in known.orders):
        # Half a pair would be kept: a choice that holds at one position only.
        raise CalibrationError(
            f"--csa2-calibration {options.calibration} was made for other rotary pairs than SGLang rotates in this model: "
            f"leave it out"
        )
    if known.scorer is not None and options.reduced_formats:
        logger.info("csa2: tokens that are merged are scored by the trained scorer of %s", options.calibration)
    return known


def _local_heads(total: int, local: int) -> range:
    """KV heads of this rank, of `total` in the model; with more ranks than heads some ranks share one."""
    parallel = _parallel()
    first = parallel.attn_tp_rank * total // parallel.attn_tp_size
    return range(first, first + local)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
