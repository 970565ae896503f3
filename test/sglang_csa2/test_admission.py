"""Admission, chunks, retraction and eviction in a real scheduler whose arena is too small.

A run fails by itself if SGLang's strict memory check finds a leak after any step, if a request reads a page that is not
its own, or if anything is left after the last request.
"""

import random
from collections.abc import Iterator

import pytest
from scheduler_runs import PAGE, Ask, Result, SchedulerForks, words

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerForks]:
    schedulers = SchedulerForks(tmp_path_factory.mktemp("schedulers"))
    yield schedulers
    schedulers.close()


def kinds(result: Result) -> dict[str, str]:
    return {rid: ending.kind for rid, ending in result.endings.items()}


@pytest.mark.parametrize(("plain_pages", "chunk", "ratio"), [(31, PAGE, 1), (31, 512, 1), (31, -1, 1), (5, PAGE, 8)])
def test_the_longest_prompt_is_served_and_the_next_one_names_the_limit(
    forks: SchedulerForks, plain_pages: int, chunk: int, ratio: int
) -> None:
    options = {"chunked_prefill_size": chunk, "csa2_ratio": str(ratio)}
    limit = forks.run([Ask("a", words(0, 5), 1)], plain_pages, **options).max_prompt_tokens
    asks = [
        Ask("before", words(0, PAGE + 5), 1),
        # Beside a page of its own in the cache, and beside pages of others.
        Ask("longest", words(0, PAGE) + words(1, limit - 1 - PAGE), 4000, after=("before", 9)),
        Ask("another", words(2, limit - 1), 1, after=("longest", 9999)),
        Ask("beyond", words(3, limit), 1, after=("another", 9)),
    ]
    result = forks.run(asks, plain_pages, **options)
    assert result.stuck == []
    assert kinds(result) == {"before": "length", "longest": "length", "another": "length", "beyond": "abort"}
    assert result.endings["longest"].cached_tokens == PAGE
    assert result.endings["longest"].tokens >= 1
    assert result.endings["beyond"].status == 400
    assert f"maximum allowed length ({limit} tokens)" in result.endings["beyond"].message


def test_a_request_that_ignores_eos_starts_without_a_radix_tree(forks: SchedulerForks) -> None:
    """768 tokens fit in bf16. SGLang would ask for its whole future at that price and never start it."""
    asks = [Ask("long", words(0, 700), 60), Ask("short", words(1, 30), 600), Ask("eos", words(2, 300), 60, False)]
    result = forks.run(asks, 12, disable_radix_cache=True)
    assert result.stuck == []
    assert result.endings["long"].tokens == 60
    assert result.endings["short"].tokens == 600
    assert result.tree_tokens == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_prompt_does_not_take_the_last_slab(forks: SchedulerForks, overlap: bool) -> None:
    """At a page border a request holds no open page. The prompt that comes then must leave it room for the next one:
    stopped halfway it would hold all memory, and the running request, alone in its batch, would be aborted."""
    limit = forks.run([Ask("a", words(0, 5), 1)], 24).max_prompt_tokens
    for tokens in (28, 29):  # 420 and 28 tokens are 7 pages; without overlap it is seen a step later
        asks = [
            Ask("running", words(0, 420), 160, ignore_eos=False),
            Ask("long", words(1, limit - 1), 4, after=("running", tokens)),
        ]
        result = forks.run(asks, 24, new_token_ratio=0.01, chunked_prefill_size=PAGE, disable_overlap_schedule=not overlap)
        assert result.stuck == []
        assert "abort" not in kinds(result).values(), result.endings


def test_decodes_do_not_run_out_of_room_that_was_checked(forks: SchedulerForks) -> None:
    """Many short answers at once, each with an open page, and slabs of two: making room for more pages than needed must
    not leave less room for those that are."""
    asks = [Ask(f"r{i}", words(i, 40 + 37 * i % 300), 200, ignore_eos=False) for i in range(40)]
    result = forks.run(asks, 31, new_token_ratio=0.01, csa2_ratio="1")
    assert result.stuck == []
    assert "abort" not in kinds(result).values()
    assert result.retracted > 0


def workload(seed: int, count: int, longest: int) -> list[Ask]:
    """Requests of all lengths around page borders, with shared beginnings, repeats and aborts."""
    chance = random.Random(seed)
    asks: list[Ask] = []
    for i in range(count):
        length = chance.choice((1, 63, 64, 65, 128, 129, chance.randrange(1, longest // 4), chance.randrange(1, longest)))
        prompt = words(1000 * seed + i, length)
        if chance.random() < 0.4:
            prompt = (words(chance.randrange(3), chance.choice((64, 128, 200))) + prompt)[: longest - 1]
        if asks and chance.random() < 0.1:
            prompt = chance.choice(asks).prompt
        abort = chance.randrange(30) if chance.random() < 0.1 else None
        asks.append(Ask(f"r{i}", prompt, chance.choice((1, 2, 20, 60, 150)), chance.random() < 0.5, abort_after=abort))
    return asks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain_pages", "in_flight", "options"),
    [
        (6, 12, {"chunked_prefill_size": 64}),
        (12, 4, {"chunked_prefill_size": 128, "enable_mixed_chunk": True}),
        (24, 30, {"chunked_prefill_size": 256, "disable_overlap_schedule": True, "schedule_policy": "lof"}),
        (31, 30, {"chunked_prefill_size": 512, "schedule_policy": "lpm"}),
        (31, 30, {"chunked_prefill_size": 1024, "enable_mixed_chunk": True}),
        (31, 12, {"chunked_prefill_size": -1}),
        (12, 12, {"disable_radix_cache": True}),
    ],
    ids=["tiny", "mixed", "no overlap", "slabs of two", "large chunks", "no chunks", "no tree"],
)
def test_a_full_arena(forks: SchedulerForks, plain_pages: int, in_flight: int, options: dict[str, object]) -> None:
    assert_served(forks, plain_pages, in_flight, 60, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain_pages", "in_flight", "options"),
    [
        (6, 12, {"chunked_prefill_size": 64, "csa2_ratio": "8", "csa2_hot_tokens": 64, "csa2_warm_tokens": 64}),
        (12, 30, {"chunked_prefill_size": 128, "csa2_ratio": "4", "csa2_shared_format": "tail", "enable_mixed_chunk": True}),
        (24, 30, {"chunked_prefill_size": 256, "csa2_ratio": "2", "csa2_shared_format": "k8v4"}),
        (12, 12, {"csa2_ratio": "8", "csa2_protect_tokens": 200, "disable_radix_cache": True}),
        (12, 12, {"csa2_ratio": "4", "csa2_protect_tokens": 0, "chunked_prefill_size": -1}),
        (12, 12, {"csa2_tail_format": "fp8", "chunked_prefill_size": 128}),
        (12, 12, {"radix_eviction_policy": "slru", "csa2_shared_format": "k8v4", "csa2_adjust_interval": 1}),
    ],
    ids=["8", "4 mixed", "2 and k8v4", "8 no tree", "4 no chunks", "fp8", "auto and slru"],
)
def test_a_full_arena_with_smaller_formats(
    forks: SchedulerForks, plain_pages: int, in_flight: int, options: dict[str, object]
) -> None:
    result = assert_served(forks, plain_pages, in_flight, 20, options)
    ratio = options.get("csa2_ratio")
    assert ratio is None or any(n for step, n in result.stats["demotions_total"].items() if step.endswith(f"csa2-{ratio}x"))


def assert_served(forks: SchedulerForks, plain_pages: int, in_flight: int, count: int, options: dict[str, object]) -> Result:
    """Serve `count` requests from an arena that is too small for them."""
    limit = forks.run([Ask("a", words(0, 5), 1)], plain_pages, **options).max_prompt_tokens
    asks = workload(plain_pages, count, min(limit, 1500))
    result = forks.run(asks, plain_pages, in_flight, new_token_ratio=0.05, **options)
    assert result.stuck == []
    assert result.endings.keys() == {ask.rid for ask in asks}
    for ask in asks:
        ending = result.endings[ask.rid]
        if ending.kind == "length":
            assert ending.tokens == ask.max_new_tokens or len(ask.prompt) + ask.max_new_tokens >= limit
        elif ending.kind == "abort":
            # Only where it was asked for: nothing was given up for lack of memory.
            assert ask.abort_after is not None, ending
    assert sum(result.stats["demotions_total"].values()) > 0
    assert result.checked > count
    return result
