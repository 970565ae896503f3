"""Findings about what the cache holds: hits, memory, ratio. Each rule looks at one case and finds one thing, or None."""

from csa2.doctor.finding import Finding
from csa2.doctor.readings import Case
from csa2.units import format_bytes

MIN_PROMPT_TOKENS = 4096
"""Fewer say nothing about hits."""
LOW_HITS = 0.3
MANY_EVICTED = 0.1
"""Evicted tokens, as a share of prompt tokens."""
FULL = 0.8
LITTLE_COMPRESSION = 2.0
LARGE_SHARE = 0.5
CHUNK_SHARE = 0.2
"""Of the arena, that a chunk may take."""
MUCH_WASTE = 0.15
"""Of the arena."""
MAX_RATIO = 8.0
REDUCED = "csa2-"


def hits_switched_off(case: Case) -> Finding | None:
    """The radix cache is off."""
    if not case.arguments.get("disable_radix_cache"):
        return None
    return Finding(
        name="radix-cache-off",
        title="The server was started without prefix caching",
        seen="--disable-radix-cache",
        why="every prompt is computed from its first token, whatever was served before",
        fix=("start it without --disable-radix-cache",),
        anchor="low-hit-rate",
    )


def low_hits(case: Case) -> Finding | None:
    """Few prompt tokens were found in the cache, and not for want of memory."""
    prompt, hits = case.stats["prompt_tokens_total"], case.stats["prefix_hit_tokens_total"]
    if prompt < MIN_PROMPT_TOKENS or hits / prompt >= LOW_HITS or _evicts(case) or hits_switched_off(case):
        return None
    return Finding(
        name="low-hit-rate",
        title="Few prompt tokens are found in the cache",
        seen=f"{hits} of {prompt} prompt tokens ({hits / prompt:.0%})",
        why=f"prompts are found from their first token on, by whole pages of {case.page_size}: one early difference, and "
        f"all after it is computed again",
        fix=(
            "csa2 doctor --prompts FILE, some of the prompts one a line: it shows where they first differ",
            "put what all prompts share first and what varies (date, user, id) last",
            "pin documents that many will ask about: POST /csa2/documents",
        ),
        anchor="low-hit-rate",
    )


def evicted(case: Case) -> Finding | None:
    """Much is evicted, so what comes back is not found."""
    if not _evicts(case):
        return None
    gone, prompt = case.stats["evicted_tokens_total"], case.stats["prompt_tokens_total"]
    hits = case.stats["prefix_hit_tokens_total"]
    return Finding(
        name="evictions",
        title="Conversations are evicted before they come back",
        seen=f"{gone} tokens evicted for {prompt} prompt tokens, of which {hits / prompt:.0%} were found; "
        f"{case.of_arena('used_bytes'):.0%} of the arena is in use",
        why="a conversation whose pages are gone is computed again from its first token with the next turn",
        fix=(*_smaller_pages(case), "more memory: a larger --csa2-arena-size", "pin what many share: POST /csa2/documents"),
        anchor="slower-with-each-turn",
    )


def memory_stays_high(case: Case) -> Finding | None:
    """The arena is full of pages that are hardly compressed, in both readings: a prompt in work is so for a while."""
    if any(
        reading.stats["used_bytes"] < FULL * reading.stats["arena_bytes"]
        or reading.stats["compression_ratio"] >= LITTLE_COMPRESSION
        for reading in (case.first, case.last)
    ):
        return None
    sizes = case.bytes_by_format
    shares = ", ".join(f"{name} {sizes[name] / sum(sizes.values()):.0%}" for name in sizes if sizes[name])
    return Finding(
        name="memory-not-falling",
        title="The arena is full, and little of it is compressed",
        seen=f"{case.of_arena('used_bytes'):.0%} of {format_bytes(case.stats['arena_bytes'])} in use, "
        f"{case.stats['compression_ratio']:.1f} times smaller than bf16; bytes by format: {shares}",
        why=_reason(case),
        fix=_remedies(case),
        anchor="memory-that-rises",
    )


def pinned_too_much(case: Case) -> Finding | None:
    """Pinned documents take most of the arena."""
    share = case.of_arena("pinned_bytes")
    if share < LARGE_SHARE:
        return None
    # Documents are told to admins only.
    largest = max(case.documents, key=lambda document: int(document["bytes"]), default=None)
    named = "" if largest is None else f"; the largest is {largest['id']!r} with {format_bytes(largest['bytes'])}"
    return Finding(
        name="pinned-documents",
        title="Pinned documents take most of the arena",
        seen=f"{case.stats['documents']} documents with {format_bytes(case.stats['pinned_bytes'])}, {share:.0%} of the "
        f"arena{named}",
        why="pinned pages get smaller under pressure but are never evicted: what is left for requests is the rest",
        fix=(
            "unpin what nobody asks about (hits in GET /csa2/documents): DELETE /csa2/documents/ID",
            'pin with "format": "k8v4" or "fp4", or with "ttl"',
            "more memory: a larger --csa2-arena-size",
        ),
        anchor="memory-that-rises",
    )


def failed_documents(case: Case) -> Finding | None:
    """Documents that could not be encoded."""
    failed = [document for document in case.documents if document["state"] == "failed"]
    if not failed:
        return None
    return Finding(
        name="failed-documents",
        title="Documents are not in the cache",
        seen="; ".join(f"{document['id']!r}: {document['message']}" for document in failed[:3]),
        why="requests that begin with them compute them each time",
        fix=("send them again: POST /csa2/documents", "or remove them: DELETE /csa2/documents/ID"),
        anchor="low-hit-rate",
    )


def fragmented(case: Case) -> Finding | None:
    """Slabs in use hold much less than they could, and something was evicted: sparse slabs are emptied when memory asks."""
    waste = case.of_arena("slab_bytes") - case.of_arena("used_bytes")
    if waste < MUCH_WASTE or case.of_arena("slab_bytes") < FULL or not case.stats["evicted_tokens_total"]:
        return None
    formats = [name for name, count in case.stats["pages"].items() if count]
    return Finding(
        name="fragmentation",
        title="Part of the arena lies in slabs that are not full",
        seen=f"{case.of_arena('slab_bytes'):.0%} of the arena is in slabs, {case.of_arena('used_bytes'):.0%} in pages; "
        f"formats in use: {', '.join(formats)}; {case.stats['evicted_tokens_total']} tokens were evicted",
        why="a slab holds pages of one format; up to one slab of each can be part empty, which is much of a small arena",
        fix=(
            "a larger --csa2-arena-size: the waste does not grow with it",
            "fewer formats: a fixed --csa2-ratio instead of auto",
        ),
        anchor="fragmentation",
    )


def ratio_at_its_end(case: Case) -> Finding | None:
    """The adaptive ratio can go no further."""
    target = case.stats["target_ratio"]
    if case.options["ratio"] != "auto" or target < MAX_RATIO:
        return None
    return Finding(
        name="ratio-at-its-end",
        title="The adaptive ratio is at its end",
        seen=f"target ratio {target:g} of {MAX_RATIO:g}; live pages take {case.of_arena('live_bytes'):.0%} of the arena "
        f"(it goes up above {case.options['high_watermark']:.0%})",
        why="old pages are as small as they get, at the largest loss of quality; further load is evicted or waits",
        fix=(
            "more memory: a larger --csa2-arena-size",
            "fewer requests at once: a smaller --max-running-requests",
            'cap what a request may lose: "custom_params": {"csa2_ratio": 2}',
        ),
        anchor="lost-long-context",
    )


def guard_backed_off(case: Case) -> Finding | None:
    """The agreement guard saw compressed and uncompressed predictions differ."""
    stats, least = case.stats, case.options.get("guard_min")
    agreement, backoffs = stats.get("guard_agreement"), stats.get("guard_backoffs_total", 0)
    if least is None or not (backoffs or (agreement is not None and agreement < least)):
        return None
    return Finding(
        name="low-agreement",
        title="Compressed pages change what the model says",
        seen=f"{0.0 if agreement is None else agreement:.1%} of the last samples agree, {least:.0%} are wanted; backed off "
        f"{backoffs} times, the ratio may go up to {stats.get('ratio_ceiling', MAX_RATIO):g}",
        why="the guard lowers the ratio, so less fits; what is compressed already stays as it is",
        fix=(
            "csa2 calibrate on text like what is served, then --csa2-calibration DIR",
            "csa2 check --model DIR --text FILE: what each format costs",
            'when the cause is gone: POST /csa2/ratio {"ratio": "auto"} lifts the limit',
        ),
        anchor="repetition",
    )


def _evicts(case: Case) -> bool:
    prompt, gone = case.stats["prompt_tokens_total"], case.stats["evicted_tokens_total"]
    return bool(prompt >= MIN_PROMPT_TOKENS and gone / prompt >= MANY_EVICTED)


def _smaller_pages(case: Case) -> tuple[str, ...]:
    """The flag that makes old pages smaller, if there is one."""
    ratio = str(case.options["ratio"])
    return () if ratio in ("auto", "8") else (f"smaller old pages: --csa2-ratio auto instead of {ratio}",)


def _reason(case: Case) -> str:
    largest = _largest_format(case)
    if largest != "bf16":
        return (
            f"most bytes are in {largest}: prompts, and pages that several requests used, stay in --csa2-shared-format "
            f"{case.options['shared_format']} while they can"
        )
    if _chunk_share(case) >= LARGE_SHARE:
        return (
            f"prompts are written uncompressed, by chunks of up to {case.arguments['chunked_prefill_size']} tokens, and one "
            f"of them is {_chunk_share(case):.0%} of the arena"
        )
    return (
        f"pages stay as the model wrote them in the newest {case.options['hot_tokens']} tokens and the first "
        f"{case.options['protect_tokens']} of each request; with short requests that is most of them"
    )


def _chunk_share(case: Case) -> float:
    """Bytes of the longest chunk of a prompt, uncompressed, as a share of the arena."""
    tokens = case.arguments.get("chunked_prefill_size") or 0
    return float(tokens * case.stats["page_bytes"]["bf16"] / case.page_size / case.stats["arena_bytes"])


def _remedies(case: Case) -> tuple[str, ...]:
    options, largest = case.options, _largest_format(case)
    fixes = []
    if options["tail_format"] != "ratio":
        fixes.append(
            f"--csa2-tail-format ratio instead of {options['tail_format']}: private pages then get 4 bits and fewer"
        )
    elif options["ratio"] == "1":
        fixes.append("--csa2-ratio auto instead of 1: old pages then become smaller than 4 bits")
    if largest == "bf16" and _chunk_share(case) >= LARGE_SHARE:
        tokens = max(case.page_size, int(case.arguments["chunked_prefill_size"] * CHUNK_SHARE / _chunk_share(case)))
        fixes.append(f"--chunked-prefill-size {tokens // case.page_size * case.page_size}")
    elif largest == "bf16":
        hot = max(case.page_size, int(options["hot_tokens"]) // 2)
        fixes.append(f"--csa2-hot-tokens {hot} and --csa2-protect-tokens 0: fewer tokens stay uncompressed")
    elif options["shared_format"] == largest:
        smaller = "k8v4" if largest in ("fp8", "bf16") else "fp4"
        fixes.append(f"--csa2-shared-format {smaller} instead of {largest}")
    return (*fixes, "csa2 plan: how many requests fit in which format")


def _largest_format(case: Case) -> str:
    sizes = case.bytes_by_format
    return max(sizes, key=lambda name: sizes[name])


RULES = (
    hits_switched_off,
    low_hits,
    evicted,
    memory_stays_high,
    pinned_too_much,
    failed_documents,
    fragmented,
    ratio_at_its_end,
    guard_backed_off,
)
