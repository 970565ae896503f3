"""When the cache is reported, and what the lines say. Needs no SGLang."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from stats_samples import cache_stats

from csa2.stats import CacheStats
from sglang_csa2 import decode_log
from sglang_csa2.turns import TURN, Turn

STATS = cache_stats(
    arena_bytes=46976205,
    used_bytes=12000000,
    slab_bytes=12897485,
    pages={"bf16": 3, "fp8": 0, "fp4": 44},
    page_bytes={"bf16": 737280, "fp8": 380160, "fp4": 195840},
    logical_tokens=3008,
    compression_ratio=3.049,
    metadata_fraction=0.1,
    demotions_total={"bf16->fp8": 4, "bf16->fp4": 40},
    prefix_hit_tokens_total=12,
    prompt_tokens_total=100,
    turns_total=3,
    prefix_hit_tokens_by_format={"bf16": 12, "fp8": 0, "fp4": 0},
)


class FakeMetrics:
    """Stands in for CacheMetrics."""

    def __init__(self, labels: dict[str, Any], gauge_cls: Any, counter_cls: Any, histogram_cls: Any) -> None:
        self.labels = labels
        self.readings: list[CacheStats] = []
        self.turns: list[Turn] = []

    def update(self, stats: CacheStats) -> None:
        self.readings.append(stats)

    def observe(self, turns: list[Turn]) -> None:
        self.turns += turns


class FakeReporter:
    """What `decode_log` uses of SGLang's SchedulerMetricsReporter."""

    def __init__(self, metrics_enabled: bool, is_stats_logging_rank: bool = True) -> None:
        self.current_scheduler_metrics_enabled = metrics_enabled
        self.is_stats_logging_rank = is_stats_logging_rank
        self.metrics_collector = SimpleNamespace(last_log_time=0.0, labels={"tp_rank": 0}) if metrics_enabled else None
        self.forward_ct_decode = 0
        self.decode_log_interval = 4

    def report_decode_stats(self) -> None:
        self.forward_ct_decode += 1
        if self.forward_ct_decode % self.decode_log_interval == 0:
            self.log_stats()
        decode_log.after_report_decode_stats(None, self, False, running_batch=None)

    def report_prefill_stats(self, batch: Any = None) -> None:
        self.log_stats()
        decode_log.after_report_prefill_stats(None, self, batch=batch, prefill_stats=None)

    def idle_turn(self, due: bool) -> None:
        if due:
            self.log_stats()
        decode_log.after_idle_metrics(None, self)

    def log_stats(self) -> None:
        if self.metrics_collector is not None:
            self.metrics_collector.last_log_time += 1.0


class Reads:
    """Counts readings."""

    count = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Reads:
    reads = Reads()

    def read_stats(scheduler: Any) -> CacheStats:
        reads.count += 1
        return STATS

    module: Any = ModuleType("sglang_csa2.stats")
    module.read_stats = read_stats
    monkeypatch.setitem(sys.modules, "sglang_csa2.stats", module)
    monkeypatch.setattr(decode_log, "CacheMetrics", FakeMetrics)
    caplog.set_level(logging.INFO)
    return reads


def start(reporter: FakeReporter) -> FakeMetrics:
    report = decode_log.attach(SimpleNamespace(metrics_reporter=reporter))
    metrics: Any = report._metrics
    return metrics


def test_stats_line() -> None:
    assert decode_log.format_stats_line(STATS) == (
        "csa2: #page bf16 3, fp8 0, fp4 44, arena 12.3 MiB of 44.8 MiB (27 %), ratio 3.05x, "
        "demoted 44, evicted tokens 0, hit rate 12.0 %"
    )


def test_stats_line_with_a_guard() -> None:
    line = decode_log.format_stats_line(msgspec.structs.replace(STATS, guard_agreement=0.98))
    assert line == decode_log.format_stats_line(STATS) + ", agreement 98 %"


def test_start_line() -> None:
    assert decode_log.format_start_line(STATS) == (
        "csa2 pool ready, #token: 8192, page_bytes: bf16 737280, fp8 380160, fp4 195840, arena: 44.8 MiB"
    )


def test_start_writes_a_line_and_a_first_reading(reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    metrics = start(FakeReporter(metrics_enabled=True))
    assert (reads.count, metrics.readings, metrics.labels) == (1, [STATS], {"tp_rank": 0})
    assert [record.message for record in caplog.records] == [decode_log.format_start_line(STATS)]


def test_decode_line_has_the_interval_of_sglang(reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    reporter = FakeReporter(metrics_enabled=False)
    start(reporter)
    caplog.clear()
    for _ in range(9):
        reporter.report_decode_stats()
    assert [record.message for record in caplog.records] == [decode_log.format_stats_line(STATS)] * 2
    assert reads.count == 3


def test_line_and_metrics_share_one_reading(reads: Reads) -> None:
    reporter = FakeReporter(metrics_enabled=True)
    metrics = start(reporter)
    for _ in range(8):
        reporter.report_decode_stats()
    assert (reads.count, len(metrics.readings)) == (3, 3)


def test_metrics_follow_prefill_and_due_idle_turns(reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    reporter = FakeReporter(metrics_enabled=True)
    metrics = start(reporter)
    caplog.clear()
    reporter.report_prefill_stats()
    for turn in range(100):
        reporter.idle_turn(due=turn == 50)
    assert (reads.count, len(metrics.readings)) == (3, 3)
    assert caplog.records == []


def test_without_metrics_prefill_and_idle_read_nothing(reads: Reads) -> None:
    reporter = FakeReporter(metrics_enabled=False)
    start(reporter)
    reporter.report_prefill_stats()
    reporter.idle_turn(due=True)
    assert reads.count == 1


TURNS = (Turn(1000, 896, {"bf16": 64, "fp8": 832}), Turn(600, 64, {"bf16": 64}), Turn(40, 0, {}))


def batch_of(*turns: Turn | None) -> Any:
    """A batch of requests, some of which started with it."""
    return SimpleNamespace(reqs=[SimpleNamespace(**({} if turn is None else {TURN: turn})) for turn in turns])


def test_turns_line() -> None:
    assert decode_log.format_turns_line(list(TURNS)) == (
        "csa2: #turn 3, prompt tokens 1640, cached tokens 960 (bf16 128, fp8 832), hit rate 58.5 %"
    )
    assert decode_log.format_turns_line([TURNS[2]]) == "csa2: #turn 1, prompt tokens 40, cached tokens 0, hit rate 0.0 %"


def test_turns_are_reported_once_beside_the_prefill_line(reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    reporter = FakeReporter(metrics_enabled=True)
    metrics = start(reporter)
    caplog.clear()
    batch = batch_of(TURNS[0], None, TURNS[1])
    for _ in range(3):  # chunks
        reporter.report_prefill_stats(batch)
    assert metrics.turns == [TURNS[0], TURNS[1]]
    assert [record.message for record in caplog.records] == [decode_log.format_turns_line([TURNS[0], TURNS[1]])]


def test_other_ranks_write_no_lines(reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    reporter = FakeReporter(metrics_enabled=False, is_stats_logging_rank=False)
    start(reporter)
    reporter.report_prefill_stats(batch_of(TURNS[0]))
    for _ in range(8):
        reporter.report_decode_stats()
    assert caplog.records == []


@pytest.mark.parametrize("enabled", [True, False])
def test_without_csa2_nothing_is_attached(reads: Reads, monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    module: Any = ModuleType("sglang_csa2.args")
    module.enabled_here = lambda: enabled
    monkeypatch.setitem(sys.modules, "sglang_csa2.args", module)
    reporter = FakeReporter(metrics_enabled=False)
    decode_log.after_scheduler_init(None, SimpleNamespace(metrics_reporter=reporter), 1, key=2)
    for _ in range(4):
        reporter.report_decode_stats()
    assert reads.count == (2 if enabled else 0)
