"""Prometheus metrics of the cache. Needs no SGLang."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from stats_samples import cache_stats

from sglang_csa2.metrics import CacheMetrics
from sglang_csa2.turns import Turn

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 0}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> CacheMetrics:
    return CacheMetrics(LABELS, registry=registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    base = {key: str(text) for key, text in LABELS.items()}
    return registry.get_sample_value(f"sglang:csa2_{name}", {**base, **labels})


def test_first_reading_shows_every_series(registry: CollectorRegistry, metrics: CacheMetrics) -> None:
    metrics.update(cache_stats())
    assert value(registry, "arena_bytes") == 4096
    assert value(registry, "capacity_tokens") == 8192
    assert value(registry, "compression_ratio") == 1
    assert [value(registry, name) for name in ("documents", "pinned_pages", "pinned_bytes")] == [1, 2, 256]
    for name in ("used_bytes", "slab_bytes", "logical_tokens", "metadata_fraction"):
        assert value(registry, name) == 0
    for page_format in ("bf16", "fp8", "fp4"):
        assert value(registry, "pages", format=page_format) == 0
    for step in ("bf16->fp8", "bf16->fp4"):
        assert value(registry, "demotions_total", step=step) == 0
    for name in ("compactions_total", "evicted_tokens_total", "prefix_hit_tokens_total", "prompt_tokens_total"):
        assert value(registry, name) == 0
    for page_format in ("bf16", "fp8", "fp4"):
        assert value(registry, "prefix_hit_tokens_by_format_total", format=page_format) == 0
    for name in ("turns_total", "turn_prompt_tokens_count", "turn_cached_tokens_count"):
        assert value(registry, name) == 0


def test_gauges_hold_the_last_reading(registry: CollectorRegistry, metrics: CacheMetrics) -> None:
    metrics.update(cache_stats(used_bytes=5000, compression_ratio=3.5, pages={"bf16": 3, "fp8": 0, "fp4": 44}))
    metrics.update(cache_stats(used_bytes=100, compression_ratio=2.5, pages={"bf16": 1, "fp8": 0, "fp4": 2}))
    assert value(registry, "used_bytes") == 100
    assert value(registry, "compression_ratio") == 2.5
    assert value(registry, "pages", format="fp4") == 2


def test_counters_follow_the_totals(registry: CollectorRegistry, metrics: CacheMetrics) -> None:
    for total in (0, 40, 40, 100):
        metrics.update(cache_stats(prompt_tokens_total=total, demotions_total={"bf16->fp8": 0, "bf16->fp4": total}))
    assert value(registry, "prompt_tokens_total") == 100
    assert value(registry, "demotions_total", step="bf16->fp4") == 100
    assert value(registry, "demotions_total", step="bf16->fp8") == 0


def test_hits_are_counted_by_format(registry: CollectorRegistry, metrics: CacheMetrics) -> None:
    for tokens in (64, 64, 192):
        metrics.update(cache_stats(prefix_hit_tokens_by_format={"bf16": 64, "fp8": tokens, "fp4": 0}))
    hits = [value(registry, "prefix_hit_tokens_by_format_total", format=name) for name in ("bf16", "fp8", "fp4")]
    assert hits == [64, 192, 0]


def test_turns_fill_the_histograms(registry: CollectorRegistry, metrics: CacheMetrics) -> None:
    metrics.observe([Turn(70, 0, {}), Turn(1000, 960, {"fp8": 960})])
    metrics.observe([Turn(64, 0, {})])
    assert [value(registry, f"turn_{name}_tokens_sum") for name in ("prompt", "cached")] == [1134, 960]
    assert [value(registry, "turn_prompt_tokens_bucket", le=le) for le in ("64.0", "128.0", "1024.0", "+Inf")] == [
        1,
        2,
        3,
        3,
    ]


def test_each_replica_has_series_of_its_own(registry: CollectorRegistry) -> None:
    """As SGLang labels them: each scheduler process publishes its own, in a registry that all of them share."""
    CacheMetrics({**LABELS, "dp_rank": 1}, registry=registry).update(cache_stats(used_bytes=7))
    assert value(registry, "used_bytes", dp_rank="1") == 7
    assert value(registry, "used_bytes", dp_rank="0") is None


def test_total_that_was_reset_counts_on(registry: CollectorRegistry, metrics: CacheMetrics) -> None:
    for total in (100, 30):
        metrics.update(cache_stats(evicted_tokens_total=total))
    assert value(registry, "evicted_tokens_total") == 130


PUBLISH = """
import sys
sys.path[:0] = {folders!r}
from test_metrics import LABELS, CacheMetrics, cache_stats
assert "sglang" not in sys.modules
metrics = CacheMetrics(LABELS)
metrics.update(cache_stats(prompt_tokens_total=7))
metrics.update(cache_stats(prompt_tokens_total=9, used_bytes=5))
"""
SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_another_process_scrapes_them(tmp_path: Path) -> None:
    """As in a server: the scheduler publishes, the HTTP process answers /metrics."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    publish = PUBLISH.format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
    subprocess.run([sys.executable, "-c", publish], env=environment, check=True)
    command = [sys.executable, "-c", SCRAPE]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    labels = 'engine_type="unified",model_name="m",tp_rank="0"'
    assert f"sglang:csa2_prompt_tokens_total{{{labels}}} 9.0" in text
    assert f"sglang:csa2_used_bytes{{{labels}}} 5.0" in text
    assert 'step="bf16->fp4"' in text


def test_agreement_without_samples_is_not_a_number(registry: CollectorRegistry, metrics: CacheMetrics) -> None:
    metrics.update(cache_stats())
    assert math.isnan(value(registry, "guard_agreement") or 0)
    metrics.update(cache_stats(guard_agreement=0.97, guard_compared_total=100, guard_agreed_total=97))
    assert value(registry, "guard_agreement") == 0.97
    assert [value(registry, f"guard_{name}_total") for name in ("compared", "agreed", "skipped")] == [100, 97, 0]
