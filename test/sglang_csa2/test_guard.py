"""The agreement guard in a real scheduler: SGLang's strict memory checks run after every step."""

from collections.abc import Iterator
from typing import Any

import pytest
from scheduler_runs import PAGE, Ask, Command, Result, SchedulerForks, words

pytestmark = pytest.mark.e2e

ROOMY = 130
"""Plain pages of an arena in which nothing here is short of memory."""
ALWAYS: dict[str, Any] = {"csa2_guard": 1.0}
ATTENTION = 4.0
"""Weight of attention with which predictions depend on what pages hold."""


OVERWRITTEN = [Ask("other", words(1, 800), 2), Ask("a", words(2, 800), 110, after=("other", 0))]
"""Two requests with pages that can take each other's bytes."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerForks]:
    schedulers = SchedulerForks(tmp_path_factory.mktemp("schedulers"))
    yield schedulers
    schedulers.close()


def guard(result: Result) -> dict[str, Any]:
    """What the guard counted, of a run in which every request came to its end."""
    assert result.stuck == []
    assert {ending.kind for ending in result.endings.values()} <= {"length"}, result.endings
    return {key.removeprefix("guard_"): value for key, value in result.stats.items() if key.startswith("guard_")}


@pytest.mark.parametrize(("chunk", "overlap"), [(PAGE, True), (256, False)])
def test_where_pages_decide_nothing_everything_agrees(forks: SchedulerForks, chunk: int, overlap: bool) -> None:
    """The guard compares the right step: another token of the sequence would give another prediction."""
    asks = [Ask("a", words(1, 330), 40)]
    options = {"chunked_prefill_size": chunk, "disable_overlap_schedule": not overlap, **ALWAYS}
    counts = guard(forks.run(asks, ROOMY, in_flight=1, **options))
    assert counts["compared_total"] >= 5
    assert counts["agreed_total"] == counts["compared_total"]
    assert (counts["agreement"], counts["backoffs_total"]) == (1, 0)


def test_pages_of_others_are_found_out(forks: SchedulerForks) -> None:
    whole, corrupt = (
        guard(forks.run(OVERWRITTEN, ROOMY, in_flight=1, commands=commands, attention=ATTENTION, **ALWAYS))
        for commands in ([], [Command("corrupt", "corrupt", after=("a", 1))])
    )
    assert whole["agreement"] > 0.9
    assert 0 < corrupt["agreed_total"] < 0.8 * corrupt["compared_total"]
    assert corrupt["agreement"] == corrupt["agreed_total"] / corrupt["compared_total"]


def test_too_little_agreement_lowers_the_ratio_rung_by_rung_until_somebody_lifts_the_limit(forks: SchedulerForks) -> None:
    """Ten samples a judgement. Memory alone would keep the ratio of 4 that it is left with."""
    commands = [
        Command("fix", "ratio", {"ratio": 4}),
        Command("follow", "ratio", {"ratio": None}),
        Command("corrupt", "corrupt", after=("a", 1)),
        Command("first", "stats", after=("a", 26)),
        Command("last", "stats", after=("a", 100)),
        Command("lift", "ratio", {"ratio": None}, ("a", 102)),
        Command("lifted", "stats"),
    ]
    options = {**ALWAYS, "csa2_low_watermark": 0.0, "csa2_guard_min": 0.95}
    result = forks.run(OVERWRITTEN, ROOMY, in_flight=1, commands=commands, attention=ATTENTION, window=10, **options)
    guard(result)
    seen = [result.replies[name][1] for name in ("first", "last", "lifted")]
    assert [(s["ratio_ceiling"], s["target_ratio"]) for s in seen] == [(2, 2), (1, 1), (8, 1)]
    assert seen[0]["guard_backoffs_total"] == 1
    assert seen[1]["guard_backoffs_total"] > 2, "it says so again when there is nowhere to go"


def test_a_ratio_that_somebody_fixed_stays(forks: SchedulerForks) -> None:
    options = {**ALWAYS, "csa2_ratio": "4", "csa2_guard_min": 0.95}
    commands = [Command("corrupt", "corrupt", after=("a", 1))]
    result = forks.run(OVERWRITTEN, ROOMY, in_flight=1, commands=commands, attention=ATTENTION, window=10, **options)
    assert guard(result)["backoffs_total"] > 0
    assert (result.stats["target_ratio"], result.stats["ratio_ceiling"]) == (4, 8)


def test_nothing_else_changes(forks: SchedulerForks) -> None:
    """Answers, what was found, what pages are worth and how old they are: as without the guard."""
    text = words(1, 330)
    asks = [Ask("a", text, 20), Ask("b", (*text, *words(2, 50)), 20), Ask("c", words(3, 400), 20)]
    without, with_guard = (forks.run(asks, ROOMY, in_flight=1, attention=ATTENTION, **options) for options in ({}, ALWAYS))
    assert guard(without) == {
        "compared_total": 0,
        "agreed_total": 0,
        "skipped_total": 0,
        "backoffs_total": 0,
        "agreement": None,
    }
    assert guard(with_guard)["compared_total"] > 5
    for same in ("endings", "answers", "hits", "mapped_total", "tree_tokens"):
        assert getattr(with_guard, same) == getattr(without, same), same
    for key in ("turns_total", "prompt_tokens_total", "prefix_hit_tokens_total", "pages", "target_ratio"):
        assert with_guard.stats[key] == without.stats[key], key


@pytest.mark.parametrize("overlap", [True, False])
def test_a_flush_does_not_wait_for_it(forks: SchedulerForks, overlap: bool) -> None:
    """Wherever the reference is: in the queue, between chunks, or in a forward pass."""
    asks, commands = [], []
    for i in range(8):
        asks.append(Ask(f"r{i}", words(i, 300), 3, after=(f"flush{i - 1}", 0) if i else None))
        commands.append(Command(f"flush{i}", "flush now", after=(f"r{i}", 3), turns=i + 1))
    options = {"chunked_prefill_size": PAGE, "disable_overlap_schedule": not overlap, **ALWAYS}
    result = forks.run(asks, ROOMY, in_flight=1, commands=commands, **options)
    counts = guard(result)
    assert list(result.replies.values()) == [[200, True]] * 8
    assert counts["skipped_total"] > 0
    assert counts["compared_total"] > 0
    assert {ending.cached_tokens for ending in result.endings.values()} == {0}


def test_it_gives_way_to_who_arrives(forks: SchedulerForks) -> None:
    """A client comes at every third token: references in the queue and between two chunks are withdrawn."""
    visitors = [Ask(f"v{i}", words(10 + i, 20), 2, after=("a", 3 * i + 1)) for i in range(12)]
    options = {"chunked_prefill_size": PAGE, **ALWAYS}
    result = forks.run([Ask("a", words(1, 330), 60), *visitors], ROOMY, **options)
    counts = guard(result)
    assert counts["skipped_total"] >= 6
    assert counts["compared_total"] > 0


def test_it_is_left_out_where_memory_is_short(forks: SchedulerForks) -> None:
    """What the request reads is more than the high watermark."""
    options = {"csa2_high_watermark": 0.02, "csa2_low_watermark": 0.0, **ALWAYS}
    counts = guard(forks.run([Ask("a", words(1, 330), 20)], ROOMY, **options))
    assert counts["skipped_total"] >= 10
    # When the request has ended nothing is live, and its last step may be compared.
    assert counts["compared_total"] <= 1


def test_a_crowd_is_served_as_without_it(forks: SchedulerForks) -> None:
    """More than the arena holds at once, aborts among it: nothing is lost, and nobody is retracted for it."""
    crowd = [Ask(f"r{i}", words(i, 200 + 37 * i % 150), 20, abort_after=9 if i % 4 == 3 else None) for i in range(16)]
    options = {"context_length": 1024, "csa2_ratio": "4"}
    without, with_guard = (forks.run(crowd, 48, in_flight=6, **options, **extra) for extra in ({}, ALWAYS))
    kinds = [{rid: ending.kind for rid, ending in result.endings.items()} for result in (without, with_guard)]
    assert without.stuck == with_guard.stuck == []
    assert kinds[0] == kinds[1]
    assert set(kinds[0].values()) == {"length", "abort"}
    assert with_guard.retracted == without.retracted == 0
    assert with_guard.stats["guard_compared_total"] > 0
    assert with_guard.stats["guard_skipped_total"] > 0


def test_aborting_everything_aborts_it_too(forks: SchedulerForks) -> None:
    asks = [Ask("a", words(1, 300), 40, abort_after=50), Ask("b", words(2, 300), 12, after=("abort3", 0))]
    commands = [Command(f"abort{i}", "abort all", after=("a", 5) if i == 0 else None, turns=i) for i in range(4)]
    result = forks.run(asks, ROOMY, commands=commands, chunked_prefill_size=PAGE, **ALWAYS)
    assert result.stuck == []
    assert (result.endings["a"].kind, result.endings["b"].kind) == ("abort", "length")
    assert result.stats["guard_compared_total"] > 0


def test_documents_are_no_samples(forks: SchedulerForks) -> None:
    """They predict nothing. A hit on one is a sample like any other."""
    text = words(1, 6 * PAGE)
    payload = {"page_format": None, "extra_key": None, "ttl": None, "serial": 1}
    payload |= {"document_id": "doc", "input_ids": list(text)}
    asks = [Ask("hit", (*text, *words(2, 20)), 8, after=("hits", 0))]
    commands = [Command("doc", "document_add", payload), Command("hits", "stats", after=("doc", 0))]
    result = forks.run(asks, ROOMY, commands=commands, **ALWAYS)
    assert guard(result)["compared_total"] > 0
    assert result.replies["hits"][1]["guard_compared_total"] == 0
    assert result.endings["hit"].cached_tokens == 6 * PAGE
