"""What the doctor knows of a server: two readings of its numbers, how it was started, what lies beside it."""

from dataclasses import dataclass, field
from typing import Any

from csa2.doctor.metrics import Mean, Metrics, histogram_mean

Json = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """One reading of /v1/loads, all ranks together."""

    running: int
    waiting: int
    retracted: int
    """Requests that lost their pages and wait to get some again."""
    tokens_per_s: float
    """Generated, over the last steps that SGLang counted."""
    used_tokens: int

    @classmethod
    def of(cls, answer: Json) -> "Load":
        """From the JSON of the route."""
        loads = answer.get("loads", [])

        def total(name: str) -> Any:
            return sum(load.get(name) or 0 for load in loads)

        queues = [load.get("queues") or {} for load in loads]
        return cls(
            running=total("num_running_reqs"),
            waiting=total("num_waiting_reqs"),
            retracted=sum(queue.get("retracted") or 0 for queue in queues),
            tokens_per_s=float(total("gen_throughput")),
            used_tokens=total("num_used_tokens"),
        )


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
