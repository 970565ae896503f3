"""Measuring: one engine after the other over all documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csa2.check.formats import engine_options
from csa2.check.metrics import TokenScores
from csa2.check.prompts import Protocol, copy_probes
from csa2.check.results import Measured
from csa2.options import PAGE_SIZE
from sglang_csa2.args import SCHEME
from sglang_csa2.check_engine import Engine, score_copy, score_in_steps, score_whole
from sglang_csa2.check_inputs import ModelFacts, TokenizedDocument

FULL = "the full cache"
TOP_TOKENS = 64
"""Most likely tokens that are asked for per position."""
MEMORY_FRACTION = 0.8
"""The sizes below are explicit. SGLang's own default would subtract room for the chunk, more than a small machine has."""
SPARE_PAGES = 16

Tick = Callable[[], object]
"""Called after each document is scored and after each repeated passage."""


@dataclass(frozen=True)
class EngineSettings:
    """What the user chooses of the engines: SGLang's options of the same names, and of csa2 without the prefix."""

    dtype: str
    impl: str = "auto"
    device: str | None = None
    calibration: Path | None = None
    warm_tokens: int | None = None


def engine_arguments(
    name: str, model: Path, facts: ModelFacts, protocol: Protocol, settings: EngineSettings
) -> dict[str, Any]:
    """Server arguments for the row `name`, or for the full cache where it is `FULL`. All else is the same on both sides."""
    # A document with its repetitions, twice over: nothing is evicted, and demotion never runs short of a slab.
    pages = 2 * -(-protocol.longest_prompt // PAGE_SIZE) + 2 * protocol.copies + SPARE_PAGES
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "dtype": settings.dtype,
        "random_seed": protocol.seed,
        # One chunk a prompt.
        "chunked_prefill_size": -(-protocol.longest_prompt // PAGE_SIZE) * PAGE_SIZE,
        "max_prefill_tokens": pages * PAGE_SIZE,
        "mem_fraction_static": MEMORY_FRACTION,
        # A bf16 logit has steps of 0.06 to 0.12: rounding alone would change the most likely token.
        "enable_fp32_lm_head": True,
        "skip_server_warmup": True,
    }
    if settings.device is not None:
        arguments["device"] = settings.device
    if name == FULL:
        return {**arguments, "max_total_tokens": pages * PAGE_SIZE}
    size = pages * PAGE_SIZE * facts.token_bytes
    cache: dict[str, Any] = {"kv_compress": SCHEME, "csa2_impl": settings.impl, "csa2_arena_size": size}
    if settings.warm_tokens is not None:
        cache["csa2_warm_tokens"] = settings.warm_tokens
    calibration = None if settings.calibration is None else str(settings.calibration)
    return {**arguments, **cache, **engine_options(name, calibration)}


def units(documents: Sequence[TokenizedDocument], protocol: Protocol) -> int:
    """Ticks of `measure`."""
    return len(documents) * (1 + protocol.copies)


def measure(
    name: str, arguments: dict[str, Any], documents: Sequence[TokenizedDocument], protocol: Protocol, tick: Tick
) -> Measured:
    """Start an engine, ask it about every document, stop it.

    Raises:
        EngineError: it ended, refused, or did not cache what it should.
    """
    scores: list[TokenScores] = []
    copies: list[TokenScores] = []
    stats: list[dict[str, object]] = []
    score = score_whole if name == FULL else score_in_steps
    with Engine(name, arguments) as engine:
        for number, document in enumerate(documents):
            engine.flush()
            scores.append(score(engine, document.tokens, protocol, TOP_TOKENS))
            if name != FULL:
                # Before the repetitions, whose pages do not belong to the text.
                stats.append(engine.stats())
            tick()
            for probe in copy_probes(document.tokens, protocol, number):
                copies.append(score_copy(engine, document.tokens, probe, protocol))
                tick()
    return Measured(tuple(scores), tuple(copies), tuple(stats))
