"""`csa2 calibrate`: text in, calibration folder out."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from csa2.calibrate.artefact import FORMAT_VERSION, Calibration, CalibrationConfig, ScorerConfig, save
from csa2.calibrate.capture import CapturedModel
from csa2.calibrate.fingerprint import ModelShape, model_shape, weights_digest
from csa2.calibrate.scorer_run import FOLDER, Candidates, ScorerChoice, ScorerOptions, Work, train_scorers
from csa2.calibrate.scorer_training import RATIOS
from csa2.calibrate.sensitivity import budget_split, layer_losses
from csa2.calibrate.statistics import PAGE_TOKENS, channel_order, channel_pairs, pair_scores
from csa2.codec.budgets import HeadBudget, menu
from csa2.codec.channels import Rotation
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
    budget_samples: int = 16
    budget_tokens: int = 3584
    scorer: ScorerChoice = "none"
    scorer_samples: int = 60
    scorer_tokens: int = 2560
    seed: int = 0

    @property
    def for_scorer(self) -> ScorerOptions:
        """Those that the training of the scorer depends on."""
        return ScorerOptions(
            scorer=self.scorer,
            scorer_samples=self.scorer_samples,
            scorer_tokens=self.scorer_tokens,
            seed=self.seed,
        )

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
        if self.budget_samples < 1:
            raise OptionError(f"--budget-samples {self.budget_samples} is out of range: give at least 1, better 16")
        budget_split(self.budget_tokens)
        self.for_scorer.validate()


def calibrate(options: CalibrateOptions) -> Calibration:
    """Measure, save and return a calibration. Shows progress on the error stream; the same seed gives the same result.

    An interrupted run leaves what it has of the scorer in `options.out`, where the same run finds it again.

    Raises:
        OptionError: an option is out of range.
        CalibrationError: model or text cannot be used, or the folder cannot be written.
    """
    options.validate()
    shape = model_shape(options.model)
    texts = [_read(path) for path in options.texts]
    model = CapturedModel(options.model)
    documents = [model.encode(text) for text in texts]
    samples = draw_samples(documents, options.samples, options.sample_tokens, options.seed, "--sample-tokens")
    long_samples = draw_samples(documents, options.budget_samples, options.budget_tokens, options.seed, "--budget-tokens")
    work = Work(
        shape=shape,
        weights_digest=weights_digest(options.model),
        data_digest=hashlib.sha256("".join(texts).encode()).hexdigest(),
        options=options.for_scorer,
        versions={name: version for name, version in versions().items() if name != "os"},
    )
    candidates = train_scorers(model, documents, work, options.out / FOLDER) if options.scorer != "none" else None
    rotation = model.rotation(shape.head_dim)
    pairs = channel_pairs(rotation, shape.head_dim)
    order = channel_order(measure(model, samples, shape, pairs), pairs)
    choices = menu(shape.head_dim)
    losses = measure_losses(model, long_samples, choices, order, rotation, options.seed)
    config = CalibrationConfig(
        format_version=FORMAT_VERSION,
        model_name=options.model.name,
        shape=shape,
        weights_digest=work.weights_digest,
        data_digest=work.data_digest,
        samples=len(samples),
        sample_tokens=options.sample_tokens,
        budget_samples=len(long_samples),
        budget_tokens=options.budget_tokens,
        seed=options.seed,
        menu=choices,
        versions=work.versions,
        scorer=None if candidates is None else scorer_config(candidates, options.for_scorer),
    )
    scorer = candidates.scorers.get(config.scorer.kind) if candidates and config.scorer else None
    calibration = Calibration(config=config, channel_order=order, losses=losses, scorer=scorer)
    save(calibration, options.out)
    shutil.rmtree(options.out / FOLDER, ignore_errors=True)
    return calibration


def scorer_config(candidates: Candidates, options: ScorerOptions) -> ScorerConfig:
    """Which candidate is kept: the one that was asked for, or the best."""
    kind = candidates.best() if options.scorer == "best" else options.scorer
    scorer = candidates.scorers.get(kind)
    return ScorerConfig(
        kind=kind,
        asked_for=options.scorer,
        hidden_units=0 if scorer is None else scorer.outer.shape[-1],
        parameters=0 if scorer is None else scorer.parameters,
        samples=candidates.samples,
        held_out_samples=candidates.held_out,
        sample_tokens=options.scorer_tokens,
        ratios=RATIOS,
        held_out_errors={name: candidates.mean_errors(name) for name in candidates.errors},
    )


def draw_samples(documents: Sequence[list[int]], count: int, length: int, seed: int, option: str) -> list[list[int]]:
    """Up to `count` samples of `length` tokens from random places, more from longer documents; no two overlap.

    Args:
        option: that sets the length.

    Raises:
        CalibrationError: no document is long enough.
    """
    places = [(d, start) for d, tokens in enumerate(documents) for start in range(0, len(tokens) - length + 1, length)]
    if not places:
        raise CalibrationError(
            f"the text is too short: no file has {length} tokens. Give longer files or a smaller {option}"
        )
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    chosen = [places[i] for i in order[:count].tolist()]
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


def measure_losses(
    model: CapturedModel,
    samples: Sequence[list[int]],
    choices: Sequence[HeadBudget],
    order: Tensor,
    rotation: Rotation,
    seed: int,
) -> Tensor:
    """(M, L, G) fp32 loss of each choice for each head, nat per token, mean over `samples`.

    Args:
        order: (L, G, D) channel order.
    """
    layers = order.shape[0]
    total = torch.zeros(len(choices), *order.shape[:2])
    with tqdm(total=len(samples) * layers, desc="budgets", unit="layer") as bar:
        for index, tokens in enumerate(samples):
            split = budget_split(len(tokens))
            captured = model.capture(tokens, split.context)
            gradients = model.output_gradients(tokens, captured, seed + index)
            for layer in range(layers):
                orders = order[layer].tolist()
                found = layer_losses(captured[layer], gradients[layer], split, choices, rotation, orders)
                total[:, layer] += found.cpu()
                bar.update()
    return total / len(samples)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CalibrationError(f"--text {path} cannot be read: {error.strerror}") from error
