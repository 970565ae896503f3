"""`csa2 calibrate`: text in, calibration folder out."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from csa2.calibrate.artefact import FORMAT_VERSION, Calibration, CalibrationConfig, save
from csa2.calibrate.capture import CapturedModel
from csa2.calibrate.fingerprint import ModelShape, model_shape, weights_digest
from csa2.calibrate.statistics import PAGE_TOKENS, channel_order, channel_pairs, pair_scores
from csa2.errors import CalibrationError, OptionError
from csa2.info import versions

ADVISED_SAMPLES = 128
"""Fewer samples give an order that the next text may not share."""


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `csa2 calibrate` is asked for."""

    model: Path
    texts: tuple[Path, ...]
    out: Path
    samples: int = 256
    sample_tokens: int = 512
    seed: int = 0

    def validate(self) -> None:
        """Check values before anything is loaded.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        if self.samples < 1:
            raise OptionError(f"--samples {self.samples} is out of range: give at least 1, better {ADVISED_SAMPLES}")
        if self.sample_tokens < 2 * PAGE_TOKENS:
            raise OptionError(
                f"--sample-tokens {self.sample_tokens} is too short: queries look back at whole pages, so give at least "
                f"{2 * PAGE_TOKENS}"
            )


def calibrate(options: CalibrateOptions) -> Calibration:
    """Measure, save and return a calibration. Shows progress on the error stream; the same seed gives the same result.

    Raises:
        OptionError: an option is out of range.
        CalibrationError: model or text cannot be used, or the folder cannot be written.
    """
    options.validate()
    shape = model_shape(options.model)
    texts = [_read(path) for path in options.texts]
    model = CapturedModel(options.model)
    samples = draw_samples([model.encode(text) for text in texts], options)
    pairs = channel_pairs(model.rotation(shape.head_dim), shape.head_dim)
    scores = measure(model, samples, shape, pairs)
    config = CalibrationConfig(
        format_version=FORMAT_VERSION,
        model_name=options.model.name,
        shape=shape,
        weights_digest=weights_digest(options.model),
        data_digest=hashlib.sha256("".join(texts).encode()).hexdigest(),
        samples=len(samples),
        sample_tokens=options.sample_tokens,
        seed=options.seed,
        versions={name: version for name, version in versions().items() if name != "os"},
    )
    calibration = Calibration(config=config, channel_order=channel_order(scores, pairs))
    save(calibration, options.out)
    return calibration


def draw_samples(documents: Sequence[list[int]], options: CalibrateOptions) -> list[list[int]]:
    """Samples of `sample_tokens` tokens from random places, more from longer documents; no two overlap.

    Raises:
        CalibrationError: no document is long enough.
    """
    length = options.sample_tokens
    places = [(d, start) for d, tokens in enumerate(documents) for start in range(0, len(tokens) - length + 1, length)]
    if not places:
        raise CalibrationError(
            f"the text is too short: no file has {length} tokens. Give longer files or a smaller --sample-tokens"
        )
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(options.seed))
    chosen = [places[i] for i in order[: options.samples].tolist()]
    return [documents[d][start : start + length] for d, start in chosen]


def measure(model: CapturedModel, samples: Sequence[list[int]], shape: ModelShape, pairs: Tensor) -> Tensor:
    """(L, G, P) pair scores, mean over `samples`.

    Raises:
        CalibrationError: the model has attention layers of another shape than its config.json says.
    """
    total = torch.zeros(shape.num_layers, shape.num_kv_heads, pairs.shape[0])

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        if keys.shape[0] != shape.num_kv_heads or keys.shape[2] != shape.head_dim:
            raise CalibrationError(
                f"attention layer {layer} has {keys.shape[0]} KV heads of {keys.shape[2]} channels, config.json says "
                f"{shape.num_kv_heads} of {shape.head_dim}: models with mixed layers cannot be calibrated"
            )
        total[layer] += pair_scores(queries, keys, pairs).cpu()

    for tokens in tqdm(samples, desc="calibrate", unit="sample"):
        model.run(tokens, visit)
    return total / len(samples)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CalibrationError(f"--text {path} cannot be read: {error.strerror}") from error
