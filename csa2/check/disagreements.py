"""Where the compressed engine would have written another token than the full one, token by token."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from csa2.check.metrics import TokenScores, agreements

CONTEXT_TOKENS = 16
"""Shown before a disagreement."""

Decode = Callable[[Sequence[int]], str]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A token with the probability that an engine gives it."""

    token: str
    probability: float


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """One position at which the most likely tokens differ."""

    document: str
    position: int
    """Index of the token in its document."""
    context: str
    """The text right before it."""
    true_token: str
    full: Candidate
    """First choice with the full cache."""
    packed: Candidate
    """First choice with the compressed cache."""
    margin_nats: float
    """By which the full cache prefers its first choice to its second; near 0 is a coin toss."""


def first_disagreements(
    name: str,
    document: Sequence[int],
    full: TokenScores,
    packed: TokenScores,
    *,
    first_position: int,
    decode: Decode,
    limit: int,
) -> list[Disagreement]:
    """The first `limit` of one document, in order.

    Args:
        name: of the document, `document` its token ids.
        first_position: index in `document` of the first scored token.
    """
    found = []
    for t in np.nonzero(~agreements(full, packed))[0][:limit].tolist():
        position = first_position + t
        best = full.top_logprobs[t]
        found.append(
            Disagreement(
                document=name,
                position=position,
                context=decode(document[max(0, position - CONTEXT_TOKENS) : position]),
                true_token=decode([int(full.tokens[t])]),
                full=_first(full, t, decode),
                packed=_first(packed, t, decode),
                margin_nats=float(best[0] - best[1]) if best.size > 1 else 0.0,
            )
        )
    return found


def _first(scores: TokenScores, t: int, decode: Decode) -> Candidate:
    token, logprob = int(scores.top_tokens[t, 0]), float(scores.top_logprobs[t, 0])
    return Candidate(token=decode([token]), probability=float(np.exp(logprob)))
