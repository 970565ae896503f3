"""Two replicas behind one front end: the texts of the model, documents, and what the server says, of both."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from served import CERTAIN_PROMPTS, CERTAIN_TOKENS, PAGE_SIZE, Served, StartServer, check_stats, poll
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.e2e

ARENA_BYTES = 45 * 2**20
"""Each replica: 32 plain pages of 1.4 MiB, 2048 tokens in bf16."""
PATH = "/csa2/documents"
REPLICAS = (0, 1)


@pytest.fixture(scope="module")
def running(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "rules.txt").write_text("Rule: be brief and exact.\n" * 40)
    options = ("--dp-size", "2", "--csa2-arena-size", str(ARENA_BYTES), "--context-length", "2048", "--enable-metrics")
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    return start_server(*options, "--csa2-documents", str(folder), **environment)


@pytest.fixture
def server(running: Served) -> Served:
    """The server, idle and without documents or anything else in its caches."""
    requests.delete(running.url + PATH, timeout=60).raise_for_status()
    running.flush()
    return running


def cached(server: Served, replica: int, prompt: list[int]) -> int:
    """Tokens of `prompt` that a replica has."""
    answer = server.generate(prompt, 1, routed_dp_rank=replica)
    return int(answer["meta_info"]["cached_tokens"])


def metrics(server: Served, name: str) -> dict[int, float]:
    """One metric of the cache, by replica."""
    samples = re.findall(rf'sglang:csa2_{name}{{.*dp_rank="(\d)".*}} (\S+)', server.get("/metrics").text)
    return {int(rank): float(value) for rank, value in samples}


def test_a_folder_is_in_both_replicas_before_the_server_answers(running: Served) -> None:
    (document,) = running.get(PATH).json()["documents"]
    assert (document["id"], document["state"]) == ("rules", "resident")
    assert [(part["dp_rank"], part["state"]) for part in document["replicas"]] == [(0, "resident"), (1, "resident")]
    assert running.log_text().count("csa2 document rules pinned") == 2


def test_both_say_what_the_model_says(server: Served, demo_model: Path) -> None:
    """So does a server with one replica: rounding decides nothing in these texts."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    for prompt in CERTAIN_PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        told, past = [], None
        for _ in range(CERTAIN_TOKENS):  # `generate` would stop at the end of the turn
            with torch.inference_mode():
                step = model(ids, past_key_values=past, use_cache=True)
            ids, past = step.logits[:, -1:].argmax(-1), step.past_key_values
            told.append(int(ids))
        text = tokenizer.decode(told, skip_special_tokens=True)
        answers = [server.generate(prompt, CERTAIN_TOKENS, routed_dp_rank=replica) for replica in REPLICAS]
        assert [answer["text"] for answer in answers] == [text] * 2
        assert [answer["meta_info"]["dp_rank"] for answer in answers] == list(REPLICAS)


def test_a_document_is_found_by_both_and_goes_from_both(server: Served, text_ids: list[int]) -> None:
    shown = server.post(PATH, id="book", input_ids=text_ids[:600]).json()
    assert (shown["state"], shown["tokens"], shown["pages"]) == ("resident", 9 * PAGE_SIZE, 2 * 9)
    assert [part["formats"] for part in shown["replicas"]] == [{"bf16": 1, "fp8": 8}] * 2
    again = server.post(PATH, id="book", input_ids=text_ids[:600]).json()
    assert again["serial"] == shown["serial"]
    server.flush()
    assert [cached(server, replica, text_ids[:600]) for replica in REPLICAS] == [9 * PAGE_SIZE] * 2
    hits = server.get(f"{PATH}/book").json()
    assert (hits["hits"], [part["hits"] for part in hits["replicas"]]) == (2, [1, 1])
    conflict = server.post(PATH, id="book", input_ids=text_ids[100:300])
    assert (conflict.status_code, "replica" in conflict.text) == (409, False)
    assert requests.delete(f"{server.url}{PATH}/book", timeout=60).json()["id"] == "book"
    assert server.get(f"{PATH}/book").status_code == 404
    server.flush()
    assert [cached(server, replica, text_ids[:600]) for replica in REPLICAS] == [0, 0]


def test_a_document_ends_with_its_time_in_both(server: Served, text_ids: list[int]) -> None:
    assert server.post(PATH, id="short", input_ids=text_ids[:64], ttl=0.2).ok
    poll("document removed", lambda: server.get(f"{PATH}/short").status_code == 404, 30)
    assert [part["documents"] for part in server.stats()["replicas"]] == [0, 0]


def test_the_server_says_what_each_replica_holds(server: Served, text_ids: list[int]) -> None:
    assert server.post(PATH, id="book", input_ids=text_ids[:300]).ok
    server.generate(text_ids[1000:1200], 4, routed_dp_rank=1)
    stats = server.stats()
    check_stats(stats)
    zero, one = stats["replicas"]
    check_stats(zero)
    check_stats(one)
    assert (zero["dp_rank"], one["dp_rank"]) == REPLICAS
    assert stats["arena_bytes"] == 2 * zero["arena_bytes"]
    assert zero["arena_bytes"] <= ARENA_BYTES
    assert (zero["logical_tokens"], one["logical_tokens"]) == (4 * PAGE_SIZE, 7 * PAGE_SIZE)
    assert (stats["documents"], stats["pinned_pages"]) == (1, 2 * 4)
    assert zero["pinned_bytes"] == zero["used_bytes"]
    assert metrics(server, "arena_bytes") == {0: zero["arena_bytes"], 1: one["arena_bytes"]}


def test_the_ratio_is_that_of_both(server: Served) -> None:
    answer = server.post("/csa2/ratio", ratio=2).json()
    assert (answer["ratio"], answer["automatic"], len(answer["replicas"])) == (2, False, 2)
    assert [part["target_ratio"] for part in server.stats()["replicas"]] == [2, 2]
    assert server.post("/csa2/ratio", ratio=9).status_code == 400
    assert server.post("/csa2/ratio", ratio="auto").json()["automatic"]


def test_a_flush_leaves_documents_in_both_and_nothing_else(server: Served, text_ids: list[int]) -> None:
    assert server.post(PATH, id="book", input_ids=text_ids[:130]).ok
    for replica in REPLICAS:
        server.generate(text_ids[1000:1200], 4, routed_dp_rank=replica)
    assert [part["logical_tokens"] for part in server.stats()["replicas"]] == [5 * PAGE_SIZE] * 2
    server.flush()
    assert [part["logical_tokens"] for part in server.stats()["replicas"]] == [2 * PAGE_SIZE] * 2


def test_pressure_in_both_at_once(server: Served, text_ids: list[int]) -> None:
    """Requests without a replica of their own: SGLang deals them out in turn; three times what fits plain."""
    assert server.post(PATH, id="book", input_ids=text_ids[:600]).ok
    prompts = [text_ids[:600] + text_ids[1000 + 700 * i : 1600 + 700 * i] for i in range(8)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers: list[Any] = list(clients.map(lambda prompt: server.generate(prompt, 20), prompts))
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [20] * len(prompts)
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == set(REPLICAS)
    assert all(answer["meta_info"]["cached_tokens"] >= 9 * PAGE_SIZE for answer in answers)
    for part in server.stats()["replicas"]:
        check_stats(part)
        assert sum(part["demotions_total"].values()) > 0
        assert part["pinned_pages"] == 9
    requests.delete(server.url + PATH, timeout=60).raise_for_status()
    assert server.faults() == []
