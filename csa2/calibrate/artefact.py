"""The calibration folder: `calibration.safetensors`, `config.json` and a model card."""

from dataclasses import fields
from pathlib import Path
from typing import Literal

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from csa2.calibrate.fingerprint import ModelShape, model_shape, weights_digest
from csa2.codec.assembly import HeadCalibration
from csa2.codec.budgets import HeadBudget, HeadLosses
from csa2.codec.scorer import SCALARS, Scorer
from csa2.errors import CalibrationError

FORMAT_VERSION = 2
TENSORS, CONFIG, CARD = "calibration.safetensors", "config.json", "README.md"
ScorerKind = Literal["none", "ridge", "mlp"]
_SCORER = tuple(field.name for field in fields(Scorer))


class ScorerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which scorer was kept, and why."""

    kind: ScorerKind
    """What is in the artefact; "none": the training-free score."""
    asked_for: str
    hidden_units: int
    parameters: int
    samples: int
    held_out_samples: int
    sample_tokens: int
    ratios: tuple[int, ...]
    """Tokens to an entry."""
    held_out_errors: dict[ScorerKind, tuple[float, ...]]
    """Error of the attention output with old pages merged by each of `ratios`, everything else exact; mean over layers."""


class CalibrationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """config.json: which model, which text, which software."""

    format_version: int
    model_name: str
    shape: ModelShape
    weights_digest: str | None
    data_digest: str
    """SHA-256 of the text that was read."""
    samples: int
    sample_tokens: int
    budget_samples: int
    budget_tokens: int
    seed: int
    menu: tuple[HeadBudget, ...]
    """Choices of a head, in the order of `Calibration.losses`."""
    versions: dict[str, str]
    scorer: ScorerConfig | None = None
    """None: none was trained."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration knows of a model. Axes: L layers, G KV heads of the whole model, D head dim."""

    config: CalibrationConfig
    channel_order: Tensor
    """(L, G, D) int16: channels of the keys, the most important first; the two of a rotary pair together."""

    losses: Tensor
    """(M, L, G) fp32: what each choice of the menu costs each head, nat per token; see `csa2.calibrate.sensitivity`."""

    scorer: Scorer | None = None
    """Leading axes (L, G); None: the training-free score."""

    def of(self, layers: range, heads: range) -> HeadCalibration:
        """What it says of the heads of one rank."""
        rank = (slice(layers.start, layers.stop), slice(heads.start, heads.stop))
        orders: list[list[int]] = self.channel_order[rank].flatten(0, 1).tolist()
        losses = HeadLosses(self.config.menu, self.losses[:, rank[0], rank[1]].flatten(1))
        return HeadCalibration(orders, losses, self.scorer and self.scorer.map(lambda tensor: tensor[rank].flatten(0, 1)))


class _Version(msgspec.Struct):
    """The one field of config.json that every version has."""

    format_version: int


def save(calibration: Calibration, folder: Path) -> None:
    """Write the calibration to `folder`, made if need be.

    Raises:
        CalibrationError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"channel_order": calibration.channel_order.contiguous(), "losses": calibration.losses.contiguous()}
        if calibration.scorer is not None:
            stored = calibration.scorer.map(lambda tensor: tensor.bfloat16().contiguous())
            tensors |= {f"scorer.{name}": getattr(stored, name) for name in _SCORER}
        safetensors.torch.save_file(tensors, folder / TENSORS)
        config = msgspec.json.format(msgspec.json.encode(calibration.config), indent=2)
        (folder / CONFIG).write_bytes(config + b"\n")
        (folder / CARD).write_text(_card(calibration.config), encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"the calibration cannot be written to {folder}: {error}") from error


def load(folder: Path) -> Calibration:
    """Read a calibration.

    Raises:
        CalibrationError: it is not there, damaged, or of another version.
    """
    try:
        text = (folder / CONFIG).read_bytes()
        version = msgspec.json.decode(text, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise CalibrationError(
                f"the calibration in {folder} has version {version}, this release reads {FORMAT_VERSION}: make it again "
                f"with `csa2 calibrate`"
            )
        config = msgspec.json.decode(text, type=CalibrationConfig)
        tensors = safetensors.torch.load_file(folder / TENSORS)
    except FileNotFoundError as error:
        raise CalibrationError(
            f"{folder} holds no calibration ({error.filename or error} is missing): make it with `csa2 calibrate`"
        ) from None
    except (OSError, msgspec.MsgspecError, safetensors.SafetensorError) as error:
        raise CalibrationError(
            f"the calibration in {folder} cannot be read ({error}): make it again with `csa2 calibrate`"
        ) from error
    order, losses = tensors.get("channel_order"), tensors.get("losses")
    scorer = _scorer(config, tensors)
    has_scorer = config.scorer is not None and config.scorer.kind != "none"
    if order is None or losses is None or not _is_whole(config, order, losses) or (scorer is None and has_scorer):
        raise CalibrationError(f"the calibration in {folder} is damaged: make it again with `csa2 calibrate`")
    return Calibration(config=config, channel_order=order, losses=losses, scorer=scorer if has_scorer else None)


def _scorer(config: CalibrationConfig, tensors: dict[str, Tensor]) -> Scorer | None:
    """The scorer, or None if its tensors are not there or not what the configuration says."""
    found = [tensors[f"scorer.{name}"].float() for name in _SCORER if f"scorer.{name}" in tensors]
    if config.scorer is None or len(found) < len(_SCORER):
        return None
    shape, units = config.shape, config.scorer.hidden_units
    heads = (shape.num_layers, shape.num_kv_heads)
    wanted = [(*heads, 2 * shape.head_dim + SCALARS, 1 + units), (*heads, 1 + units), (*heads, units)]
    is_whole = [tuple(tensor.shape) for tensor in found] == wanted and all(bool(t.isfinite().all()) for t in found)
    return Scorer(*found) if is_whole else None


def _is_whole(config: CalibrationConfig, order: Tensor, losses: Tensor) -> bool:
    """Whether the tensors are what the configuration says."""
    shape = config.shape
    heads = (shape.num_layers, shape.num_kv_heads)
    if tuple(order.shape) != (*heads, shape.head_dim) or tuple(losses.shape) != (len(config.menu), *heads):
        return False
    complete = torch.arange(shape.head_dim, dtype=torch.int16)
    return bool((order.sort(-1).values == complete).all()) and bool((losses.isfinite() & (losses >= 0)).all())


def check_model(calibration: Calibration, folder: Path, *, source: str) -> None:
    """Refuse a calibration of another model than the one in `folder`.

    Raises:
        CalibrationError: names both models and what differs.
    """
    config = calibration.config
    made_for = f"the calibration in {source} was made for {config.model_name}"
    remedy = f"make one for it with `csa2 calibrate --model {folder}`"
    shape = model_shape(folder)
    if shape != config.shape:
        raise CalibrationError(f"{made_for} ({_shape(config.shape)}), the model in {folder} has {_shape(shape)}: {remedy}")
    digest = weights_digest(folder)
    if digest is not None and config.weights_digest is not None and digest != config.weights_digest:
        raise CalibrationError(f"{made_for}, the model in {folder} has the same shape but other weights: {remedy}")


def _shape(shape: ModelShape) -> str:
    heads = f"{shape.num_query_heads} query and {shape.num_kv_heads} KV heads"
    return f"{shape.num_layers} layers, {heads}, head_dim {shape.head_dim}"


def _card(config: CalibrationConfig) -> str:
    versions = "\n".join(f"* {name} {version}" for name, version in sorted(config.versions.items()))
    return f"""# Calibration of {config.model_name} for sglang-csa2

Serve with `--kv-compress csa2 --csa2-calibration THIS_FOLDER`. It tells the formats csa2-2x, -4x and -8x which
key channels of each head matter most, and which heads need more bytes than others.

* Model: {_shape(config.shape)}, weights {config.weights_digest or "not examined"}
* Text: {config.samples} samples of {config.sample_tokens} tokens, SHA-256 {config.data_digest}, seed {config.seed}
* Budgets of heads: {config.budget_samples} samples of {config.budget_tokens} tokens of it
* Score of entries when merging: {_scorer_line(config.scorer)}

{versions}
"""


def _scorer_line(scorer: ScorerConfig | None) -> str:
    """What the model card says of the scorer."""
    if scorer is None:
        return "without training; none was trained"
    errors = "; ".join(f"{kind} {', '.join(f'{e:.4f}' for e in found)}" for kind, found in scorer.held_out_errors.items())
    kept = "none, since no trained one is better" if scorer.kind == "none" else f"{scorer.kind}, {scorer.parameters} weights"
    ratios = " and ".join(f"{ratio}:1" for ratio in scorer.ratios)
    return (
        f"asked for {scorer.asked_for}, kept {kept}. Trained on {scorer.samples} samples of {scorer.sample_tokens} tokens; "
        f"error of merging {ratios} on {scorer.held_out_samples} others: {errors}"
    )
