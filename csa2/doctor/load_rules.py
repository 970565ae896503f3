"""Findings about speed: the first token, late turns, concurrency. They need SGLang's own numbers."""

from collections.abc import Sequence

from csa2.doctor.finding import Finding
from csa2.doctor.metrics import Mean
from csa2.doctor.readings import Case, Pace

SLOW_FIRST_TOKEN_S = 1.0
MIN_REQUESTS = 5
"""Fewer say nothing about a mean."""
QUEUE_SHARE = 0.5
"""Of the time to the first token."""
LONG_PROMPT_TOKENS = 1024.0
MUCH_UNCACHED = 0.5
MORE_REQUESTS = 1.5
LESS_THROUGHPUT = 0.9
SHORT_FIRST = (
    "if short prompts wait behind long ones: --schedule-policy shortest-prefill-first --chunked-prefill-size 512 "
    "--enable-mixed-chunk"
)


def queueing(case: Case) -> Finding | None:
    """Requests wait longer than they are computed."""
    waiting = [load.waiting for load in case.loads]
    first, queue = case.mean("time_to_first_token_seconds", MIN_REQUESTS), case.mean("queue_time_seconds", MIN_REQUESTS)
    if first is not None and queue is not None:
        if first.value < SLOW_FIRST_TOKEN_S or queue.value < QUEUE_SHARE * first.value:
            return None
        seen = _first_token(first, queue)
    elif waiting and min(waiting) > 0:
        seen = f"{min(waiting)} to {max(waiting)} requests wait in each of {len(waiting)} readings"
    else:
        return None
    return Finding(
        name="queueing",
        title="The first token is late because requests wait",
        seen=f"{seen}; {_running(case)}",
        why=_why_they_wait(case),
        fix=_let_more_run(case),
        anchor="slow-first-token",
    )


def slow_prefill(case: Case) -> Finding | None:
    """Prompts take long to compute."""
    first, queue = case.mean("time_to_first_token_seconds", MIN_REQUESTS), case.mean("queue_time_seconds", MIN_REQUESTS)
    if first is None or queue is None or first.value < SLOW_FIRST_TOKEN_S or queue.value >= QUEUE_SHARE * first.value:
        return None
    uncached = case.mean("uncached_prompt_tokens_histogram")
    tokens = "" if uncached is None else f"; {uncached.value:.0f} tokens of a prompt are computed"
    return Finding(
        name="slow-prefill",
        title="The first token is late because prompts take long to compute",
        seen=_first_token(first, queue) + tokens,
        why="what is not found in the cache is computed before the first token, and other prompts of the batch with it",
        fix=(
            "find more of it: pin documents (POST /csa2/documents), shared text first; csa2 doctor --prompts FILE",
            SHORT_FIRST,
            *(("compiled code instead of the reference",) if case.options["impl"] == "reference" else ()),
        ),
        anchor="slow-first-token",
    )


def slow_late_turns(case: Case) -> Finding | None:
    """Long prompts, as of late turns, are computed again for the most part."""
    prompt = case.mean("prompt_tokens_histogram", MIN_REQUESTS)
    uncached = case.mean("uncached_prompt_tokens_histogram", MIN_REQUESTS)
    if prompt is None or uncached is None or prompt.value < LONG_PROMPT_TOKENS:
        return None
    if uncached.value < MUCH_UNCACHED * prompt.value:
        return None
    return Finding(
        name="slow-late-turns",
        title="Long prompts are computed again, so each turn of a conversation is slower than the last",
        seen=f"a prompt has {prompt.value:.0f} tokens, {uncached.value:.0f} of them are computed (means of {prompt.count} "
        f"requests); {case.stats['evicted_tokens_total']} tokens were evicted",
        why="a turn that repeats its conversation word for word computes its new tokens only; these do not, or their pages "
        "are gone",
        fix=(
            "if tokens are evicted: a larger --csa2-arena-size, or --csa2-ratio auto",
            "if not: csa2 doctor --prompts FILE with the prompts of successive turns shows which early text changes",
            "send the answers back unchanged, thoughts of reasoning models included if the template keeps them",
        ),
        anchor="slower-with-each-turn",
    )


def concurrency_costs(case: Case) -> Finding | None:
    """More requests at once, and fewer tokens a second."""
    paces = [pace for pace in case.paces if pace.busy_s > 0]
    if not paces:
        return None
    least, most = (pick(pace.batch for pace in paces) for pick in (min, max))
    if most < MORE_REQUESTS * least:
        return None
    few = _tokens_per_s([pace for pace in paces if pace.batch**2 <= least * most])
    many = _tokens_per_s([pace for pace in paces if pace.batch**2 > least * most])
    if many >= LESS_THROUGHPUT * few:
        return None
    return Finding(
        name="concurrency-lowers-throughput",
        title="More requests at once generate fewer tokens",
        seen=f"{few:.0f} tokens/s with about {least:.0f} at once, {many:.0f} with about {most:.0f}",
        why="prefills of arriving prompts stop decoding, or the processor is shared out among too many; beyond the best "
        "concurrency all get slower and none is faster",
        fix=(
            f"--max-running-requests {max(1, round(least))}: the others wait, and answers come sooner",
            "--chunked-prefill-size 512 --enable-mixed-chunk: decoding goes on while prompts arrive",
            "python benchmark/mixed_load.py: measures settings of the scheduler on your machine",
        ),
        anchor="throughput-that-drops",
    )


def retractions(case: Case) -> Finding | None:
    """Running requests lost their pages."""
    counted = case.rise("num_retracted_requests_total")
    waiting = max((load.retracted for load in case.loads), default=0)
    if not counted and not waiting:
        return None
    return Finding(
        name="retractions",
        title="Running requests lose their pages and start over",
        seen=f"{counted:.0f} retracted in {case.seconds:.0f} s, up to {waiting} waiting to start over; "
        f"{case.of_arena('used_bytes'):.0%} of the arena is in use",
        why="what a retracted request computed is computed again: memory for the answers of all that run was not there",
        fix=_let_more_run(case, retracting=True),
        anchor="out-of-memory-under-concurrency",
    )


def _first_token(first: Mean, queue: Mean) -> str:
    return f"first token after {first.value:.1f} s, {queue.value:.1f} of them in the queue (mean of {first.count} requests)"


def _running(case: Case) -> str:
    if not case.loads:
        return "how many run is not known"
    running = max(load.running for load in case.loads)
    return f"up to {running} run at once, {case.of_arena('used_bytes'):.0%} of the arena is in use"


def _limit_reached(case: Case) -> int | None:
    """--max-running-requests, if as many run."""
    return next((load.limit for load in case.loads if load.limit and load.running >= load.limit), None)


def _why_they_wait(case: Case) -> str:
    if (limit := _limit_reached(case)) is not None:
        return f"--max-running-requests {limit} run already, and no more may"
    if case.of_arena("live_bytes") >= QUEUE_SHARE:
        return "what runs holds most of the arena, and a request starts only when it can finish"
    return "they wait for the processor: prompts are computed one batch after the other"


def _let_more_run(case: Case, retracting: bool = False) -> tuple[str, ...]:
    if not retracting and (limit := _limit_reached(case)) is not None:
        return (f"a larger --max-running-requests than {limit}", "more servers behind a router")
    ratio = str(case.options["ratio"])
    fixes = [] if ratio in ("auto", "8") else [f"smaller old pages: --csa2-ratio auto instead of {ratio}"]
    fixes.append("more memory: a larger --csa2-arena-size; csa2 plan says how much")
    if retracting:
        fixes.append("fewer at once: a smaller --max-running-requests, or a larger --schedule-conservativeness")
    else:
        fixes.append(SHORT_FIRST)
    return tuple(fixes)


def _tokens_per_s(paces: Sequence[Pace]) -> float:
    return sum(pace.tokens for pace in paces) / sum(pace.busy_s for pace in paces)


RULES = (queueing, slow_prefill, slow_late_turns, concurrency_costs, retractions)
