"""Judges answers by log probabilities: of the last tokens of a prompt, which look back on all of it.

Errors are held against the *signal*: what changes when the text before those tokens is another one. A cache that lost or
mixed up pages is off by about the signal.
"""

import math
from typing import Any

from served import Served

JUDGED = 24
"""Tokens at the end of a prompt whose log probabilities are compared."""


def judged(server: Served, prompt: list[int], **more: Any) -> Any:
    """The answer to `prompt`, with what `served_logprobs` reads."""
    start = len(prompt) - JUDGED - 1
    return server.generate(prompt, return_logprob=True, logprob_start_len=start, **more)


def served_logprobs(answer: Any) -> list[float]:
    """Log probabilities of the judged tokens."""
    return [logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][-JUDGED:]]


def rms(a: list[float], b: list[float]) -> float:
    """Root mean square of the differences."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


def other_context(prompt: list[int], text_ids: list[int]) -> list[int]:
    """The same last tokens after another text."""
    tail = JUDGED + 8
    return text_ids[-(len(prompt) - tail) :] + prompt[-tail:]
