"""Log lines and metrics of the cache, at the times SGLang writes its own."""

import logging
from collections.abc import Callable
from typing import Any

from csa2.stats import CacheStats
from csa2.units import format_bytes
from sglang_csa2.metrics import CacheMetrics
from sglang_csa2.turns import format_turns_line, take_turns

logger = logging.getLogger(__name__)

_REPORT = "csa2_report"


def format_stats_line(stats: CacheStats) -> str:
    """The line beside SGLang's decode line. The arena counts by slabs: those are what a new page cannot have."""
    pages = ", ".join(f"{name} {count}" for name, count in stats.pages.items())
    return (
        f"csa2: #page {pages}, "
        f"arena {format_bytes(stats.slab_bytes)} of {format_bytes(stats.arena_bytes)} "
        f"({_percent(stats.slab_bytes, stats.arena_bytes):.0f} %), "
        f"ratio {stats.compression_ratio:.2f}x, "
        f"demoted {sum(stats.demotions_total.values())}, "
        f"evicted tokens {stats.evicted_tokens_total}, "
        f"hit rate {_percent(stats.prefix_hit_tokens_total, stats.prompt_tokens_total):.1f} %"
        f"{'' if stats.guard_agreement is None else f', agreement {100 * stats.guard_agreement:.0f} %'}"
    )


def format_start_line(stats: CacheStats) -> str:
    """The line at start: what the pool offers."""
    page_bytes = ", ".join(f"{name} {size}" for name, size in stats.page_bytes.items())
    return (
        f"csa2 pool ready, #token: {stats.capacity_tokens}, "
        f"page_bytes: {page_bytes}, arena: {format_bytes(stats.arena_bytes)}"
    )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


class CacheReport:
    """Reports the cache of one scheduler; reads statistics only when something is due.

    Args:
        scheduler: SGLang's scheduler, with its `metrics_reporter`.
        read: takes the scheduler, returns one reading.
        metrics: None when this rank exports no metrics.
    """

    def __init__(self, scheduler: Any, read: Callable[[Any], CacheStats], metrics: CacheMetrics | None) -> None:
        self._scheduler = scheduler
        self._reporter = scheduler.metrics_reporter
        self._read = read
        self._metrics = metrics
        self._published_at: float | None = None

    def start(self) -> None:
        """Write the start line and make every metric appear."""
        self._sglang_published()
        stats = self._read(self._scheduler)
        if self._reporter.is_stats_logging_rank:
            logger.info(format_start_line(stats))
        if self._metrics is not None:
            self._metrics.update(stats)

    def after_decode_batch(self) -> None:
        """Report if SGLang's decode line was due."""
        reporter = self._reporter
        # UPSTREAM(sglang 0.5.23: the condition of report_decode_stats for its own line)
        interval_is_over = reporter.forward_ct_decode % reporter.decode_log_interval == 0
        self._report(log=interval_is_over and reporter.is_stats_logging_rank)

    def after_prefill_batch(self, batch: Any) -> None:
        """Report the turns that began with a prefill batch beside SGLang's prefill line; publish metrics with its own."""
        turns = take_turns(batch) if batch is not None else []
        if turns and self._reporter.is_stats_logging_rank:
            logger.info(format_turns_line(turns))
        if self._metrics is not None:
            self._metrics.observe(turns)
        self._report(log=False)

    def after_idle_turn(self) -> None:
        """Publish metrics if SGLang just published its own."""
        self._report(log=False)

    def _report(self, log: bool) -> None:
        publish = self._sglang_published()
        if not (log or publish):
            return
        stats = self._read(self._scheduler)
        if log:
            logger.info(format_stats_line(stats))
        if publish and self._metrics is not None:
            self._metrics.update(stats)

    def _sglang_published(self) -> bool:
        """Whether SGLang published since the last look; its idle path decides by staleness and a 30 s clock."""
        if self._metrics is None:
            return False
        # UPSTREAM(sglang 0.5.23: SchedulerMetricsCollector.log_stats stamps last_log_time)
        last = self._reporter.metrics_collector.last_log_time
        published = bool(last != self._published_at)
        self._published_at = last
        return published


def attach(scheduler: Any) -> CacheReport:
    """Create the report of `scheduler`, write the start line, publish the first reading."""
    # Lazy: formatting needs neither the reader nor SGLang.
    from sglang_csa2.stats import read_stats

    reporter = scheduler.metrics_reporter
    metrics = None
    if reporter.current_scheduler_metrics_enabled:
        collector = reporter.metrics_collector
        # A collector class given by `stat_loggers` (Ray) brings its own gauges and counters.
        metrics = CacheMetrics(
            collector.labels,
            gauge_cls=getattr(collector, "_gauge_cls", None),
            counter_cls=getattr(collector, "_counter_cls", None),
            histogram_cls=getattr(collector, "_histogram_cls", None),
        )
    report = CacheReport(scheduler, read_stats, metrics)
    setattr(reporter, _REPORT, report)
    report.start()
    return report


def after_scheduler_init(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of `Scheduler.__init__`: start reporting when csa2 is on."""
    from sglang_csa2.args import enabled_here

    if enabled_here():
        attach(scheduler)


def after_report_decode_stats(_result: Any, reporter: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of `SchedulerMetricsReporter.report_decode_stats`, called for every decode batch."""
    report: CacheReport | None = getattr(reporter, _REPORT, None)
    if report is not None:
        report.after_decode_batch()


def after_report_prefill_stats(_result: Any, reporter: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of `SchedulerMetricsReporter.report_prefill_stats`, called for every prefill batch."""
    report: CacheReport | None = getattr(reporter, _REPORT, None)
    if report is not None:
        report.after_prefill_batch(batch)


def after_idle_metrics(_result: Any, reporter: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of `SchedulerMetricsReporter._maybe_log_idle_metrics`, called in every idle turn of the loop."""
    report: CacheReport | None = getattr(reporter, _REPORT, None)
    if report is not None:
        report.after_idle_turn()


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter."

HOOKS: tuple[tuple[str, Callable[..., None]], ...] = (
    (_SCHEDULER + "__init__", after_scheduler_init),
    (_REPORTER + "report_decode_stats", after_report_decode_stats),
    (_REPORTER + "report_prefill_stats", after_report_prefill_stats),
    (_REPORTER + "_maybe_log_idle_metrics", after_idle_metrics),
)
"""AFTER hooks, in the scheduler process."""
