"""The target ratio at work: what it makes of new old pages, and of those that are there when memory gets short."""

from collections.abc import Callable

from torch import Tensor

from csa2.controller import MIN_RATIO, RatioController, mix_for, rungs
from csa2.errors import OptionError
from csa2.facts import Usage
from csa2.formats import PLAIN
from csa2.options import CacheOptions
from csa2.store import PageStore

RELIEF_PAGES = 64
"""Pages re-encoded at most in one look: bounds the pause that it makes in decoding."""


class TailRatio:
    """Keeps the formats of old private pages in a store at the target ratio."""

    def __init__(self, store: PageStore, options: CacheOptions, usage: Callable[[], Usage]) -> None:
        """Args:
        usage: what running requests read now.
        """
        self._store, self._usage = store, usage
        self._follows_memory = options.is_adaptive
        fixed = None if options.is_adaptive else 1.0 if options.ratio == "auto" else float(options.ratio)
        self.controller = RatioController(options.high_watermark, options.low_watermark, options.adjust_interval, fixed)
        if options.is_adaptive:
            self._apply()

    @property
    def largest(self) -> float:
        """Largest ratio for which the ladder has formats."""
        return rungs(self._store.ladder)[-1][0]

    def set(self, ratio: float | None) -> None:
        """Fix the target at `ratio`, or let it follow memory (None).

        Raises:
            OptionError: the ladder has no formats for it.
        """
        if ratio is None and not self._follows_memory:
            raise OptionError(
                "the ratio of this server cannot follow memory: it has only the formats that --csa2-ratio and "
                "--csa2-tail-format name. Start it with --csa2-ratio auto"
            )
        if ratio is not None and ratio > self.largest:
            raise OptionError(
                f"ratio {ratio:g} is more than the formats of this server reach, which is {self.largest:g}: give a smaller "
                f"one, or start it with --csa2-ratio auto"
            )
        self.controller.fix(ratio)
        self._apply()

    def is_roomy(self, pages: Tensor) -> bool:
        """Whether memory is free once `pages` that are written plain have the shared format: below the high watermark, with
        the target at its least."""
        store, shared = self._store, self._store.ladder.shared
        if not self.controller.is_automatic or self.controller.target > MIN_RATIO or shared is None:
            return False
        sizes = store.ladder.page_bytes
        plain = int((store.arena.formats[pages] == PLAIN).sum())
        live = store.live_bytes(self._usage()) - plain * (sizes[PLAIN] - sizes[shared])
        return live <= self.controller.high * store.arena.plan.arena_bytes

    def after_tokens(self, generated: int) -> None:
        """Count generated tokens and, when it is time, look at memory."""
        if self.controller.is_due(generated):
            self.look()

    def look(self) -> None:
        """Adjust the target; above the high watermark bring pages in use to their formats by it."""
        store, usage = self._store, self._usage()
        total = store.arena.plan.arena_bytes
        live = store.live_bytes(usage)
        if self.controller.look(live / total):
            self._apply()
        excess = live - int(self.controller.high * total)
        if excess > 0:
            store.relieve(usage, excess, RELIEF_PAGES)

    def back_off(self) -> bool:
        """Lower the target to the next smaller ratio with a format of its own, for new old pages; whether there was one."""
        lowered = self.controller.back_off()
        if lowered:
            self._apply()
        return lowered

    def _apply(self) -> None:
        self._store.tail = mix_for(self.controller.target, self._store.ladder)
