"""Pinned documents in a real scheduler: SGLang's strict memory checks run after every step, and the pages of a request are
compared with what the model writes."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from scheduler_runs import PAGE, Ask, Command, Result, SchedulerForks, words

pytestmark = pytest.mark.e2e

SMALL = {"context_length": 1024, "csa2_ratio": "4"}
"""Requests much smaller than an arena of 24 plain pages."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerForks]:
    schedulers = SchedulerForks(tmp_path_factory.mktemp("schedulers"))
    yield schedulers
    schedulers.close()


SERIALS = itertools.count(1)


def add(document_id: str, tokens: tuple[int, ...], after: str | None = None, name: str = "", **more: Any) -> Command:
    """A command that pins `tokens`, named as the document unless `name` says otherwise."""
    payload = {"page_format": None, "extra_key": None, "ttl": None, "serial": next(SERIALS), **more}
    payload |= {"document_id": document_id, "input_ids": list(tokens)}
    return Command(name or document_id, "document_add", payload, None if after is None else (after, 0))


def show(document_id: str, after: str, name: str = "show") -> Command:
    return Command(name, "document", {"document_id": document_id}, (after, 0))


def served(result: Result) -> None:
    """Every request came to its end."""
    assert result.stuck == []
    assert all(ending.kind == "length" for ending in result.endings.values()), result.endings


@pytest.mark.parametrize("chunk", [PAGE, 256, -1])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_document_survives_pressure_and_is_found(forks: SchedulerForks, chunk: int, overlap: bool) -> None:
    """Pressure evicts everything else; the document gets smaller and stays."""
    text = words(1, 8 * PAGE + 20)
    crowd = [Ask(f"r{i}", words(100 + i, 700), 100, after=("doc", 0)) for i in range(24)]
    asks = [*crowd, Ask("hit", (*text[: 8 * PAGE], *words(2, 30)), 4, after=("r23", 0))]
    commands = [add("doc", text), show("doc", "hit")]
    options = {**SMALL, "chunked_prefill_size": chunk, "disable_overlap_schedule": not overlap}
    result = forks.run(asks, 24, in_flight=6, commands=commands, **options)
    served(result)
    assert result.stats["evicted_tokens_total"] > 0
    assert result.endings["hit"].cached_tokens == 8 * PAGE
    pinned, status = result.replies["doc"][1], result.replies["show"][0]
    assert (status, pinned["tokens"], pinned["pages"], pinned["hits"]) == (200, 8 * PAGE, 8, 0)
    assert pinned["formats"] == {"bf16": 1, "fp8": 7}
    after = result.replies["show"][1]
    assert after["hits"] == 1
    assert after["bytes"] < pinned["bytes"]
    assert sum(after["formats"].values()) == 8


@pytest.mark.parametrize(
    ("page_format", "stored"), [("bf16", {"bf16": 4}), ("fp8", {"bf16": 1, "fp8": 3}), ("fp4", {"bf16": 1, "fp4": 3})]
)
def test_a_document_has_the_format_it_asks_for(forks: SchedulerForks, page_format: str, stored: dict[str, int]) -> None:
    result = forks.run([], 31, commands=[add("doc", words(1, 4 * PAGE), page_format=page_format)], **SMALL)
    assert (result.stuck, result.replies["doc"][1]["formats"]) == ([], stored)


def test_the_same_again_is_the_same_document_and_another_is_refused(forks: SchedulerForks) -> None:
    text = words(1, 3 * PAGE)
    commands = [
        add("a", text),
        add("a", text, "a", "again", ttl=5.0),
        add("a", words(2, 3 * PAGE), "again", "other"),
        add("a", text, "other", "other key", extra_key="k"),
        add("a", text, "other key", "other format", page_format="fp4"),
        Command("gone", "document_remove", {"document_id": "a"}, ("other format", 0)),
        show("a", "gone", "unknown"),
        Command("twice", "document_remove", {"document_id": "a"}, ("unknown", 0)),
        add("a", words(2, 3 * PAGE), "twice", "new"),
    ]
    result = forks.run([], 31, commands=commands, **SMALL)
    first, again, new = (result.replies[name][1] for name in ("a", "again", "new"))
    assert (again["serial"], again["ttl"], first["ttl"]) == (first["serial"], 5.0, None)
    assert [result.replies[name][0] for name in ("other", "other key", "other format")] == [409] * 3
    assert "exists with other content" in result.replies["other"][1]["message"]
    assert [result.replies[name][0] for name in ("gone", "unknown", "twice")] == [200, 404, 404]
    assert new["state"] == "resident"
    assert new["serial"] > first["serial"]


def test_documents_share_pages_and_each_keeps_its_own(forks: SchedulerForks) -> None:
    """One is removed: what the other has of it stays pinned."""
    start = words(1, 4 * PAGE)
    commands = [
        add("long", (*start, *words(2, 4 * PAGE))),
        add("short", start, "long"),
        add("other", (*start, *words(3, 2 * PAGE)), "short"),
        Command("gone", "document_remove", {"document_id": "long"}, ("other", 0)),
        Command("flush", "flush", {}, ("gone", 0)),
        Command("list", "documents", {}, ("flush", 0)),
    ]
    ask = Ask("hit", (*start, *words(9, 70)), 3, after=("list", 0))
    result = forks.run([ask], 31, commands=commands, **SMALL)
    served(result)
    assert result.replies["flush"] == [200, True]
    listed = result.replies["list"][1]["documents"]
    assert [(d["id"], d["pages"], sum(d["formats"].values())) for d in listed] == [("short", 4, 4), ("other", 6, 6)]
    assert result.endings["hit"].cached_tokens == 4 * PAGE


def test_namespaces_of_documents_stay_apart(forks: SchedulerForks) -> None:
    text = words(1, 3 * PAGE)
    asks = [
        Ask("without", (*text, 7), 1, after=("flush", 0)),
        Ask("with", (*text, 7), 1, after=("without", 0), extra_key="tenant"),
    ]
    commands = [add("doc", text, extra_key="tenant"), Command("flush", "flush", {}, ("doc", 0))]
    result = forks.run(asks, 31, in_flight=1, commands=commands, **SMALL)
    served(result)
    assert (result.endings["without"].cached_tokens, result.endings["with"].cached_tokens) == (0, 3 * PAGE)


def test_a_document_that_leaves_requests_too_little_is_refused_with_the_numbers(forks: SchedulerForks) -> None:
    """As many as go are taken. Beside them the longest request runs."""
    commands = [add(f"d{i}", words(i, 14 * PAGE), f"d{i - 1}" if i else None) for i in range(40)]
    asks = [Ask(f"longest{i}", words(1000 + i, 1000), 20, after=("d39", 0)) for i in range(3)]
    result = forks.run(asks, 24, commands=commands, **SMALL)
    served(result)
    statuses = [result.replies[f"d{i}"][0] for i in range(40)]
    taken = statuses.count(200)
    assert 2 <= taken < 40
    assert statuses == [200] * taken + [409] * (40 - taken)
    message = result.replies["d39"][1]["message"]
    assert "14 * 64" not in message
    assert f"{(taken + 1) * 14} pages would be pinned" in message
    assert "tokens to a request" in message
    # The context alone limits a request here, not the arena.
    assert [result.endings[f"longest{i}"].tokens for i in range(3)] == [20] * 3


def test_many_first_pages_in_the_cache_do_not_keep_requests_waiting(forks: SchedulerForks) -> None:
    """First pages cost more than others. Those that can be evicted must not be counted for those that are pinned."""
    commands = [add(f"d{i}", words(i, 14 * PAGE), f"d{i - 1}" if i else None) for i in range(40)]
    crowd = [Ask(f"r{i}", words(100 + i, PAGE + 1), 1, after=("d39", 0)) for i in range(60)]
    asks = [*crowd, Ask("longest", words(1000, 1000), 20, after=("r59", 0))]
    served(forks.run(asks, 24, in_flight=4, commands=commands, **SMALL))


def test_where_the_arena_is_the_limit_of_a_request_nothing_can_be_pinned(forks: SchedulerForks) -> None:
    result = forks.run([], 6, commands=[add("doc", words(1, 2 * PAGE))])
    status, data = result.replies["doc"]
    assert status == 409
    assert "set a larger --csa2-arena-size or a smaller --context-length" in data["message"]


def test_bad_documents_are_refused(forks: SchedulerForks) -> None:
    commands = [
        add("short", words(1, PAGE - 1)),
        add("unknown", (*words(1, PAGE), 512)),
        add("negative", (*words(1, PAGE), -1)),
        add("long", words(1, 1100)),
        add("format", words(1, PAGE), page_format="fp3"),
    ]
    result = forks.run([], 31, commands=commands, **SMALL)
    assert {name: reply[0] for name, reply in result.replies.items()} == dict.fromkeys(result.replies, 400)
    said = {name: reply[1]["message"] for name, reply in result.replies.items()}
    assert "less than one page of 64" in said["short"]
    assert "token id 512 does not exist" in said["unknown"]
    assert "token id -1 does not exist" in said["negative"]
    assert "more than the longest prompt" in said["long"]
    assert "'fp3' does not exist: choose one of bf16, fp8, fp4" in said["format"]


def test_without_a_radix_tree_documents_are_refused(forks: SchedulerForks) -> None:
    result = forks.run([], 31, commands=[add("doc", words(1, PAGE))], disable_radix_cache=True, **SMALL)
    assert result.replies["doc"][0] == 409
    assert "--disable-radix-cache" in result.replies["doc"][1]["message"]


def test_new_weights_encode_documents_again(forks: SchedulerForks) -> None:
    texts = {name: words(i, 3 * PAGE) for i, name in enumerate(("a", "b"))}
    commands = [
        add("a", texts["a"]),
        add("b", texts["b"], "a"),
        Command("weights", "new weights", {}, ("b", 0)),
        Command("list", "documents", {}, ("hit", 0)),
    ]
    asks = [Ask("other", words(9, 200), 3, after=("weights", 0)), Ask("hit", (*texts["b"], 5), 2, after=("other", 0))]
    result = forks.run(asks, 31, in_flight=1, commands=commands, **SMALL)
    served(result)
    assert result.replies["weights"] == [200, [True, "done"]]
    assert [d["state"] for d in result.replies["list"][1]["documents"]] == ["resident"] * 2
    assert result.endings["hit"].cached_tokens == 3 * PAGE


def test_a_document_is_removed_while_it_waits(forks: SchedulerForks) -> None:
    commands = [
        Command("add", "document_add", add("doc", words(1, 12 * PAGE)).payload),
        Command("remove", "document_remove", {"document_id": "doc"}),
        Command("again", "document_add", add("doc", words(2, 4 * PAGE)).payload),
        Command("list", "documents", {}, ("again", 0)),
    ]
    asks = [Ask(f"r{i}", words(50 + i, 500), 30) for i in range(4)]
    result = forks.run(asks, 31, commands=commands, **{**SMALL, "chunked_prefill_size": PAGE})
    served(result)
    assert [(d["tokens"], d["state"]) for d in result.replies["list"][1]["documents"]] == [(4 * PAGE, "resident")]


def test_a_document_whose_request_is_aborted_fails_and_can_be_sent_again(forks: SchedulerForks) -> None:
    text = words(1, 12 * PAGE)
    commands = [add("doc", text), Command("abort", "abort all"), add("doc", text, "doc", "again")]
    result = forks.run([], 31, commands=commands, **{**SMALL, "chunked_prefill_size": PAGE})
    served(result)
    assert result.replies["doc"][1]["state"] == "failed"
    assert "abort" in result.replies["doc"][1]["message"].lower()
    assert result.replies["again"][1]["state"] == "resident"


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_other_eviction_policies_keep_documents_too(forks: SchedulerForks, policy: str) -> None:
    text = words(1, 6 * PAGE)
    asks = [Ask(f"r{i}", words(100 + i, 700), 60, after=("doc", 0)) for i in range(24)]
    asks.append(Ask("hit", (*text, 5), 2, after=("r23", 0)))
    result = forks.run(asks, 24, in_flight=6, commands=[add("doc", text)], radix_eviction_policy=policy, **SMALL)
    served(result)
    assert result.endings["hit"].cached_tokens == 6 * PAGE


def test_the_prompt_of_a_static_request_is_treated_as_shared(forks: SchedulerForks) -> None:
    """At a fixed ratio private pages of a prompt become 4-bit ones; these become FP8."""
    counts = {}
    for static in (False, True):
        ask = Ask("r", words(1, 6 * PAGE), 3 * PAGE, custom_params={"csa2_static": static})
        result = forks.run([ask], 31, csa2_ratio="1")
        served(result)
        counts[static] = result.stats["pages"]["fp8"]
    assert (counts[False], counts[True]) == (0, 5)
