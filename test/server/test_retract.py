"""A server that retracts requests all the time: SGLang's own switch for it, every few forward passes.

A retracted request gives up its pages and its place, waits, finds in the cache what others left there, and computes the
rest of its prompt and of its answer so far again.
"""

import re

import pytest
from served import (
    ARENA,
    CAPITALS,
    CERTAIN_PROMPTS,
    CERTAIN_TOKENS,
    PAGE_SIZE,
    Later,
    Served,
    StartServer,
    capital_prompt,
    check_stats,
)

pytestmark = pytest.mark.e2e

INTERVAL = 4
"""Forward passes between two retractions."""
ANSWER = 24


@pytest.fixture(scope="module")
def running(start_server: StartServer) -> Served:
    return start_server(*ARENA, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL=str(INTERVAL))


@pytest.fixture
def server(running: Served) -> Served:
    """The server, idle and with an empty cache."""
    running.flush()
    return running


def retracted(server: Served) -> int:
    """Requests retracted so far, by the log."""
    return sum(int(count) for count in re.findall(r"Testing retraction.*#retracted_reqs: (\d+)", server.log_text()))


def test_known_answers(server: Served) -> None:
    before = retracted(server)
    answers = server.generate([capital_prompt(country) for country in CAPITALS], ANSWER)
    for answer, capital in zip(answers, CAPITALS.values(), strict=True):
        assert capital in answer["text"]
        assert answer["meta_info"]["completion_tokens"] == ANSWER
    assert retracted(server) > before


def test_answers_are_those_of_requests_alone(server: Served) -> None:
    # One request alone is never retracted.
    before = retracted(server)
    alone = [server.generate(prompt, CERTAIN_TOKENS)["text"] for prompt in CERTAIN_PROMPTS]
    assert retracted(server) == before
    server.flush()
    together = [answer["text"] for answer in server.generate(list(CERTAIN_PROMPTS), CERTAIN_TOKENS)]
    assert retracted(server) > before
    assert together == alone


def test_prompts_of_several_pages(server: Served, text_ids: list[int]) -> None:
    before = retracted(server)
    lengths = (127, 128, 129, 300)
    answers = server.generate([text_ids[1000 * i : 1000 * i + n] for i, n in enumerate(lengths)], ANSWER)
    assert retracted(server) > before
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [ANSWER] * len(lengths)
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == list(lengths)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"length"}
    server.wait_idle()
    stats = server.stats()
    check_stats(stats)
    # Each request leaves its whole pages and nothing of the times it was retracted.
    assert stats["logical_tokens"] == sum((n + ANSWER - 1) // PAGE_SIZE * PAGE_SIZE for n in lengths)


def test_hits_of_retracted_requests_do_not_count(server: Served, text_ids: list[int]) -> None:
    start = server.stats()
    before = retracted(server)
    server.generate([text_ids[:200], text_ids[3000:3200]], ANSWER)
    assert retracted(server) > before
    stats = server.stats()
    assert stats["prompt_tokens_total"] - start["prompt_tokens_total"] == 400
    assert stats["prefix_hit_tokens_total"] == start["prefix_hit_tokens_total"]


def test_several_answers_to_one_prompt(server: Served, text_ids: list[int]) -> None:
    before = retracted(server)
    answers = server.generate(text_ids[300:430], ANSWER, sampling={"n": 3})
    assert retracted(server) > before
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [ANSWER] * 3


def test_abort_among_retracted_requests(server: Served, text_ids: list[int]) -> None:
    doomed = [Later(lambda i=i: server.generate(text_ids[:200], 2000, rid=f"doomed-{i}")) for i in range(2)]
    stays = Later(lambda: server.generate(capital_prompt("Germany"), ANSWER))
    answer = stays.result()
    for i in range(2):
        server.abort(f"doomed-{i}")
    assert "Berlin" in answer["text"]
    for later in doomed:
        assert later.result()["meta_info"]["finish_reason"]["type"] == "abort"
    server.wait_idle()
    check_stats(server.stats())
