"""Replies of replicas as one reply. Needs no SGLang."""

from dataclasses import fields
from typing import Any

import msgspec
import pytest
from stats_samples import cache_stats

from csa2 import stats
from csa2.stats import CacheStats, combined_stats
from sglang_csa2.replicas import DONE_BY, Answer, combined, parts_of


def ok(**data: Any) -> Answer:
    return Answer(True, 200, data)


def refused(message: str, status: int) -> Answer:
    return Answer(False, status, {"message": message})


def view(**changes: Any) -> dict[str, Any]:
    shown = {"id": "a", "state": "resident", "tokens": 128, "pages": 2, "bytes": 30, "format": "fp8", "hits": 1}
    return {**shown, "formats": {"bf16": 1, "fp8": 1}, "ttl": None, "extra_key": None, "serial": 1, "message": "", **changes}


def test_every_statistic_says_how_replicas_add_up() -> None:
    named = [*stats.SUMMED, *stats.LARGEST, *stats.SMALLEST, *stats.WEIGHTED, *stats.EQUAL, "replicas"]
    assert sorted(named) == sorted(CacheStats.__struct_fields__)


def test_statistics_of_replicas_are_sums_and_means_by_bytes() -> None:
    readings = [
        cache_stats(used_bytes=300, compression_ratio=2.0, pages={"bf16": 1, "fp4": 0}, target_ratio=2.0),
        cache_stats(used_bytes=100, compression_ratio=4.0, pages={"bf16": 0, "fp4": 5}, documents=3),
    ]
    together = combined_stats(readings)
    assert (together.used_bytes, together.arena_bytes) == (400, 2 * readings[0].arena_bytes)
    assert together.pages == {"bf16": 1, "fp4": 5}
    assert together.compression_ratio == (300 * 2.0 + 100 * 4.0) / 400  # plain bytes over bytes used
    assert (together.target_ratio, together.documents) == (2.0, 3)
    assert together.page_bytes == readings[0].page_bytes
    assert together.replicas == readings


def test_the_agreement_guard_is_that_of_the_worst_replica() -> None:
    fine, bad, without = (cache_stats(guard_agreement=share) for share in (1.0, 0.5, None))
    assert combined_stats([fine, bad, without]).guard_agreement == 0.5
    assert combined_stats([without, without]).guard_agreement is None


def test_empty_replicas_have_ratio_one() -> None:
    assert combined_stats([cache_stats(used_bytes=0)] * 2).compression_ratio == 1.0


def test_statistics_say_what_each_replica_has() -> None:
    parts = [msgspec.to_builtins(cache_stats(used_bytes=used)) for used in (300, 100)]
    answer = combined("stats", [ok(**part) for part in parts])
    assert (answer.ok, answer.data["used_bytes"]) == (True, 400)
    assert [(part["dp_rank"], part["used_bytes"]) for part in answer.data["replicas"]] == [(0, 300), (1, 100)]
    assert msgspec.convert(answer.data, CacheStats).replicas[1].used_bytes == 100


def test_ratio() -> None:
    answer = combined("ratio", [ok(ratio=1.0, automatic=True), ok(ratio=2.0, automatic=True)])
    assert (answer.data["ratio"], answer.data["automatic"]) == (2.0, True)


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["resident", "resident"], "resident"),
        (["resident", "waiting"], "waiting"),
        (["waiting", "failed"], "failed"),
        (["resident", None], "failed"),
    ],
)
def test_a_document_is_what_its_worst_replica_is(states: list[str | None], state: str) -> None:
    answers = [refused("no document", 404) if one is None else ok(**view(state=one)) for one in states]
    assert combined("document", answers).data["state"] == state


def test_a_document_adds_up_and_says_who_lacks_it() -> None:
    whole = combined("document", [ok(**view()), ok(**view(serial=4, formats={"fp4": 2}, bytes=10))]).data
    assert (whole["pages"], whole["bytes"], whole["hits"], whole["serial"], whole["tokens"]) == (4, 40, 2, 4, 128)
    assert whole["formats"] == {"bf16": 1, "fp8": 1, "fp4": 2}
    assert [part["serial"] for part in parts_of(whole)] == [1, 4]
    half = combined("document", [refused("no document", 404), ok(**view())]).data
    assert half["message"] == "replica 0 of 2: it is not there"
    assert [part["dp_rank"] for part in half["replicas"]] == [1]


def test_a_document_that_no_replica_has_is_unknown() -> None:
    for op in ("document", "document_remove"):
        answer = combined(op, [refused("no document 'a'", 404)] * 2)
        assert (answer.ok, answer.status, answer.data["message"]) == (False, 404, "no document 'a'")


def test_one_replica_that_refuses_refuses_for_all_and_says_which() -> None:
    answer = combined("document_add", [ok(**view()), refused("no room", 409)])
    assert (answer.ok, answer.status) == (False, 409)
    assert answer.data == {"message": "replica 1 of 2: no room", DONE_BY: [0]}
    answer = combined("document_add", [refused("no room", 409), refused("broken", 500)])
    assert (answer.status, answer.data[DONE_BY]) == (500, [])
    assert answer.data["message"] == "replica 0 of 2: no room; replica 1 of 2: broken"


def test_adding_is_refused_where_a_replica_says_not_found() -> None:
    assert not combined("document_add", [ok(**view()), refused("?", 404)]).ok


def test_lists_are_joined_by_id() -> None:
    lists = [ok(documents=[view(), view(id="b")]), ok(documents=[view(id="c"), view(id="b")])]
    documents = combined("documents", lists).data["documents"]
    assert [(d["id"], d["state"]) for d in documents] == [("a", "failed"), ("b", "resident"), ("c", "failed")]


def test_an_operation_without_a_rule_shows_all_parts() -> None:
    assert combined("echo", [ok(n=1), ok(n=2)]).data == {"replicas": [{"dp_rank": 0, "n": 1}, {"dp_rank": 1, "n": 2}]}


def test_an_answer_has_what_a_reply_has() -> None:
    assert [field.name for field in fields(Answer)] == ["ok", "status", "data"]
