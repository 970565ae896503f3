"""Turns: what each request found in the cache when it started.

A turn is a request that started its prefill, counted once: chunks that follow and starts after a retraction find pages of
the same request. Its cached tokens are those that SGLang reports as `meta_info.cached_tokens`. Requests of our own do not
count.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

TURN = "csa2_turn"
"""Attribute of a request: its turn, until it is reported."""


class Turn(NamedTuple):
    """One turn."""

    prompt_tokens: int
    cached_tokens: int
    cached_by_format: dict[str, int]
    """Cached tokens by the format of their pages; formats without any are left out."""


class TurnTotals:
    """Sums over the turns of one scheduler."""

    def __init__(self, format_names: tuple[str, ...], page_size: int) -> None:
        self.turns = self.prompt_tokens = self.cached_tokens = 0
        self.cached_by_format = dict.fromkeys(format_names, 0)
        """Keeps its keys from start to end, zero included."""
        self._page_size = page_size

    def note(self, req: Any, formats: Tensor) -> None:
        """Count the turn of `req`, whose prompt begins with cached pages in `formats` (n,)."""
        names = list(self.cached_by_format)
        counts = torch.bincount(formats.long(), minlength=len(names)).tolist()
        by_format = {name: n * self._page_size for name, n in zip(names, counts, strict=True) if n}
        turn = Turn(len(req.origin_input_ids), sum(by_format.values()), by_format)
        setattr(req, TURN, turn)
        self.turns += 1
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += turn.cached_tokens
        for name, tokens in by_format.items():
            self.cached_by_format[name] += tokens


def take_turns(batch: Any) -> list[Turn]:
    """The turns that began with `batch`, each one once."""
    return [vars(req).pop(TURN) for req in batch.reqs if TURN in vars(req)]


def format_turns_line(turns: list[Turn]) -> str:
    """The line beside SGLang's prefill line, for turns that began together."""
    prompt, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
    by_format: Counter[str] = Counter()
    for turn in turns:
        by_format.update(turn.cached_by_format)
    formats = ", ".join(f"{name} {tokens}" for name, tokens in by_format.items())
    return (
        f"csa2: #turn {len(turns)}, prompt tokens {prompt}, cached tokens {cached}{f' ({formats})' if formats else ''}, "
        f"hit rate {100 * cached / prompt if prompt else 0.0:.1f} %"
    )
