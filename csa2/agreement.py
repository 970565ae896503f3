"""How often predictions over compressed pages are those over plain ones: when to look, and what follows.

Of the steps of all requests, each the prediction of one token, every n-th is a sample: its most likely token is compared
with the one that the same tokens give over pages in the model dtype. It depends on the order of the calls alone.
"""

from collections import deque

WINDOW_SAMPLES = 100
"""Samples of one judgement. Where 95 % agree in truth, fewer than 90 of 100 do once in 90 judgements; where 85 % do, in nine
of ten."""


class AgreementWindow:
    """Counts samples and judges them, `WINDOW_SAMPLES` at a time."""

    def __init__(self, share: float, minimum: float) -> None:
        """Args:
        share: of the steps that are to be samples, above 0 to 1.
        minimum: share of a window's samples that must agree.
        """
        self.interval_steps = max(1, round(1 / share))
        self.minimum = minimum
        self.compared_total = self.agreed_total = 0
        self._steps = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW_SAMPLES)
        self._unjudged = 0

    @property
    def agreement(self) -> float | None:
        """Share of the last `WINDOW_SAMPLES` samples that agree, or of as many as there are; None without any."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def count(self, steps: int) -> bool:
        """Count steps; whether it is time for a sample, which stays so until `take`."""
        self._steps += steps
        return self._steps >= self.interval_steps

    def take(self) -> None:
        """A sample was taken, or had to be left out: wait for the next. Time that passed twice meanwhile is not made up."""
        self._steps %= self.interval_steps

    def note(self, agrees: bool) -> bool:
        """Count a sample; whether it completes a window in which too few agree. The next window begins with the next one."""
        self.compared_total += 1
        self.agreed_total += agrees
        self._recent.append(agrees)
        self._unjudged += 1
        if self._unjudged < WINDOW_SAMPLES:
            return False
        self._unjudged = 0
        return sum(self._recent) < self.minimum * WINDOW_SAMPLES

    def restart(self) -> None:
        """Forget the samples of the window: what they were taken of is gone. Totals stay."""
        self._recent.clear()
        self._unjudged = 0
