"""Prometheus text, as a server answers it under /metrics."""

import re
from collections.abc import Iterator

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample in `text`."""
    for line in text.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        name, labels, number = found.groups()
        try:
            value = float(number)
        except ValueError:
            continue  # a value in a dialect that SGLang does not write
        yield name, dict(_LABEL.findall(labels or "")), value
