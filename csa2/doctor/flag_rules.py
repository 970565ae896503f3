"""Findings about a server before it starts. Each rule looks at its flags and finds one thing, or None."""

from csa2.doctor.cache_rules import CHUNK_SHARE, LARGE_SHARE
from csa2.doctor.finding import Finding
from csa2.doctor.flags import FlagCase
from csa2.errors import OptionError
from csa2.options import PAGE_SIZE
from csa2.units import format_bytes

SCHEME = "csa2"
OUT_OF_MEMORY = "out-of-memory-under-concurrency"


def refused(case: FlagCase) -> Finding | None:
    """A start would end with an error."""
    if case.resolved.error is None:
        return None
    return Finding(
        name="refused",
        title="The server would not start with these flags",
        seen=case.resolved.error,
        why="what cannot be served right is refused at the start, by name",
        fix=("change what the message names; docs/options.md lists what is refused, with reasons",),
        anchor="a-start-that-is-refused",
    )


def not_compressed(case: FlagCase) -> Finding | None:
    """The cache is not asked for."""
    if case.value("kv_compress") == SCHEME or case.resolved.error:
        return None
    return Finding(
        name="not-compressed",
        title="The compressed cache is not asked for",
        seen="--kv-compress is not there",
        why="without it none of this plugin runs",
        fix=("add --kv-compress csa2",),
        anchor="a-start-that-is-refused",
    )


def arena_too_small(case: FlagCase) -> Finding | None:
    """The requests that may run do not fit."""
    context, size = case.context, case.arena_bytes
    if context is None or size is None:
        return None
    try:
        fit = case.requests(context)
    except OptionError as error:
        return _small("the arena takes nothing at all", str(error), case)
    if fit is None:
        return None
    asked = case.given.get("max_running_requests")
    wanted = int(str(asked)) if str(asked).isdigit() else 1
    if fit >= wanted:
        return None
    which = f"one request of {context} tokens" if wanted == 1 else f"{wanted} requests of {context} tokens"
    seen = f"the arena of {format_bytes(size)} takes {fit} of that length, as small as pages get with these flags"
    return _small(f"{which} do{'es' if wanted == 1 else ''} not fit", seen, case, fit)


def _small(what: str, seen: str, case: FlagCase, fit: int = 0) -> Finding:
    ratio = case.smallest.ratio
    fixes = ["a larger --csa2-arena-size, or without it a larger --mem-fraction-static"]
    if ratio != "8":
        fixes.append(f"smaller old pages: --csa2-ratio auto instead of {ratio}")
    if fit:
        fixes.append(f"--max-running-requests {fit}: others wait instead of being retracted")
    fixes.append("--context-length: longer requests are then refused at once")
    return Finding(
        name="arena-too-small",
        title=what[0].upper() + what[1:],
        seen=seen,
        why="prompts that can never fit get a 4xx; of others some wait, or are retracted and computed again",
        fix=(*fixes, "csa2 plan: how many requests fit in which format"),
        anchor=OUT_OF_MEMORY,
    )


def memory_short(case: FlagCase) -> Finding | None:
    """Arena and weights take more than SGLang may use."""
    asked = case.options.arena_bytes if case.options else None
    budget = case.budget_bytes
    if asked is None or budget is None or case.model is None or asked <= budget:
        return None
    return Finding(
        name="memory-short",
        title="The arena does not fit beside the weights",
        seen=f"--csa2-arena-size {format_bytes(asked)}, weights {format_bytes(case.weights_bytes // case.ranks)} a rank, "
        f"memory {format_bytes(case.memory_bytes)}, of which {case.number('mem_fraction_static'):.0%} may be used",
        why="the start ends when the cache is sized; other processes on the machine leave less still",
        fix=(
            f"--csa2-arena-size {max(0, budget)} or less",
            "a larger --mem-fraction-static, if nothing else needs the memory",
            "--memory tells csa2 doctor the memory of another machine",
        ),
        anchor=OUT_OF_MEMORY,
    )


def calibration_of_another_model(case: FlagCase) -> Finding | None:
    """The calibration does not belong to the model."""
    if case.calibration_fault is None or case.options is None:
        return None
    return Finding(
        name="mismatched-calibration",
        title="The calibration does not fit the model",
        seen=f"--csa2-calibration {case.options.calibration}: {case.calibration_fault}",
        why="channels and heads that matter in another model would get the bytes; the start is refused",
        fix=(
            "csa2 calibrate --model DIR --text FILE... --out NEW, then --csa2-calibration NEW",
            "or leave --csa2-calibration out",
        ),
        anchor="calibration-that-does-not-fit",
    )


def not_calibrated(case: FlagCase) -> Finding | None:
    """Formats below 4 bits can come into use, and nobody said which channels matter."""
    options = case.options
    if options is None or options.calibration is not None or not options.reduced_formats or not_compressed(case):
        return None
    return Finding(
        name="no-calibration",
        title="Pages can get smaller than 4 bits without a calibration",
        seen=f"--csa2-ratio {options.ratio}, no --csa2-calibration",
        why="the slowest rotary pairs are kept and every head gets the same bytes, which loses several times more",
        fix=(
            "csa2 calibrate --model DIR --text FILE... --out NEW, then --csa2-calibration NEW",
            "csa2 check --model DIR --text FILE...: what each format costs",
            "or --csa2-ratio 1: pages stay at 4 bits",
        ),
        anchor="calibration-that-does-not-fit",
    )


def chunks(case: FlagCase) -> Finding | None:
    """Prompts are computed whole, or in chunks that fill the arena."""
    tokens, context, size = case.number("chunked_prefill_size"), case.context, case.arena_bytes
    if tokens is None or not case.model or not context or not size or size < 0:
        return None
    whole = tokens <= 0
    longest = min(context, context if whole else int(tokens))
    share = longest * case.model.token_bytes / case.ranks / size
    if share < LARGE_SHARE:
        return None
    advised = max(PAGE_SIZE, int(longest * CHUNK_SHARE / share) // PAGE_SIZE * PAGE_SIZE)
    name = "chunked-prefill-off" if whole else "large-chunks"
    title = "Prompts are computed whole" if whole else "One chunk of a prompt takes most of the arena"
    return Finding(
        name=name,
        title=title,
        seen=f"--chunked-prefill-size {int(tokens)}: up to {longest} tokens at once, uncompressed {share:.0%} of the "
        f"arena of {format_bytes(size)}",
        why="tokens are written uncompressed and compressed when their chunk is done, so others make room for it",
        fix=(f"--chunked-prefill-size {advised}", "a larger --csa2-arena-size"),
        anchor="memory-that-rises",
    )


def hits_switched_off(case: FlagCase) -> Finding | None:
    """The radix cache is off."""
    if not case.value("disable_radix_cache"):
        return None
    return Finding(
        name="radix-cache-off",
        title="Nothing is kept for the next request",
        seen="--disable-radix-cache",
        why="every prompt is computed from its first token, whatever was served before",
        fix=("leave --disable-radix-cache out",),
        anchor="low-hit-rate",
    )


def windows_too_long(case: FlagCase) -> Finding | None:
    """Nothing of a request ever leaves the uncompressed windows."""
    options, context = case.options, case.context
    if options is None or context is None or options.hot_tokens + options.protect_tokens < context:
        return None
    return Finding(
        name="nothing-to-compress",
        title="No token of a request is ever compressed",
        seen=f"--csa2-hot-tokens {options.hot_tokens}, --csa2-protect-tokens {options.protect_tokens}, of {context} tokens",
        why="the newest and the first tokens of a request stay as the model wrote them, unless memory runs short",
        fix=("smaller windows: the defaults are 128 and 64 tokens",),
        anchor="memory-that-rises",
    )


def coarse_pages(case: FlagCase) -> Finding | None:
    """Pages are larger than the usual ones, so less of a shared beginning is found."""
    size = case.number("page_size")
    if size is None or size <= PAGE_SIZE:
        return None
    return Finding(
        name="large-pages",
        title="Prompts share whole pages, and these are large",
        seen=f"--page-size {size:g}",
        why=f"of a shared beginning up to {size - 1:g} tokens are computed again, and up to as many slots stay empty",
        fix=(f"--page-size {PAGE_SIZE}, the default, unless --csa2-ratio 4 or 8 needs the larger groups",),
        anchor="low-hit-rate",
    )


def reference_code(case: FlagCase) -> Finding | None:
    """Attention would be computed by the torch reference."""
    options = case.options
    if options is None or (options.impl != "reference" and options.rope != "separated"):
        return None
    asked = "--csa2-impl reference" if options.impl == "reference" else "--csa2-rope separated"
    return Finding(
        name="reference-implementation",
        title="Attention would be computed by the torch reference",
        seen=asked,
        why="it is there to be checked against, and several times slower",
        fix=(f"leave {asked} out",),
        anchor="no-compiled-code",
    )


RULES = (
    refused,
    not_compressed,
    calibration_of_another_model,
    memory_short,
    arena_too_small,
    chunks,
    hits_switched_off,
    windows_too_long,
    coarse_pages,
    not_calibrated,
    reference_code,
)
