"""A reading of the cache for tests."""

from typing import Any

from csa2.stats import CacheStats


def cache_stats(**changes: Any) -> CacheStats:
    """That of an empty cache, but for `changes`."""
    fields: dict[str, Any] = {
        "arena_bytes": 4096,
        "used_bytes": 0,
        "slab_bytes": 0,
        "pages": {"bf16": 0, "fp8": 0, "fp4": 0},
        "page_bytes": {"bf16": 400, "fp8": 200, "fp4": 100},
        "logical_tokens": 0,
        "capacity_tokens": 8192,
        "compression_ratio": 1.0,
        "metadata_fraction": 0.0,
        "demotions_total": {"bf16->fp8": 0, "bf16->fp4": 0},
        "compactions_total": 0,
        "evicted_tokens_total": 0,
        "prefix_hit_tokens_total": 0,
        "prompt_tokens_total": 0,
        "turns_total": 0,
        "prefix_hit_tokens_by_format": {"bf16": 0, "fp8": 0, "fp4": 0},
        "target_ratio": 1.0,
        "live_bytes": 512,
        "documents": 1,
        "pinned_pages": 2,
        "pinned_bytes": 256,
        "identity_basis_layers": [],
        "ratio_ceiling": 8.0,
        "guard_compared_total": 0,
        "guard_agreed_total": 0,
        "guard_skipped_total": 0,
        "guard_backoffs_total": 0,
        "guard_agreement": None,
        "weight_copy_bytes": 0,
        "options": {},
    }
    return CacheStats(**{**fields, **changes})
