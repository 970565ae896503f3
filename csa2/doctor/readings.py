"""What the doctor knows of a server: two readings of its numbers, how it was started, what lies beside it."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from csa2.doctor.metrics import Mean, Metrics, histogram_mean

Json = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """One reading of /v1/loads, all ranks together."""

    running: int = 0
    waiting: int = 0
    retracted: int = 0
    """Requests that lost their pages and wait to get some again."""
    limit: int = 0
    """Requests that may run at once."""
    steps: float = 0.0
    """Decode steps since the start, those that SGLang times."""
    batch_sum: float = 0.0
    """Requests of these steps, added up."""
    tokens: float = 0.0
    """Tokens generated in them."""
    busy_us: float = 0.0
    """Time of them and of all prefills."""

    @classmethod
    def of(cls, answer: Json) -> "Load":
        """From the JSON of the route."""
        loads = answer.get("loads", [])

        def total(name: str) -> Any:
            return sum(load.get(name) or 0 for load in loads)

        queues = [load.get("queues") or {} for load in loads]
        # UPSTREAM(sglang 0.5.23: sums over decode steps of 1, batch, microseconds, batch^2, batch x microseconds, tokens)
        moments = [load.get("decode_moments") or [0.0] * 6 for load in loads]
        return cls(
            running=total("num_running_reqs"),
            waiting=total("num_waiting_reqs"),
            retracted=sum(queue.get("retracted") or 0 for queue in queues),
            limit=total("max_running_requests"),
            steps=sum(moment[0] for moment in moments),
            batch_sum=sum(moment[1] for moment in moments),
            tokens=sum(moment[5] for moment in moments),
            busy_us=sum(moment[2] for moment in moments) + total("total_prefill_busy_us"),
        )


@dataclass(frozen=True)
class Pace:
    """How fast tokens were generated between two readings."""

    batch: float
    """Requests in a decode step, on average."""
    tokens: float
    busy_s: float
    """Time of decode steps and prefills; idle time left out."""


@dataclass(frozen=True)
class Reading:
    """Numbers of one moment."""

    stats: Json
    """/csa2/stats."""
    metrics: Metrics | None = None
    """None: the server does not publish them."""


@dataclass(frozen=True)
class Case:
    """All that is known of one server."""

    first: Reading
    last: Reading
    seconds: float = 0.0
    """Between the two."""
    loads: tuple[Load, ...] = ()
    """Readings in between, in order."""
    arguments: Json = field(default_factory=dict)
    """/server_info."""
    documents: tuple[Json, ...] = ()
    """Pinned documents."""
    calibration_fault: str | None = None
    """Why the calibration does not fit the model; None: it does, or there is none."""

    @property
    def stats(self) -> Json:
        """The last reading of the cache."""
        return self.last.stats

    @property
    def options(self) -> Json:
        """Options of the cache in effect."""
        options: Json = self.stats["options"]
        return options

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.arguments.get("page_size") or 64)

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of the pages of each format."""
        sizes = self.stats["page_bytes"]
        return {name: count * sizes[name] for name, count in self.stats["pages"].items()}

    def of_arena(self, name: str) -> float:
        """Bytes of that field of the statistics as a share of the arena."""
        return float(self.stats[name] / self.stats["arena_bytes"])

    @property
    def paces(self) -> list[Pace]:
        """Of each pair of successive readings in which tokens were generated.

        None with mixed chunks: SGLang counts no tokens of their steps.
        """
        if self.arguments.get("enable_mixed_chunk"):
            return []
        pairs = [(before, after) for before, after in pairwise(self.loads) if after.steps > before.steps]
        return [
            Pace(
                batch=(after.batch_sum - before.batch_sum) / (after.steps - before.steps),
                tokens=after.tokens - before.tokens,
                busy_s=(after.busy_us - before.busy_us) / 1e6,
            )
            for before, after in pairs
        ]

    def mean(self, histogram: str, least: int = 1, **labels: str) -> Mean | None:
        """Mean of one of SGLang's histograms between the readings, or since the start; None if it has too few values."""
        if self.last.metrics is None:
            return None
        return histogram_mean(f"sglang:{histogram}", self.last.metrics, self.first.metrics, least, **labels)

    def rise(self, counter: str) -> float:
        """How much a counter of /metrics rose between the readings; 0 without metrics."""
        if self.last.metrics is None or self.first.metrics is None:
            return 0.0
        return self.last.metrics.total(f"sglang:{counter}") - self.first.metrics.total(f"sglang:{counter}")
