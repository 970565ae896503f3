"""What the cache reports about itself. The same record feeds /csa2/stats, /metrics, the log line and `csa2 info`."""

from collections.abc import Sequence
from typing import Any

import msgspec


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the cache, taken between two batches.

    Bytes and pages are of one rank of each replica. `pages`, `demotions_total` and `prefix_hit_tokens_by_format` keep their
    keys from start to end, zero included.
    """

    arena_bytes: int
    """Bytes of the arena."""
    used_bytes: int
    """Bytes of the pages that hold tokens, metadata counted."""
    slab_bytes: int
    """Bytes of the slabs in use: `used_bytes` plus what slab granularity wastes."""
    pages: dict[str, int]
    """Pages in use by format."""
    page_bytes: dict[str, int]
    """Bytes of one page by format."""
    logical_tokens: int
    """Token slots of the pages in use."""
    capacity_tokens: int
    """Token slots that SGLang may hand out."""
    compression_ratio: float
    """Bytes the pages in use would take in bf16 over `used_bytes`; 1.0 when the cache is empty."""
    target_ratio: float
    """How much smaller than 4-bit pages old private pages are to be now."""
    live_bytes: int
    """Bytes of the pages that running requests read, that several requests have used, or that are pinned."""
    documents: int
    """Pinned documents: those in the book, encoded or not."""
    pinned_pages: int
    """Pages of encoded documents; one that two of them share counts once."""
    pinned_bytes: int
    """Bytes of those pages now."""
    metadata_fraction: float
    """Share of scales, means and padding in `used_bytes`."""
    demotions_total: dict[str, int]
    """Pages re-encoded since the start, by step: "bf16->fp4"."""
    compactions_total: int
    """Pages moved to empty sparse slabs since the start."""
    evicted_tokens_total: int
    """Tokens dropped from the radix tree for memory since the start."""
    turns_total: int
    """Requests that started their prefill since the start, each counted once; encoding of documents left out."""
    prompt_tokens_total: int
    """Prompt tokens of these."""
    prefix_hit_tokens_total: int
    """Prompt tokens of these that were found in the cache."""
    prefix_hit_tokens_by_format: dict[str, int]
    """The same by the format that their pages had then."""
    ratio_ceiling: float
    """Largest `target_ratio` that memory alone may ask for; less than 8 after the agreement guard backed off."""
    guard_compared_total: int
    """Samples of the agreement guard since the start; 0 without `--csa2-guard`."""
    guard_agreed_total: int
    """Those that agreed."""
    guard_skipped_total: int
    """Samples left out because memory was short or somebody waited."""
    guard_backoffs_total: int
    """Windows of samples of which too few agreed."""
    guard_agreement: float | None
    """Share of the last 100 samples that agreed, of fewer in the beginning; None without any."""
    identity_basis_layers: list[int]
    """Layers with a surviving key bias, stored without the Hadamard basis."""
    weight_copy_bytes: int
    """Bytes of weights held twice, see `--csa2-pack-weights`."""
    options: dict[str, str | int | float | None]
    """Resolved options."""
    replicas: list["CacheStats"] = []
    """Readings of the single replicas, with --dp-size only; the fields above are then of all of them."""


SUMMED = (
    "arena_bytes",
    "used_bytes",
    "slab_bytes",
    "pages",
    "logical_tokens",
    "capacity_tokens",
    "live_bytes",
    "pinned_pages",
    "pinned_bytes",
    "demotions_total",
    "compactions_total",
    "evicted_tokens_total",
    "prefix_hit_tokens_total",
    "prefix_hit_tokens_by_format",
    "prompt_tokens_total",
    "turns_total",
    "guard_compared_total",
    "guard_agreed_total",
    "guard_skipped_total",
    "guard_backoffs_total",
    "weight_copy_bytes",
)
LARGEST = ("target_ratio", "documents")
"""Targets may differ for a while; documents are in every replica."""
SMALLEST = ("ratio_ceiling", "guard_agreement")
"""That of the replica that the agreement guard found worst; None only where no replica has any."""
WEIGHTED = ("compression_ratio", "metadata_fraction")
"""By the bytes used."""
EQUAL = ("page_bytes", "identity_basis_layers", "options")
"""Replicas hold the same heads and were started with the same options."""


def combined_stats(readings: Sequence[CacheStats]) -> CacheStats:
    """The readings of all replicas as one; at least one."""

    def values(name: str) -> list[Any]:
        return [getattr(reading, name) for reading in readings]

    used = sum(values("used_bytes"))
    weights = [reading.used_bytes / used if used else 1 / len(readings) for reading in readings]
    fields: dict[str, Any] = {
        **{name: _sum(values(name)) for name in SUMMED},
        **{name: max(values(name)) for name in LARGEST},
        **{name: min((v for v in values(name) if v is not None), default=None) for name in SMALLEST},
        **{name: sum(w * v for w, v in zip(weights, values(name), strict=True)) for name in WEIGHTED},
        **{name: values(name)[0] for name in EQUAL},
    }
    return CacheStats(**fields, replicas=list(readings))


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: sum(value[key] for value in values) for key in values[0]}
    return sum(values)
