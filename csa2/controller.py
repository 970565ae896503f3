"""The target ratio of old private pages: how it follows memory, and how pages of two formats make up what lies between.

A ratio is how much smaller than 4-bit pages: 1 to 8. Formats exist for 1, 2, 4 and 8; a target between two of them is met
by giving some pages the smaller one.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.formats import FormatLadder

MIN_RATIO, MAX_RATIO = 1.0, 8.0
RATIO_FORMATS = {"csa2-2x": 2.0, "csa2-4x": 4.0, "csa2-8x": 8.0}
GOLDEN = (math.sqrt(5) - 1) / 2
MIN_STEPS = 4
"""Steps of the target for a factor of two; at least."""


def rungs(ladder: FormatLadder) -> tuple[tuple[float, int], ...]:
    """(ratio, format) of the 4-bit format and every smaller one of `ladder`, ascending."""
    smaller = [(RATIO_FORMATS[name], ladder.index(name)) for name in ladder.names if name in RATIO_FORMATS]
    return ((MIN_RATIO, ladder.warm), *smaller)


@dataclass(frozen=True)
class Mix:
    """Two formats that make up a ratio."""

    larger: int
    smaller: int
    share: float = 1.0
    """Part of the pages that get the smaller one."""


def mix_for(ratio: float, ladder: FormatLadder) -> Mix:
    """The formats next to `ratio`, in the shares in which their bytes, which go with 1 / ratio, make it up.

    Beyond the smallest format of `ladder` that one alone.
    """
    known = rungs(ladder)
    above = bisect_left(known, ratio, key=lambda rung: rung[0])
    if above == 0 or above == len(known):
        index = known[min(above, len(known) - 1)][1]
        return Mix(index, index)
    (low, larger), (high, smaller) = known[above - 1 : above + 1]
    return Mix(larger, smaller, (1 / low - 1 / ratio) / (1 / low - 1 / high))


def deal(mix: Mix, depth: Tensor) -> Tensor:
    """(n,) int64 formats of old private pages at `depth` (n,) in their sequences, spread evenly over them.

    The same page always gets the same, and a larger share only adds to those that get the smaller format.
    """
    # Multiples of the golden ratio fill [0, 1) as evenly as can be, from any place on.
    place = torch.remainder(depth.double() * GOLDEN, 1.0)
    return torch.where(place < mix.share, mix.smaller, mix.larger)


class RatioController:
    """Moves the target ratio with the use of memory, in steps small enough that it cannot swing.

    A step changes the target by a factor f < high / low. Bytes that follow the target change by at most f with it, so a
    step up at a use above `high` leaves more than `low`, and a step down at a use below `low` less than `high`: at constant
    demand the target comes to rest. It depends on the numbers given to it alone.
    """

    def __init__(self, high: float, low: float, interval_tokens: int, ratio: float | None = None) -> None:
        """Args:
        high, low: use of memory above which the ratio goes up, and below which it comes down.
        interval_tokens: generated tokens between two looks.
        ratio: a fixed target; None follows memory from ratio 1.
        """
        self.high, self.low, self.interval_tokens = high, low, interval_tokens
        self.steps_per_octave = MIN_STEPS
        while low > 0 and 2 ** (1 / self.steps_per_octave) >= high / low:
            self.steps_per_octave += 1
        self.fixed = ratio
        self.changes_total = 0
        self._level = 0
        self._highest = self._ceiling = round(math.log2(MAX_RATIO / MIN_RATIO) * self.steps_per_octave)
        self._tokens = 0

    @property
    def target(self) -> float:
        """Ratio of old private pages now."""
        return self.fixed if self.fixed is not None else self._ratio(self._level)

    @property
    def ceiling(self) -> float:
        """Largest target that memory alone may ask for now."""
        return self._ratio(self._ceiling)

    @property
    def is_automatic(self) -> bool:
        """Whether the target follows memory."""
        return self.fixed is None

    def fix(self, ratio: float | None) -> None:
        """Set the target, or let it follow memory again from the step nearest to where it is. Lifts the ceiling."""
        self._ceiling = self._highest
        if ratio is None and self.fixed is not None:
            self._level = self._clamped(round(math.log2(self.fixed / MIN_RATIO) * self.steps_per_octave))
        self.fixed = ratio

    def is_due(self, generated_tokens: int) -> bool:
        """Count tokens; whether it is time for a look."""
        self._tokens += generated_tokens
        if self._tokens < self.interval_tokens:
            return False
        self._tokens = 0
        return self.is_automatic

    def look(self, use: float) -> int:
        """Adjust the target to the `use` of memory (0 to 1, or more for what waits); the step taken: -1, 0 or 1."""
        if not self.is_automatic:
            return 0
        before = self._level
        self._level = self._clamped(before + (use > self.high) - (use < self.low))
        self.changes_total += self._level != before
        return self._level - before

    def back_off(self) -> bool:
        """Go down to the next of the ratios 1, 2, 4 below the target and stay at or below it until `fix`.

        Returns:
            Whether there is one to go to, which a fixed target has not.
        """
        if not self.is_automatic or self._level == 0:
            return False
        self._ceiling = (self._level - 1) // self.steps_per_octave * self.steps_per_octave
        self._level = self._ceiling
        self.changes_total += 1
        return True

    def _ratio(self, level: int) -> float:
        return MIN_RATIO * 2 ** (level / self.steps_per_octave)

    def _clamped(self, level: int) -> int:
        return min(max(level, 0), self._ceiling)
