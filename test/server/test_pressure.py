"""Servers whose arena is always too small: nothing is lost and nobody waits for ever.

SGLang checks its memory after every step here (`SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY`).
"""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import requests
from served import CAPITALS, Later, Served, StartServer, capital_prompt, check_stats

from csa2.capacity import plan_arena
from csa2.options import CacheOptions
from csa2.plan.fit import server_ladder
from csa2.plan.model_memory import read_model

pytestmark = pytest.mark.e2e

SMALL_ARENA = "47185920"
"""2048 tokens of the demo model in bf16: one prompt of 1500."""
TINY_ARENA = "11796480"
"""512 tokens in bf16."""
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
CLIENTS = 12


@pytest.fixture(scope="module")
def small(start_server: StartServer) -> Served:
    return start_server("--csa2-arena-size", SMALL_ARENA, "--decode-log-interval", "1", **STRICT)


@pytest.fixture(scope="module")
def tiny(start_server: StartServer) -> Served:
    return start_server("--csa2-arena-size", TINY_ARENA, **STRICT)


def most_running(server: Served) -> int:
    return max(int(count) for count in re.findall(r"#running-req: (\d+)", server.log_text()))


def test_three_long_prompts_run_at_once_in_the_memory_of_one(small: Served, text_ids: list[int]) -> None:
    small.flush()
    calls = [Later(lambda i=i: small.generate(text_ids[i * 1500 : (i + 1) * 1500], 40)) for i in range(3)]
    answers = [call.result() for call in calls]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [40] * 3
    assert most_running(small) >= 3
    stats = small.stats()
    check_stats(stats)
    assert stats["evicted_tokens_total"] == 0
    # All three are found again.
    for i in range(3):
        assert small.generate(text_ids[i * 1500 : (i + 1) * 1500], 1)["meta_info"]["cached_tokens"] == 1500 // 64 * 64


def one_of_many(server: Served, number: int, text_ids: list[int]) -> str:
    """One request of a kind that `number` decides; how it ended."""
    chance = random.Random(number)
    start = chance.choice((0, 0, 0, 2000, 4000, 6000))
    prompt = [*text_ids[start : start + chance.randint(1, 1200)], chance.randrange(1000, 9000)]
    length = chance.randint(1, 40)
    kind = chance.choice(("plain",) * 6 + ("stream", "disconnect", "abort"))
    if kind == "plain":
        answer = server.generate(prompt, length)
        assert answer["meta_info"]["completion_tokens"] == length
    elif kind == "stream":
        *_, last = server.stream(prompt, length)
        assert last["meta_info"]["completion_tokens"] == length
    elif kind == "disconnect":
        for _ in islice(server.stream(prompt, length), 2):
            pass
    else:
        call = Later(lambda: server.post("/generate", **server.body(prompt, length, None, rid=f"abort-{number}")))
        with suppress(requests.RequestException):
            server.abort(f"abort-{number}")
        assert call.result().status_code in (200, 400, 499, 503)
    return kind


def test_two_hundred_mixed_requests_at_a_full_arena(small: Served, text_ids: list[int]) -> None:
    before = small.stats()
    with ThreadPoolExecutor(CLIENTS) as clients:
        kinds = list(clients.map(lambda number: one_of_many(small, number, text_ids), range(200)))
    assert {"plain", "stream", "disconnect", "abort"} == set(kinds)
    small.wait_idle()
    stats = small.stats()
    check_stats(stats)
    # The arena was full: pages were demoted, and then some had to go.
    assert sum(stats["demotions_total"].values()) > sum(before["demotions_total"].values())
    assert stats["evicted_tokens_total"] > 0
    assert stats["slab_bytes"] > 0.5 * stats["arena_bytes"]
    for country, capital in list(CAPITALS.items())[:3]:
        assert capital in small.generate(capital_prompt(country), 8)["text"]


def test_the_planner_knows_what_a_server_reports(small: Served, demo_model: Path) -> None:
    model = read_model(demo_model)
    stats = small.stats()
    ladder = server_ladder(model, 1, CacheOptions())
    arena = plan_arena(int(SMALL_ARENA), ladder.page_bytes, ladder.guard)
    assert model.token_bytes * 64 == stats["page_bytes"]["bf16"]
    assert dict(zip(ladder.names, ladder.page_bytes, strict=True)) == stats["page_bytes"]
    # SGLang keeps a page for itself at most.
    assert arena.max_pages * 64 == pytest.approx(stats["capacity_tokens"], rel=0.03)


def limit_in(message: str) -> int:
    """The number of tokens that an error names as the limit."""
    found = re.search(r"(?:maximum allowed length|limit|longer than)\D*(\d+)", message)
    assert found, message
    return int(found[1])


def test_a_prompt_that_cannot_fit_is_refused_by_name_and_harms_nobody(tiny: Served, text_ids: list[int]) -> None:
    other = Later(lambda: tiny.generate(text_ids[:200], 60))
    tiny.wait_running()
    answer: Any = tiny.post("/generate", **tiny.body(text_ids[:4000], 4, None))
    assert 400 <= answer.status_code < 500, answer.text
    limit = limit_in(answer.text)
    assert 64 < limit < 4000
    assert other.result()["meta_info"]["completion_tokens"] == 60
    # What is just below the limit is served.
    assert tiny.generate(text_ids[: limit - 1], 4)["meta_info"]["completion_tokens"] >= 1


def test_an_answer_that_cannot_fit_ends_where_memory_ends(tiny: Served, text_ids: list[int]) -> None:
    limit = limit_in(tiny.post("/generate", **tiny.body(text_ids[:8000], 4, None)).text)
    # Near the limit, because thousands of tokens take minutes.
    answer = tiny.generate(text_ids[: limit - 300], 4000)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 0 < answer["meta_info"]["completion_tokens"] < 4000


def test_more_requests_than_fit_take_turns(tiny: Served, text_ids: list[int]) -> None:
    calls = [Later(lambda i=i: tiny.generate(text_ids[i * 100 : i * 100 + 300], 100)) for i in range(8)]
    assert [call.result()["meta_info"]["completion_tokens"] for call in calls] == [100] * 8
    tiny.wait_idle()
    check_stats(tiny.stats())
