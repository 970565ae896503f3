"""What a client sees of one server with the compressed cache: answers, cached tokens, aborts, flushes, statistics."""

import re
import time
from typing import Any

import pytest
import requests
from served import (
    ARENA,
    CAPITALS,
    PAGE_SIZE,
    Later,
    Served,
    StartServer,
    capital_prompt,
    check_stats,
    events,
    poll,
)

pytestmark = pytest.mark.e2e

CERTAIN_AT = {1: 300, 63: 300, 64: 300, 65: 300, 127: 500, 128: 500, 129: 500, 130: 500}
"""Where a prompt of so many tokens begins in `text_ids`, such that rounding cannot change its greedy answer.

Each of 12 tokens leads the next best by more than 0.17 (a bf16 logit has steps of 0.06 to 0.12); that of length 1 by 0.12.
"""
LONG_ANSWER = 2000
"""Tokens of an answer that is never waited for."""
CONVERSATION_TURNS = 20
HISTOGRAMS = (
    "sglang:csa2_turn_prompt_tokens_count",
    "sglang:csa2_turn_prompt_tokens_sum",
    "sglang:csa2_turn_cached_tokens_sum",
)
METRICS_INTERVAL_S = 30
"""SGLang publishes at least this often when idle."""


@pytest.fixture(scope="module")
def running(start_server: StartServer) -> Served:
    # Logits in fp32: the first words of some answers are a bf16 step apart, and then rounding decides.
    return start_server(*ARENA, "--enable-metrics", "--enable-fp32-lm-head")


@pytest.fixture
def server(running: Served) -> Served:
    """The server, idle and with an empty cache."""
    running.flush()
    return running


def cached(answer: Any) -> int:
    tokens: int = answer["meta_info"]["cached_tokens"]
    return tokens


def certain_prompt(text_ids: list[int], length: int) -> list[int]:
    start = CERTAIN_AT[length]
    return text_ids[start : start + length]


def output_logprobs(answer: Any) -> list[tuple[float, int]]:
    return [(logprob, token) for logprob, token, _ in answer["meta_info"]["output_token_logprobs"]]


def test_answers_a_question(server: Served) -> None:
    answer = server.chat("What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_shared_prefix_is_found_in_whole_pages(server: Served, text_ids: list[int]) -> None:
    shared, tails = text_ids[:200], (text_ids[1000:1030], text_ids[2001:2031])
    assert tails[0][0] != tails[1][0]
    before = server.stats()["prefix_hit_tokens_total"]
    assert cached(server.generate(shared + tails[0])) == 0
    assert cached(server.generate(shared + tails[1])) == 200 // PAGE_SIZE * PAGE_SIZE
    # The answer's pages are in the tree too, but its last page is not full.
    assert cached(server.generate(shared + tails[1])) == 229 // PAGE_SIZE * PAGE_SIZE
    assert server.stats()["prefix_hit_tokens_total"] - before == 192 + 192


def test_turns_of_a_conversation_are_reported_one_by_one(server: Served, text_ids: list[int]) -> None:
    """What the responses say of their cached tokens is what the statistics, the log and the metrics say."""
    server.wait_idle()
    before, said = server.stats(), []
    lines = server.log_text().count("csa2: #turn ")
    counted = {name: server.metrics().get(name, 0) for name in HISTOGRAMS}
    prompts, hits = [], []
    for turn in range(CONVERSATION_TURNS):
        said += text_ids[3000 + 29 * turn : 3029 + 29 * turn]
        last = server.stats()
        answer = server.generate(said, 8)
        stats = server.stats()
        prompts.append(stats["prompt_tokens_total"] - last["prompt_tokens_total"])
        hits.append(stats["prefix_hit_tokens_total"] - last["prefix_hit_tokens_total"])
        assert stats["turns_total"] - last["turns_total"] == 1
        assert (prompts[-1], hits[-1]) == (len(said), cached(answer))
        said += answer["output_ids"]
    # Whole pages of what was said before; the last token of an answer is not written.
    assert hits == [max(0, turn * 37 - 1) // PAGE_SIZE * PAGE_SIZE for turn in range(CONVERSATION_TURNS)]
    stats = server.stats()
    by_format = {
        name: stats["prefix_hit_tokens_by_format"][name] - n for name, n in before["prefix_hit_tokens_by_format"].items()
    }
    assert sum(by_format.values()) == sum(hits)
    assert by_format["fp8"] > 0
    found = re.findall(r"csa2: #turn 1, prompt tokens (\d+), cached tokens (\d+)", server.log_text())[lines:]
    assert [tuple(map(int, numbers)) for numbers in found] == list(zip(prompts, hits, strict=True))
    metrics = server.metrics()
    assert [metrics[name] - counted[name] for name in HISTOGRAMS] == [CONVERSATION_TURNS, sum(prompts), sum(hits)]


@pytest.mark.parametrize("length", CERTAIN_AT)
def test_repeats_answer_the_same(server: Served, text_ids: list[int], length: int) -> None:
    prompt = certain_prompt(text_ids, length)
    answers = [server.generate(prompt) for _ in range(3)]
    # The last token of a prompt is always computed.
    whole = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert [cached(answer) for answer in answers] == [0, whole, whole]
    assert answers[1]["text"] == answers[0]["text"]
    assert answers[2]["text"] == answers[0]["text"]


def test_identical_prompts_in_one_call(server: Served, text_ids: list[int]) -> None:
    answers = server.generate([certain_prompt(text_ids, 130)] * 8)
    assert len(answers) == 8
    assert len({answer["text"] for answer in answers}) == 1
    assert {answer["meta_info"]["completion_tokens"] for answer in answers} == {12}


def test_distinct_prompts_in_one_call(server: Served) -> None:
    answers = server.generate([capital_prompt(country) for country in CAPITALS])
    for answer, capital in zip(answers, CAPITALS.values(), strict=True):
        assert capital in answer["text"]


def test_several_answers_to_one_prompt(server: Served, text_ids: list[int]) -> None:
    prompt = certain_prompt(text_ids, 130)
    alone = server.generate(prompt)
    answers = server.generate(prompt, sampling={"n": 4})
    assert len(answers) == 4
    assert {answer["text"] for answer in answers} == {alone["text"]}


def test_stream_adds_up_to_the_whole_answer(server: Served, text_ids: list[int]) -> None:
    prompt = text_ids[500:600]
    whole = server.generate(prompt, 20)
    server.flush()
    parts = list(server.stream(prompt, 20))
    counts = [part["meta_info"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 20
    assert parts[-1]["text"] == whole["text"]


def test_chat_stream(server: Served) -> None:
    question = "What is the capital of France?"
    whole = server.chat(question)["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0, "stream": True}
    with requests.post(f"{server.url}/v1/chat/completions", json=body, stream=True, timeout=60) as answer:
        pieces = [part["choices"][0]["delta"].get("content") or "" for part in events(answer) if part["choices"]]
    assert "".join(pieces) == whole


def test_client_that_disconnects_frees_its_pages(server: Served, text_ids: list[int]) -> None:
    stream = server.stream(text_ids[:300], LONG_ANSWER)
    for _ in range(3):
        next(stream)
    stream.close()
    server.wait_idle()
    stats = server.stats()
    check_stats(stats)
    assert stats["logical_tokens"] < LONG_ANSWER
    assert "Berlin" in server.generate(capital_prompt("Germany"))["text"]


def test_abort_while_decoding(server: Served, text_ids: list[int]) -> None:
    answer = Later(lambda: server.generate(text_ids[:300], LONG_ANSWER, rid="abort-decode"))
    other = Later(lambda: server.generate(capital_prompt("Germany"), 40))
    server.wait_running(2)
    server.abort("abort-decode")
    meta = answer.result()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] < LONG_ANSWER
    assert "Berlin" in other.result()["text"]
    server.wait_idle()
    check_stats(server.stats())


def test_flush(server: Served, text_ids: list[int]) -> None:
    first = server.generate(text_ids[:200])
    server.wait_idle()
    assert sum(server.stats()["pages"].values()) > 0
    assert server.post("/flush_cache").status_code == 200
    stats = server.stats()
    assert sum(stats["pages"].values()) == stats["used_bytes"] == stats["logical_tokens"] == 0
    again = server.generate(text_ids[:200])
    assert cached(again) == 0
    assert again["text"] == first["text"]


def test_flush_is_refused_while_a_request_runs(server: Served, text_ids: list[int]) -> None:
    alone = server.generate(text_ids[:200], 30)
    server.flush()
    stream = server.stream(text_ids[:200], 30)
    next(stream)
    assert server.post("/flush_cache").status_code == 400
    *_, last = stream
    assert last["meta_info"]["completion_tokens"] == 30
    assert last["text"] == alone["text"]


def test_logprobs(server: Served, text_ids: list[int]) -> None:
    prompt = text_ids[:150]
    answer = server.generate(prompt, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt
    assert all(logprob <= 0 for logprob, _, _ in meta["input_token_logprobs"][1:])
    assert len(meta["output_token_logprobs"]) == 12
    for (logprob, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert logprob <= 0
        assert (logprob, token) == (top[0][0], top[0][1])


def test_same_request_on_same_cache_gives_same_logprobs(server: Served, text_ids: list[int]) -> None:
    def ask() -> list[tuple[float, int]]:
        return output_logprobs(server.generate(text_ids[:400], return_logprob=True))

    empty = ask()
    server.flush()
    assert ask() == empty
    # Hits turn pages to the shared format as they leave the window, until all have.
    ask()
    server.wait_idle()
    before = server.stats()["pages"]
    settled = ask()
    server.wait_idle()
    assert server.stats()["pages"] == before
    assert ask() == settled


def test_stats_add_up(server: Served, text_ids: list[int]) -> None:
    check_stats(server.stats())
    start = server.stats()
    for length in (100, 400, 700):
        server.generate(text_ids[:length])
        server.wait_idle()
        check_stats(server.stats())
    stats = server.stats()
    assert stats["prompt_tokens_total"] - start["prompt_tokens_total"] == 1200
    assert stats["prefix_hit_tokens_total"] - start["prefix_hit_tokens_total"] == 64 + 384
    # What was generated is in the tree as well, except the last page of each request, which is not full.
    assert stats["logical_tokens"] == (700 + 11) // PAGE_SIZE * PAGE_SIZE
    assert stats["options"]["arena_size"] == "188MB"
    assert stats["identity_basis_layers"] == []


def test_stats_are_read_only(server: Served) -> None:
    assert server.post("/csa2/stats").status_code == 405


def test_metrics_agree_with_stats(server: Served, text_ids: list[int]) -> None:
    server.generate(text_ids[:500])
    server.wait_idle()
    stats = server.stats()
    wanted: dict[str, float] = {
        name: stats[name]
        for name in (
            *("arena_bytes", "used_bytes", "slab_bytes", "logical_tokens", "capacity_tokens", "compression_ratio"),
            *("metadata_fraction", "compactions_total", "evicted_tokens_total", "prompt_tokens_total"),
            *("prefix_hit_tokens_total", "turns_total"),
        )
    }
    by_format = stats["prefix_hit_tokens_by_format"]
    wanted |= {f"prefix_hit_tokens_by_format_total[{name}]": tokens for name, tokens in by_format.items()}
    wanted |= {f"pages[{name}]": count for name, count in stats["pages"].items()}
    wanted |= {f"demotions_total[{step}]": count for step, count in stats["demotions_total"].items()}

    def differing() -> dict[str, tuple[float, float]]:
        metrics = server.metrics()
        pairs = {name: (metrics["sglang:csa2_" + name], value) for name, value in wanted.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pytest.approx(pair[1])}

    deadline = time.monotonic() + METRICS_INTERVAL_S + 15
    poll("metrics published", lambda: not differing() or time.monotonic() > deadline, METRICS_INTERVAL_S + 30)
    assert differing() == {}


def test_server_info_shows_the_scheme(server: Served) -> None:
    info = server.get("/server_info").json()
    assert (info["kv_compress"], info["page_size"], info["csa2_arena_size"]) == ("csa2", PAGE_SIZE, "188MB")


def test_long_prompt_waits_in_the_shared_format(server: Served, text_ids: list[int]) -> None:
    prompt = text_ids[:3000]
    first = server.generate(prompt)
    server.wait_idle()
    stats = server.stats()
    check_stats(stats)
    assert stats["pages"]["fp8"] > 0.9 * sum(stats["pages"].values())
    assert stats["compression_ratio"] > 1.7
    assert stats["target_ratio"] == 1
    again = server.generate(prompt)
    assert cached(first) == 0
    assert cached(again) == 2999 // PAGE_SIZE * PAGE_SIZE
    server.flush()
    assert sum(server.stats()["pages"].values()) == 0
