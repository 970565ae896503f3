"""Which model a calibration belongs to: its shape from config.json and a digest of some of its weights."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from csa2.errors import CalibrationError

_SAMPLED_TENSORS = 8
_SAMPLED_BYTES = 1 << 16


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers that a calibration must share with the served model."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int


def model_shape(folder: Path) -> ModelShape:
    """Shape of the model in `folder`, from its config.json.

    Raises:
        CalibrationError: no such file, or it does not describe a decoder with plain attention.
    """
    config = _config(folder)
    config = config.get("text_config", config)
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            num_query_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{folder / 'config.json'} does not describe a model that can be calibrated: {error!r}"
        ) from None


def weights_digest(folder: Path) -> str | None:
    """Digest of the beginnings of some tensors, whatever files they lie in; None without safetensors files."""
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors.update({name: (path, 8 + size, about) for name, about in header.items()})
    if not tensors:
        return None
    names = sorted(tensors)
    digest = hashlib.sha256()
    for name in names[:: -(-len(names) // _SAMPLED_TENSORS)]:
        path, start, about = tensors[name]
        begin, end = about["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + begin)
            sample = file.read(min(end - begin, _SAMPLED_BYTES))
        digest.update(json.dumps([name, about["dtype"], about["shape"]]).encode())
        digest.update(sample)
    return digest.hexdigest()


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CalibrationError(
            f"{folder} is not a model folder: it has no config.json. Give the folder of a model"
        ) from None
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CalibrationError(f"{path} holds no JSON object")
    return config
