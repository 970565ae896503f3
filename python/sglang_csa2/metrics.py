"""The statistics of the cache as Prometheus metrics, beside SGLang's own under /metrics."""

import math
from collections.abc import Iterable
from typing import Any

from csa2.stats import CacheStats
from sglang_csa2.turns import Turn

PREFIX = "sglang:csa2_"

GAUGES = {
    "arena_bytes": "Bytes of the arena of the compressed KV cache.",
    "used_bytes": "Bytes of the pages that hold tokens, metadata counted.",
    "slab_bytes": "Bytes of the slabs in use, used bytes plus the waste of slab granularity.",
    "logical_tokens": "Token slots of the pages in use.",
    "capacity_tokens": "Token slots that the scheduler may hand out.",
    "compression_ratio": "Bytes of the pages in use in bf16 over the bytes used; 1 when the cache is empty.",
    "target_ratio": "How much smaller than 4-bit pages old private pages are to be.",
    "live_bytes": "Bytes of the pages that are read now, that several requests have used, or that are pinned.",
    "ratio_ceiling": "Largest target ratio that memory alone may ask for.",
    "guard_agreement": "Share of the last samples of the agreement guard that agreed; NaN without any.",
    "documents": "Pinned documents.",
    "pinned_pages": "Pages of pinned documents.",
    "pinned_bytes": "Bytes of the pages of pinned documents.",
    "metadata_fraction": "Share of scales and means in the bytes used.",
}
COUNTERS = {
    "compactions_total": "Pages moved to empty sparse slabs.",
    "evicted_tokens_total": "Tokens dropped from the radix tree for memory.",
    "prefix_hit_tokens_total": "Prompt tokens found in the cache.",
    "prompt_tokens_total": "Prompt tokens of requests that started.",
    "guard_compared_total": "Samples of the agreement guard.",
    "guard_agreed_total": "Samples of the agreement guard that agreed.",
    "guard_skipped_total": "Samples of the agreement guard left out for others.",
    "guard_backoffs_total": "Windows of samples of which too few agreed.",
    "turns_total": "Requests that started, each counted once.",
}
"""Keys of both are fields of CacheStats and names of metrics."""
TURN_TOKENS = tuple(2**power for power in range(6, 18))
"""Upper ends of the buckets of tokens of a turn; the first is a page."""


class CacheMetrics:
    """Gauges, counters and histograms of one scheduler process.

    Args:
        labels: base labels, those of SGLang's scheduler metrics.
        gauge_cls, counter_cls, histogram_cls: classes with the interface of prometheus_client, which is the default.
        options: further keyword arguments of every metric, such as `registry`.
    """

    def __init__(
        self,
        labels: dict[str, Any],
        gauge_cls: Any = None,
        counter_cls: Any = None,
        histogram_cls: Any = None,
        **options: Any,
    ) -> None:
        # prometheus_client chooses its storage on import, by the PROMETHEUS_MULTIPROC_DIR that the launcher sets.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = labels
        names = list(labels)
        gauge_cls = gauge_cls or Gauge
        counter_cls = counter_cls or Counter
        histogram_cls = histogram_cls or Histogram

        def gauge(name: str, text: str, *extra: str) -> Any:
            options_of_gauge = {**options, "multiprocess_mode": "mostrecent"}
            return gauge_cls(name=PREFIX + name, documentation=text, labelnames=[*names, *extra], **options_of_gauge)

        def counter(name: str, text: str, *extra: str) -> Any:
            return counter_cls(name=PREFIX + name, documentation=text, labelnames=[*names, *extra], **options)

        def histogram(name: str, text: str) -> Any:
            return histogram_cls(name=PREFIX + name, documentation=text, labelnames=names, buckets=TURN_TOKENS, **options)

        self._gauges = {name: gauge(name, text) for name, text in GAUGES.items()}
        self._pages = gauge("pages", "KV pages in use by format.", "format")
        self._counters = {name: counter(name, text) for name, text in COUNTERS.items()}
        self._demotions = counter("demotions_total", "Pages re-encoded to a smaller format, by step.", "step")
        self._hits = counter("prefix_hit_tokens_by_format_total", "Prompt tokens found in the cache by format.", "format")
        self._turn_prompt = histogram("turn_prompt_tokens", "Prompt tokens of a request that started.")
        self._turn_cached = histogram("turn_cached_tokens", "Prompt tokens of a request that were found in the cache.")
        self._read: dict[tuple[str, str], int] = {}

    def update(self, stats: CacheStats) -> None:
        """Publish one reading. The first one makes every series appear, zeros included."""
        for histogram in (self._turn_prompt, self._turn_cached):
            histogram.labels(**self._labels)
        for name, metric in self._gauges.items():
            value = getattr(stats, name)
            metric.labels(**self._labels).set(math.nan if value is None else value)
        for page_format, num_pages in stats.pages.items():
            self._pages.labels(**self._labels, format=page_format).set(num_pages)
        for name, metric in self._counters.items():
            metric.labels(**self._labels).inc(self._advance(name, "", getattr(stats, name)))
        for step, num_pages in stats.demotions_total.items():
            advance = self._advance("demotions_total", step, num_pages)
            self._demotions.labels(**self._labels, step=step).inc(advance)
        for page_format, tokens in stats.prefix_hit_tokens_by_format.items():
            advance = self._advance("prefix_hit_tokens_by_format", page_format, tokens)
            self._hits.labels(**self._labels, format=page_format).inc(advance)

    def observe(self, turns: Iterable[Turn]) -> None:
        """Count turns into the histograms."""
        for turn in turns:
            self._turn_prompt.labels(**self._labels).observe(turn.prompt_tokens)
            self._turn_cached.labels(**self._labels).observe(turn.cached_tokens)

    def _advance(self, name: str, label: str, total: int) -> int:
        """What `total` adds to the last reading. A total that fell was reset and counts from 0, as in Prometheus."""
        last = self._read.get((name, label), 0)
        self._read[name, label] = total
        return total - last if total >= last else total
