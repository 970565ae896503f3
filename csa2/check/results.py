"""The figures of one format, computed from what both engines said."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from csa2.check.formats import row_name, split_name
from csa2.check.metrics import (
    Floats,
    TokenScores,
    agreements,
    copied,
    divergence_nats,
    loss_by_position,
    nll_differences,
    percent,
    perplexity_increase_pct,
)


@dataclass(frozen=True)
class Measured:
    """What one engine said about all documents."""

    scores: tuple[TokenScores, ...]
    """One per document."""
    copies: tuple[TokenScores, ...]
    """One per repeated passage, of all documents."""
    stats: tuple[dict[str, object], ...] = ()
    """Statistics of the compressed cache after each document was scored; empty for the full cache."""


class DocumentResult(msgspec.Struct, frozen=True, kw_only=True):
    """One document's share in a row."""

    document: str
    ppl_increase_pct: float
    kl_nats: float
    top1_agreement_pct: float


class FormatResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the report. Per cent are of 100, bytes of bf16, divergences in nats."""

    format: str
    variant: str
    """How pages hold keys: as `--csa2-rope` of the engine says."""
    bytes_fraction_compressed: float
    """Bytes of a page in this format over those of a bf16 page."""
    bytes_fraction_total: float
    """Bytes of all pages of a scored document over bf16: windows, first page and metadata counted."""
    ppl_increase_pct: float
    ppl_se_pct: float | None
    """None where a single block leaves nothing to estimate it from."""
    ppl_se_blocks: str
    """What was taken as independent."""
    kl_nats: float
    top1_agreement_pct: float
    copy_recall_pct: float | None
    """Tokens of repeated passages that are the most likely ones; None without passages."""
    copy_recall_full_pct: float | None
    """The same with the full cache."""
    loss_nats_by_position: list[float]
    """Mean of (-log p) - (-log p of the full cache), per 64 scored tokens."""
    kl_nats_by_position: list[float]
    documents: list[DocumentResult]

    @property
    def name(self) -> str:
        """What the row is called: the format, and the variant if it is not the default."""
        return row_name(self.format, self.variant)

    @property
    def copy_recall_of_full_pct(self) -> float | None:
        """Recall with the full cache's as 100."""
        if self.copy_recall_pct is None or not self.copy_recall_full_pct:
            return None
        return 100 * self.copy_recall_pct / self.copy_recall_full_pct


def make_result(name: str, documents: Sequence[str], full: Measured, packed: Measured) -> FormatResult:
    """The row called `name` over `documents`.

    Raises:
        CheckError: the two engines scored different tokens.
    """
    pairs = list(zip(full.scores, packed.scores, strict=True))
    losses = [nll_differences(a, b) for a, b in pairs]
    divergences = [divergence_nats(a, b) for a, b in pairs]
    same = [agreements(a, b) for a, b in pairs]
    increase = perplexity_increase_pct(losses)
    page_format, variant = split_name(name)
    compressed, total = byte_fractions(page_format, packed.stats)
    return FormatResult(
        format=page_format,
        variant=variant,
        bytes_fraction_compressed=compressed,
        bytes_fraction_total=total,
        ppl_increase_pct=increase.value,
        ppl_se_pct=None if np.isnan(increase.standard_error) else increase.standard_error,
        ppl_se_blocks=increase.blocks,
        kl_nats=float(np.concatenate(divergences).mean()),
        top1_agreement_pct=percent(same),
        copy_recall_pct=_recall(packed),
        copy_recall_full_pct=_recall(full),
        loss_nats_by_position=loss_by_position(losses).tolist(),
        kl_nats_by_position=loss_by_position(divergences).tolist(),
        documents=[
            DocumentResult(
                document=documents[i],
                ppl_increase_pct=100 * float(np.expm1(losses[i].mean())),
                kl_nats=float(divergences[i].mean()),
                top1_agreement_pct=percent([same[i]]),
            )
            for i in range(len(documents))
        ],
    )


def byte_fractions(name: str, stats: Sequence[dict[str, object]]) -> tuple[float, float]:
    """Stored bytes over bf16: of a page in format `name`, and of all pages in use, from readings of /csa2/stats.

    Sizes and counts are the cache's own. Pages in the model dtype count as bf16 where that is fp32.
    """
    sizes = [{key: float(size) for key, size in _table(reading, "page_bytes").items()} for reading in stats]
    counts = [_table(reading, "pages") for reading in stats]
    plain_name = next(iter(sizes[0]))
    plain = sizes[0][plain_name] / (2 if plain_name == "fp32" else 1)
    for size in sizes:
        size[plain_name] = plain
    used = sum(count * size[key] for size, pages in zip(sizes, counts, strict=True) for key, count in pages.items())
    pages_in_use = sum(sum(pages.values()) for pages in counts)
    own = sizes[0][plain_name if name == "bf16" else name]
    return own / plain, used / (pages_in_use * plain)


def _table(reading: dict[str, object], key: str) -> dict[str, int]:
    return msgspec.convert(reading[key], dict[str, int])


def _recall(measured: Measured) -> float | None:
    return percent([copied(scores) for scores in measured.copies]) if measured.copies else None


def perplexity(scores: Sequence[TokenScores]) -> float:
    """Perplexity over all scored tokens."""
    values: Floats = np.concatenate([each.logprobs for each in scores])
    return float(np.exp(-values.mean()))
