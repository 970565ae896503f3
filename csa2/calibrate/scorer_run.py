"""Training the scorers of all layers: text in, candidates and their errors on held-out text out.

Layers do not depend on each other. What is finished, pieces of text that the model has read and layers that are trained,
stays in a folder until the end, so that an interrupted run goes on where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from csa2.calibrate.artefact import ScorerKind
from csa2.calibrate.capture import CapturedModel
from csa2.calibrate.fingerprint import ModelShape
from csa2.calibrate.merge_sample import MergeSample, cut, piece_split
from csa2.calibrate.offline import SampleSplit
from csa2.calibrate.scorer_training import RATIOS, fit_ridge, hidden_units, importance, merging_error, train_mlp
from csa2.calibrate.unfinished import UnfinishedWork
from csa2.codec.scorer import Scorer
from csa2.errors import CalibrationError, OptionError

ScorerChoice = Literal["none", "ridge", "mlp", "best"]
SCORER_CHOICES: tuple[ScorerChoice, ...] = get_args(ScorerChoice)
FOLDER = "scorer-unfinished"
HELD_OUT = 5
"""One piece in so many is held out: the last ones of each document."""


class ScorerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the training of the scorers depends on, the model and the text apart."""

    scorer: ScorerChoice = "none"
    scorer_samples: int = 60
    scorer_tokens: int = 2560
    seed: int = 0

    def validate(self) -> None:
        """Check the values.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        if self.scorer not in SCORER_CHOICES:
            raise OptionError(f"--scorer {self.scorer} is unknown: give one of {', '.join(SCORER_CHOICES)}")
        if self.scorer_samples < 2:
            raise OptionError(f"--scorer-samples {self.scorer_samples} is out of range: give at least 2, better 60")
        piece_split(self.scorer_tokens)

    @property
    def kinds(self) -> tuple[ScorerKind, ...]:
        """Scorers to train."""
        return {"none": (), "ridge": ("ridge",), "mlp": ("mlp",), "best": ("ridge", "mlp")}[self.scorer]  # type: ignore[return-value]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a trained layer depends on."""

    shape: ModelShape
    weights_digest: str | None
    data_digest: str
    options: ScorerOptions
    versions: dict[str, str]


@dataclass(frozen=True)
class Candidates:
    """Trained scorers and what they are worth. Axes: L layers, V pieces held out."""

    scorers: dict[ScorerKind, Scorer]
    """Leading axes (L, G)."""
    errors: dict[ScorerKind, Tensor]
    """(RATIOS, L, V) error of merging (`MergeSample.error`), also for "none", the training-free score."""
    samples: int
    held_out: int

    def mean_errors(self, kind: ScorerKind) -> tuple[float, ...]:
        """Error for each of `RATIOS`, mean over layers and held-out pieces."""
        return tuple(self.errors[kind].mean((1, 2)).tolist())

    def best(self) -> ScorerKind:
        """The kind with the smallest error, relative to that of the training-free score; "none" if no other is smaller."""
        free = self.mean_errors("none")
        return min(self.errors, key=lambda kind: sum(e / f for e, f in zip(self.mean_errors(kind), free, strict=True)))


def split_pieces(documents: Sequence[list[int]], options: ScorerOptions) -> tuple[list[list[int]], list[list[int]]]:
    """Pieces of `scorer_tokens` tokens to train on and to hold out, `scorer_samples` together; no two overlap.

    The last fifth of each document, one piece at least, is for holding out.

    Raises:
        CalibrationError: no document is long enough for two pieces.
    """
    length = options.scorer_tokens
    places: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for document, tokens in enumerate(documents):
        count = len(tokens) // length
        last = count - max(1, count // HELD_OUT) if count > 1 else count
        for index in range(count):
            places[index >= last].append((document, index * length))
    if not places[1]:
        raise CalibrationError(
            f"the text is too short to train a scorer and to hold some out: no file has {2 * length} tokens. Give longer "
            f"files, a smaller --scorer-tokens, or --scorer none"
        )
    random = torch.Generator().manual_seed(options.seed)
    held_out = max(1, options.scorer_samples // HELD_OUT)
    chosen = []
    for of_kind, count in zip(places, (options.scorer_samples - held_out, held_out), strict=True):
        order = torch.randperm(len(of_kind), generator=random)[:count].tolist()
        chosen.append([documents[d][start : start + length] for d, start in (of_kind[i] for i in order)])
    return chosen[0], chosen[1]


def train_scorers(model: CapturedModel, documents: Sequence[list[int]], work: Work, folder: Path) -> Candidates:
    """Train the candidates, or what is left of it. Shows progress on the error stream.

    Args:
        documents: token ids.
        folder: that finished parts are kept in, until the caller removes it.

    Raises:
        CalibrationError: the text is too short, or the folder cannot be written or read.
    """
    training, held_out = split_pieces(documents, work.options)
    unfinished = UnfinishedWork(folder, work)
    pieces = [*training, *held_out]
    _read_pieces(model, pieces, piece_split(work.options.scorer_tokens), unfinished)
    layers = range(work.shape.num_layers)
    for layer in tqdm(layers, desc="scorer, training", unit="layer"):
        if not unfinished.has(_layer(layer)):
            samples = [_load_sample(unfinished, piece, layer) for piece in range(len(pieces))]
            found = _train_layer(samples[: len(training)], samples[len(training) :], work, layer)
            unfinished.save(_layer(layer), found)
    parts = [unfinished.load(_layer(layer)) for layer in layers]
    kinds = work.options.kinds
    names = [field.name for field in fields(Scorer)]
    scorers = {kind: Scorer(*(torch.stack([part[f"{kind}.{n}"] for part in parts]) for n in names)) for kind in kinds}
    errors = {kind: torch.stack([part[f"{kind}.errors"] for part in parts], 1) for kind in ("none", *kinds)}
    return Candidates(scorers, errors, len(training), len(held_out))


def _layer(layer: int) -> str:
    return f"layer-{layer:03}"


def _piece(piece: int) -> str:
    return f"piece-{piece:03}"


def _read_pieces(model: CapturedModel, pieces: Sequence[list[int]], split: SampleSplit, unfinished: UnfinishedWork) -> None:
    """Keep of each piece what training needs, layer by layer."""
    for index, tokens in enumerate(tqdm(pieces, desc="scorer, reading", unit="sample")):
        if unfinished.has(_piece(index)):
            continue
        found: dict[str, Tensor] = {}

        def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, found: dict[str, Tensor] = found) -> None:
            sample = cut(queries, keys, values, split)
            for field in fields(MergeSample):
                tensor = getattr(sample, field.name)
                # As models and servers keep them; the rest is a sum and stays exact.
                kept = tensor if field.name.startswith("rest") else tensor.bfloat16()
                found[f"{layer}.{field.name}"] = kept.contiguous().cpu()

        model.run(tokens, visit)
        unfinished.save(_piece(index), found)


def _load_sample(unfinished: UnfinishedWork, piece: int, layer: int) -> MergeSample:
    names = [f"{layer}.{field.name}" for field in fields(MergeSample)]
    return MergeSample(*(tensor.float() for tensor in unfinished.load(_piece(piece), names).values()))


def _train_layer(
    training: Sequence[MergeSample], held_out: Sequence[MergeSample], work: Work, layer: int
) -> dict[str, Tensor]:
    """Weights and held-out errors of the candidates for one layer."""
    scorers: dict[str, Scorer] = {}
    if "ridge" in work.options.kinds:
        scorers["ridge"] = fit_ridge(training)
    if "mlp" in work.options.kinds:
        scorers["mlp"] = train_mlp(training, hidden_units(work.shape), work.options.seed + layer)
    found: dict[str, Tensor] = {"none.errors": _errors(held_out, None)}
    for kind, scorer in scorers.items():
        found[f"{kind}.errors"] = _errors(held_out, scorer)
        found.update({f"{kind}.{field.name}": getattr(scorer, field.name).contiguous() for field in fields(Scorer)})
    return found


def _errors(samples: Sequence[MergeSample], scorer: Scorer | None) -> Tensor:
    """(RATIOS, V) error of merging."""
    scores = [importance(sample, scorer) for sample in samples]
    return torch.tensor([[merging_error(s, i, ratio) for s, i in zip(samples, scores, strict=True)] for ratio in RATIOS])
