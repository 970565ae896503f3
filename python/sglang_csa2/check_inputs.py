"""What a check needs before any engine starts: the model's facts, the documents as tokens, places to write to."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csa2.calibrate.artefact import check_model, load
from csa2.check.errors import CheckError
from csa2.check.prompts import Protocol
from csa2.check.record import DocumentEntry
from csa2.options import CacheOptions, RopeVariant

CHARACTERS_PER_TOKEN = 16
"""More than any tokenizer packs into a token of running text: what is read of a longer file."""


@dataclass(frozen=True)
class ModelFacts:
    """What sizes an engine.

    Attributes:
        window_tokens: longest sequence the model takes.
        token_bytes: KV bytes of one token in the model dtype.
    """

    window_tokens: int
    token_bytes: int


@dataclass(frozen=True)
class TokenizedDocument:
    """One file as the model reads it."""

    name: str
    tokens: tuple[int, ...]
    sha256: str
    """Of the whole file."""


@dataclass(frozen=True)
class Inputs:
    """All that a check works on."""

    protocol: Protocol
    formats: tuple[str, ...]
    """Names of the rows, see `csa2.check.formats`."""
    tokenizer: Any
    documents: tuple[TokenizedDocument, ...]
    facts: ModelFacts

    @property
    def entries(self) -> list[DocumentEntry]:
        """The documents as the record names them."""
        return [DocumentEntry(name=each.name, tokens=len(each.tokens), sha256=each.sha256) for each in self.documents]


def check_agreement(percent: float) -> None:
    """Raises CheckError: `percent` is none."""
    if not 0 <= percent <= 100:
        raise CheckError(f"--min-agreement {percent:g} is no percentage: give a number from 0 to 100")


def check_impl(variant: str, impl: str) -> None:
    """Raises CheckError: the implementation that is asked for cannot serve the variant."""
    if variant == "separated" and impl not in ("auto", "reference"):
        raise CheckError(
            f"--csa2-impl {impl} does not read pages of --variant separated: leave --csa2-impl out; both variants are then "
            f"measured with the torch reference"
        )


def stay_offline() -> None:
    """Keep Hugging Face libraries, here and in child processes, from asking the network about a local model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"


def check_folder(model: Path) -> None:
    """Raises CheckError: `model` is no model folder."""
    if not model.is_dir():
        raise CheckError(f"--model {model} is not a folder: give the folder of a model; `csa2 demo-model` prints one")
    if not (model / "config.json").is_file():
        raise CheckError(f"--model {model} holds no config.json: give a folder in the format of Hugging Face")


def check_target(option: str, path: Path | None) -> None:
    """Raises CheckError: a file could not be written to `path`."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise CheckError(f"{option} {path} is a folder: give the name of a file")
    if not folder.is_dir():
        raise CheckError(f"{option} {path} cannot be written: there is no folder {folder}. Make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CheckError(f"{option} {path} cannot be written: permission denied. Choose another place")


def check_calibration(folder: Path | None, model: Path) -> None:
    """Raises CalibrationError: the calibration in `folder` cannot be read, or is of another model."""
    if folder is not None:
        check_model(load(folder), model, source=str(folder))


def read_model(model: Path, dtype: str, variant: RopeVariant = "rotated") -> ModelFacts:
    """Facts of the model, once it is known that it can be measured.

    Raises:
        CheckError: its configuration cannot be read.
        UnsupportedModelError: its cache cannot be compressed.
        OptionError: its keys cannot be separated from their positions, as `variant` asks.
    """
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_csa2 import refusals
    from sglang_csa2.rope import check_rope

    try:
        config: Any = ModelConfig(str(model), dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise CheckError(
            f"--model {model} cannot be read ({_one_line(error)}): give a model that this SGLang serves"
        ) from error
    refusals.check_model(config)
    check_rope(CacheOptions(rope=variant), config)
    heads = int(config.get_num_kv_heads(1))
    return ModelFacts(
        int(config.context_len), 2 * int(config.num_hidden_layers) * heads * int(config.head_dim) * config.dtype.itemsize
    )


def check_window(facts: ModelFacts, protocol: Protocol) -> None:
    """Raises CheckError: the longest request is longer than the model takes."""
    if protocol.longest_prompt > facts.window_tokens:
        raise CheckError(
            f"--context {protocol.context} with --score-tokens {protocol.score_tokens} needs {protocol.longest_prompt} "
            f"tokens, but the model takes {facts.window_tokens}: lower --context or --score-tokens"
        )


def load_tokenizer(model: Path) -> Any:
    """The tokenizer in `model`. Raises CheckError: there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckError(
            f"--model {model} has no readable tokenizer ({_one_line(error)}): put its files into the folder"
        ) from error


def read_documents(paths: Sequence[Path], tokenizer: Any, protocol: Protocol) -> tuple[TokenizedDocument, ...]:
    """Every file as tokens, cut to what is measured.

    Raises:
        CheckError: a file cannot be read, is too short, or is given twice.
    """
    documents: list[TokenizedDocument] = []
    for path in paths:
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8")
        except OSError as error:
            raise CheckError(f"--text {path} cannot be read ({error.strerror}): give text files") from error
        except UnicodeDecodeError as error:
            raise CheckError(f"--text {path} is not UTF-8 ({error.reason} at byte {error.start}): convert it") from error
        cut = text[: CHARACTERS_PER_TOKEN * protocol.document_tokens]
        tokens = tokenizer(cut, verbose=False)["input_ids"][: protocol.document_tokens]
        if len(tokens) < protocol.document_tokens:
            raise CheckError(
                f"--text {path} has {len(tokens)} tokens, {protocol.document_tokens} are needed (--context, --score-tokens "
                f"and one): give a longer text, or lower --context"
            )
        digest = hashlib.sha256(raw).hexdigest()
        twin = next((each for each in documents if each.sha256 == digest), None)
        if twin is not None:
            raise CheckError(f"--text {path} has the same content as {twin.name}: each document must count once")
        documents.append(TokenizedDocument(path.stem, tuple(tokens), digest))
    return tuple(documents)


def conditions(options: dict[str, Any], documents: Sequence[TokenizedDocument], protocol: Protocol) -> dict[str, Any]:
    """All that scores of an engine started with `options` depend on, as JSON-able values."""
    from csa2.info import versions

    model = Path(options["model_path"])
    return {
        "protocol": dataclasses.asdict(protocol),
        "documents": [document.sha256 for document in documents],
        # Sizes stand for the weights: reading them all would take as long as measuring.
        "model": {path.name: path.stat().st_size for path in sorted(model.iterdir()) if path.is_file()},
        "dtype": options["dtype"],
        "device": options.get("device"),
        "software": {name: versions()[name] for name in ("sglang", "torch")},
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
