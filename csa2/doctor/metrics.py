"""Metrics as the doctor needs them: sums over series, means of histograms."""

from collections import defaultdict
from dataclasses import dataclass

from csa2.metrics_text import parse_samples

Series = list[tuple[dict[str, str], float]]


@dataclass(frozen=True)
class Mean:
    """Mean of a histogram and how many values it is of."""

    value: float
    count: int


class Metrics:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, Series] = defaultdict(list)
        for name, labels, value in parse_samples(text):
            self._series[name].append((labels, value))

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of `name` that have these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(value for has, value in self._series.get(name, []) if wanted <= has.items())


def histogram_mean(name: str, last: Metrics, first: Metrics | None = None, least: int = 1, **labels: str) -> Mean | None:
    """Mean of what a histogram counted between two readings; since the start if that is less than `least` values.

    Returns:
        None if there are fewer than `least` values since the start too.
    """
    total, count = last.total(f"{name}_sum", **labels), last.total(f"{name}_count", **labels)
    if first is not None:
        new = count - first.total(f"{name}_count", **labels)
        if new >= max(least, 1):
            return Mean((total - first.total(f"{name}_sum", **labels)) / new, int(new))
    return Mean(total / count, int(count)) if count >= max(least, 1) else None
