"""What SGLang publishes under /metrics, as far as `csa2 top` shows it."""

import math
from dataclasses import dataclass
from typing import Self

from csa2.metrics_text import parse_samples

PREFIX = "sglang:"

Buckets = dict[float, float]
"""Of a histogram: upper end -> how many were not above it."""


@dataclass(frozen=True)
class Load:
    """One reading of the metrics of SGLang."""

    generated_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    ttft_s: tuple[tuple[float, float], ...] = ()
    """Buckets of the time to first token, in order."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """From the text of /metrics; None where SGLang has published nothing yet."""
        samples = sglang_samples(text)
        if not {"generation_tokens_total", "num_running_reqs"} & {name for name, _, _ in samples}:
            return None

        def total(name: str) -> float:
            return sum(value for found, _, value in samples if found == name)

        buckets: Buckets = {}
        for name, labels, value in samples:
            if name == "time_to_first_token_seconds_bucket":
                end = float(labels.get("le", "inf"))
                buckets[end] = buckets.get(end, 0.0) + value
        return cls(
            generated_tokens=total("generation_tokens_total"),
            running=total("num_running_reqs"),
            waiting=total("num_queue_reqs"),
            ttft_s=tuple(sorted(buckets.items())),
        )


def sglang_samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Samples of SGLang in Prometheus text: (name without the prefix, labels, value). Of ranks that share a replica, which
    report the same, the first one counts."""
    return [
        (name.removeprefix(PREFIX), labels, value)
        for name, labels, value in parse_samples(text)
        if name.startswith(PREFIX) and labels.get("tp_rank", "0") == "0"
    ]


def quantile(before: tuple[tuple[float, float], ...], after: tuple[tuple[float, float], ...], share: float) -> float | None:
    """Quantile of what came between two readings of a histogram, by the rule of Prometheus; None if nothing came."""
    earlier = dict(before)
    came = [(end, count - earlier.get(end, 0.0)) for end, count in after]
    rank = share * came[-1][1] if came else 0.0
    if rank <= 0:
        return None
    low, below = 0.0, 0.0
    for end, count in came:
        if count >= rank:
            return low if math.isinf(end) else low + (end - low) * (rank - below) / (count - below)
        low, below = end, count
    return None
