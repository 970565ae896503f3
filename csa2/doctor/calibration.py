"""Whether a calibration folder belongs to a model folder, told without torch."""

from pathlib import Path

import msgspec

from csa2.calibrate.fingerprint import ModelShape, model_shape, weights_digest
from csa2.errors import CalibrationError


class _Config(msgspec.Struct):
    """What is compared of the calibration's config.json."""

    model_name: str
    shape: ModelShape
    weights_digest: str | None = None


def calibration_fault(calibration: Path, model: Path) -> str | None:
    """What does not fit, in words; None if it fits.

    The server refuses a calibration of another model when it starts. Weights loaded later, and folders that changed since,
    are not seen then.
    """
    try:
        config = msgspec.json.decode((calibration / "config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        return f"it cannot be read ({error})"
    try:
        shape = model_shape(model)
    except CalibrationError as error:
        return str(error)
    if shape != config.shape:
        return f"it was made for {config.model_name} ({_words(config.shape)}), the model in {model} has {_words(shape)}"
    digest = weights_digest(model)
    if digest is not None and config.weights_digest is not None and digest != config.weights_digest:
        return f"it was made for {config.model_name}, the model in {model} has the same shape but other weights"
    return None


def _words(shape: ModelShape) -> str:
    return f"{shape.num_layers} layers, {shape.num_query_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}"
