"""What `csa2 top` asks a server, and what it keeps of the answers."""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from csa2.documents import DocumentView
from csa2.info import fetch, fetch_stats
from csa2.stats import CacheStats
from csa2.top.load import Load, quantile

ADMIN_KEY_VARIABLE = "CSA2_ADMIN_API_KEY"
"""Environment variable with the key of a server that was started with --admin-api-key."""
SLOW_S = 10.0
"""Metrics and documents are asked for once in that time: to collect them takes the server longer than its statistics."""
WINDOW_S = 60.0
"""Rates are those of the last minute."""


class _Documents(msgspec.Struct):
    documents: list[DocumentView]


@dataclass(frozen=True)
class Reading:
    """What a server said at one time."""

    time_s: float
    """On a clock that only goes forward."""
    stats: CacheStats
    load: Load | None
    load_note: str
    """Why there is none."""
    documents: tuple[DocumentView, ...]
    documents_note: str
    """Why there are none."""
    slow_time_s: float
    """When load and documents were read."""


def take_reading(url: str, before: Reading | None = None) -> Reading:
    """Ask the server at `url`.

    Args:
        before: the last reading; load and documents are taken from it while they are new enough.

    Raises:
        OptionError: `url` is no address.
        ServerStatsError: no answer, or no statistics.
    """
    stats = fetch_stats(url)
    now = time.monotonic()
    if before is not None and now - before.slow_time_s < SLOW_S:
        return replace(before, time_s=now, stats=stats)
    load, load_note = _load(url)
    documents, documents_note = _documents(url)
    return Reading(now, stats, load, load_note, documents, documents_note, now)


def _load(url: str) -> tuple[Load | None, str]:
    # SGLang asks for no key here, so none is sent.
    status, body = fetch(url, "/metrics", key="")
    if status != 200:
        return None, "start the server with --enable-metrics"
    return Load.parse(body.decode(errors="replace")), "known after the first request"


def _documents(url: str) -> tuple[tuple[DocumentView, ...], str]:
    status, body = fetch(url, "/csa2/documents", key=os.environ.get(ADMIN_KEY_VARIABLE))
    if status in (401, 403):
        return (), f"the list needs the admin key: set {ADMIN_KEY_VARIABLE}"
    if status != 200:
        return (), f"the server answers with status {status}"
    try:
        return tuple(msgspec.json.decode(body, type=_Documents).documents), "none"
    except msgspec.MsgspecError as error:
        return (), f"the list is not that of this version ({error})"


class Readings:
    """Readings of one server, as long as they matter."""

    def __init__(self) -> None:
        self._all: deque[Reading] = deque()
        self.use: deque[float] = deque(maxlen=500)
        """Share of the arena in use, one a reading."""

    def add(self, reading: Reading) -> None:
        """Keep a reading. Counters that fell mean a restart: nothing before it counts."""
        if self._all and reading.stats.prompt_tokens_total < self._all[-1].stats.prompt_tokens_total:
            self._all.clear()
        self._all.append(reading)
        while self._all[0].time_s < reading.time_s - WINDOW_S:
            self._all.popleft()
        self.use.append(reading.stats.slab_bytes / max(1, reading.stats.arena_bytes))

    @property
    def last(self) -> Reading:
        """The newest one."""
        return self._all[-1]

    def gain(self, count: Callable[[CacheStats], float]) -> float | None:
        """What `count` gained in the last minute; None after one reading."""
        if len(self._all) < 2:
            return None
        return count(self._all[-1].stats) - count(self._all[0].stats)

    def rate(self, count: Callable[[CacheStats], float]) -> float | None:
        """The same a second."""
        gained = self.gain(count)
        return None if gained is None else gained / (self._all[-1].time_s - self._all[0].time_s)

    def generated_rate(self) -> float | None:
        """Tokens generated a second."""
        first, last = self._loads()
        if first is None or last is None or last.load is None or first.load is None:
            return None
        return max(0.0, last.load.generated_tokens - first.load.generated_tokens) / (last.slow_time_s - first.slow_time_s)

    def ttft_s(self, share: float) -> float | None:
        """Quantile of the time to first token: of the last minute, or since the start while there is one reading."""
        first, last = self._loads()
        if last is None or last.load is None:
            return None
        return quantile(first.load.ttft_s if first and first.load else (), last.load.ttft_s, share)

    def _loads(self) -> tuple[Reading | None, Reading | None]:
        """First and last reading with a load; None for the first where there is one only."""
        found = [reading for reading in self._all if reading.load is not None]
        if not found or found[0].slow_time_s == found[-1].slow_time_s:
            return None, (found[-1] if found else None)
        return found[0], found[-1]
