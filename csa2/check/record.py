"""Everything a check finds, as one record: what is printed, drawn and written as JSON comes from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from csa2 import __version__
from csa2.check.disagreements import Decode, Disagreement, first_disagreements
from csa2.check.prompts import Protocol
from csa2.check.results import FormatResult, Measured, make_result, perplexity

DISAGREEMENTS = 3
"""Reported of each document."""


class DocumentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A measured document; `sha256` is of its file."""

    name: str
    tokens: int
    sha256: str


class Record(msgspec.Struct, kw_only=True):
    """The JSON of a check."""

    version: str
    model: str
    dtype: str
    protocol: Protocol
    documents: list[DocumentEntry]
    environment: dict[str, Any]
    perplexity_full: float | None = None
    """Perplexity of the scored tokens with the full cache."""
    results: list[FormatResult] = []
    loss_by_layer: dict[str, list[float]] = {}
    """Relative error of the attention output of each layer, by format; inputs exact, on the first document."""
    disagreements: dict[str, list[Disagreement]] = {}
    """The first of each document, by format."""
    engines: dict[str, dict[str, Any]] = {}
    """Server arguments, by format."""
    cache: dict[str, dict[str, Any]] = {}
    """Statistics of the compressed cache after the last document, by format."""

    @property
    def identity_layers(self) -> list[int]:
        """Layers with a surviving key bias, as the engines report them."""
        for cache in self.cache.values():
            return msgspec.convert(cache["identity_basis_layers"], list[int])
        return []

    def add(
        self, name: str, full: Measured, packed: Measured, documents: Sequence[Sequence[int]], decode: Decode
    ) -> FormatResult:
        """Compute and keep the row called `name`. `documents` are token ids, in the order of the entries."""
        names = [entry.name for entry in self.documents]
        row = make_result(name, names, full, packed)
        self.perplexity_full = perplexity(full.scores)
        self.results.append(row)
        self.cache[name] = dict(packed.stats[-1])
        self.disagreements[name] = [
            found
            for i, document in enumerate(documents)
            for found in first_disagreements(
                names[i],
                document,
                full.scores[i],
                packed.scores[i],
                # The first scored token is the second after the context, see `sglang_csa2.check_engine`.
                first_position=self.protocol.context + 1,
                decode=decode,
                limit=DISAGREEMENTS,
            )
        ]
        return row


def start_record(protocol: Protocol, model: str, dtype: str, documents: Sequence[DocumentEntry]) -> Record:
    """A record of this machine and installation without results."""
    from csa2.info import machine, versions

    environment = {"versions": versions(), "machine": machine()}
    return Record(
        version=__version__, model=model, dtype=dtype, protocol=protocol, documents=list(documents), environment=environment
    )


def write_json(record: Record, path: Path | None) -> None:
    """Write the record to `path`, if there is one."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
