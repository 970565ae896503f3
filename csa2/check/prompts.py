"""What is asked of an engine about one document: the protocol, and the passages that are repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from csa2.check.errors import CheckError

STEP_TOKENS = 64
"""Tokens scored at a time; each step reads everything before it from the cache."""
COPY_DISTANCE = 2700
"""Tokens between a passage and its repetition, where the text is long enough."""
COPY_SPREAD = 512
"""Passages lie up to this far on both sides of `COPY_DISTANCE`."""
PASSAGE_TOKENS = (64, 96)
CUE_TOKENS = (16, 24)
"""Shortest and longest passage, and beginning of it that is given before the rest is scored."""
FIRST_PAGE = 64
"""Tokens never compressed; passages lie behind them."""
NEAREST = 256
"""Tokens right before the repetition that hold no passage."""


@dataclass(frozen=True)
class Protocol:
    """How every document is measured.

    Attributes:
        context: tokens prefilled at once; whole pages.
        score_tokens: tokens scored after them; whole steps.
        copies: passages repeated per document.
        seed: decides which.
    """

    context: int = 4096
    score_tokens: int = 512
    copies: int = 8
    seed: int = 0

    def validate(self) -> None:
        """Raises CheckError: names the option, the value and what is allowed."""
        for option, value in (("--context", self.context), ("--score-tokens", self.score_tokens)):
            if value < STEP_TOKENS or value % STEP_TOKENS:
                raise CheckError(f"{option} {value} is not a positive multiple of {STEP_TOKENS}: pages are read whole")
        if self.copies < 0:
            raise CheckError(f"--copies {self.copies} is negative: give a number of passages, or 0 to leave recall out")
        if self.copies > self.copy_slots:
            raise CheckError(
                f"--copies {self.copies} passages do not fit into --context {self.context}: {self.copy_slots} do. "
                f"Lower --copies or raise --context"
            )

    @property
    def document_tokens(self) -> int:
        """Tokens a document must have: the last scored token is one after the last step."""
        return self.context + self.score_tokens + 1

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest request, its one new token counted."""
        return self.context + self.score_tokens + (PASSAGE_TOKENS[1] if self.copies else 1) + 1

    @property
    def copy_range(self) -> tuple[int, int]:
        """First and last token that passages may lie in."""
        end = self.context + self.score_tokens
        centre = max(end - COPY_DISTANCE, end // 3)
        return max(FIRST_PAGE, centre - COPY_SPREAD), min(centre + COPY_SPREAD, end - NEAREST)

    @property
    def copy_slots(self) -> int:
        """Passages that find a place beside each other."""
        low, high = self.copy_range
        return max(0, high - low) // PASSAGE_TOKENS[1]


@dataclass(frozen=True)
class CopyProbe:
    """A passage that is repeated at the end of a document."""

    passage: tuple[int, ...]
    """Its tokens; the prompt is the whole measured text, then these."""
    cue: int
    """Of them given before the first that counts."""


def copy_probes(tokens: Sequence[int], protocol: Protocol, document: int) -> list[CopyProbe]:
    """The passages of document number `document`, side by side at most; the same for the same seed."""
    rng = random.Random(f"{protocol.seed}/{document}")  # noqa: S311 - passages, no secrets
    low, _ = protocol.copy_range
    probes = []
    for slot in sorted(rng.sample(range(protocol.copy_slots), protocol.copies)):
        length = rng.randint(*PASSAGE_TOKENS)
        cue = rng.randint(*CUE_TOKENS)
        start = low + slot * PASSAGE_TOKENS[1]
        probes.append(CopyProbe(tuple(tokens[start : start + length]), cue))
    return probes
