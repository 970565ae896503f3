"""From log-probabilities of two engines on the same tokens to what the compressed one lost. float64 throughout.

"Full" is the engine with the uncompressed cache, "packed" the one under test. T scored tokens, K most likely tokens of a
distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csa2.check.errors import CheckError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK_TOKENS = 64
"""Scored tokens that see the same pages."""
FEWEST_DOCUMENTS = 3
"""Below it the spread between documents says nothing."""
_LEAST_MASS = 1e-12
"""Stands for a tail that rounding made zero or negative."""


@dataclass(frozen=True)
class TokenScores:
    """What one engine says about T consecutive tokens of a document."""

    tokens: Ints
    """(T,) the true tokens."""
    logprobs: Floats
    """(T,) natural log of their probabilities."""
    top_tokens: Ints
    """(T, K) the most likely tokens, best first."""
    top_logprobs: Floats
    """(T, K)"""


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; `blocks` says what was taken as independent."""

    value: float
    standard_error: float
    blocks: str


def nll_differences(full: TokenScores, packed: TokenScores) -> Floats:
    """(T,) nats by which each true token is less likely to the packed side.

    Raises:
        CheckError: the two sides scored different tokens.
    """
    if not np.array_equal(full.tokens, packed.tokens):
        raise CheckError("the two engines scored different tokens: nothing can be compared")
    return full.logprobs - packed.logprobs


def perplexity_increase_pct(documents: Sequence[Floats]) -> Estimate:
    """Increase of the perplexity in per cent over all tokens, from `nll_differences` of each document.

    Paired: the difference per token varies far less than either side. Its standard error takes documents as independent:
    all scored tokens of one read the same compressed pages, so blocks within it share their error. Below
    `FEWEST_DOCUMENTS` blocks of `BLOCK_TOKENS` have to do, which flatters.
    """
    mean = float(np.concatenate(documents).mean())
    by_document = len(documents) >= FEWEST_DOCUMENTS
    cut = list(documents) if by_document else [block for each in documents for block in blocks_of(each)]
    error = _error_of_mean(cut)
    # exp is smooth: to first order its error is the error of the exponent times its slope.
    slope = 100 * float(np.exp(mean))
    blocks = f"{len(cut)} documents" if by_document else f"{len(cut)} blocks of {BLOCK_TOKENS} tokens"
    return Estimate(100 * float(np.expm1(mean)), slope * error, blocks)


def blocks_of(values: Floats) -> list[Floats]:
    """`values` (T,) cut into blocks of `BLOCK_TOKENS`; the last may be shorter."""
    return [values[start : start + BLOCK_TOKENS] for start in range(0, values.size, BLOCK_TOKENS)]


def _error_of_mean(blocks: Sequence[Floats]) -> float:
    """Standard error of the mean over all tokens when blocks, which may differ in length, are independent."""
    n = len(blocks)
    if n < 2:
        return float("nan")
    tokens = sum(block.size for block in blocks)
    mean = sum(float(block.sum()) for block in blocks) / tokens
    # The ratio estimator of cluster sampling; sd / sqrt(n) of the block means when all are of one length.
    residual = sum((float(block.sum()) - mean * block.size) ** 2 for block in blocks)
    return float(np.sqrt(n / (n - 1) * residual)) / tokens


def divergence_nats(full: TokenScores, packed: TokenScores) -> Floats:
    """(T,) KL(full || packed) in nats, from below.

    Both distributions are known on the tokens that both name among their K most likely; everything else is one bucket.
    Merging outcomes never raises a divergence, so this is a lower bound, tight when the bucket is small.
    """
    values = np.empty(full.tokens.size)
    for t in range(values.size):
        _, i, j = np.intersect1d(full.top_tokens[t], packed.top_tokens[t], assume_unique=True, return_indices=True)
        p, q = full.top_logprobs[t][i], packed.top_logprobs[t][j]
        rest_p, rest_q = _rest(p), _rest(q)
        values[t] = float((np.exp(p) * (p - q)).sum()) + rest_p * float(np.log(rest_p / rest_q))
    return values


def _rest(logprobs: Floats) -> float:
    return max(_LEAST_MASS, 1 - float(np.exp(logprobs).sum()))


def agreements(full: TokenScores, packed: TokenScores) -> NDArray[np.bool_]:
    """(T,) whether both sides find the same token most likely."""
    same: NDArray[np.bool_] = full.top_tokens[:, 0] == packed.top_tokens[:, 0]
    return same


def copied(scores: TokenScores) -> NDArray[np.bool_]:
    """(T,) whether the true token is the most likely one: greedy decoding would have written it."""
    hit: NDArray[np.bool_] = scores.top_tokens[:, 0] == scores.tokens
    return hit


def percent(flags: Sequence[NDArray[np.bool_]]) -> float:
    """Share of True over all arrays, in per cent."""
    return 100 * float(np.concatenate(flags).mean())


def loss_by_position(documents: Sequence[Floats]) -> Floats:
    """(blocks,) mean nats lost per block of `BLOCK_TOKENS` scored tokens, over documents of one length."""
    stacked = np.stack(documents)
    return np.array(
        [float(stacked[:, start : start + BLOCK_TOKENS].mean()) for start in range(0, stacked.shape[1], BLOCK_TOKENS)]
    )
