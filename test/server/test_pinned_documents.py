"""Pinned documents of a real server: loaded at start, encoded, found, kept under pressure, removed; and their docs."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import requests
from served import Later, Served, StartServer, poll

pytestmark = pytest.mark.e2e

SMALL_ARENA = "47185920"
"""2048 tokens of the demo model in bf16."""
PATH = "/csa2/documents"
SYSTEM = "You are a librarian. " * 40
DOCS = Path(__file__).parents[2] / "docs" / "documents.md"


@pytest.fixture(scope="module")
def server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "rules.txt").write_text("Rule: be brief and exact.\n" * 40)
    (folder / "librarian.json").write_text(json.dumps([{"role": "system", "content": SYSTEM}]))
    options = ("--csa2-arena-size", SMALL_ARENA, "--context-length", "2048", "--enable-metrics")
    return start_server(*options, "--csa2-documents", str(folder), SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="1")


def delete(server: Served, path: str) -> requests.Response:
    return requests.delete(server.url + path, timeout=60)


def pin(server: Served, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, **body)
    assert answer.ok, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def cached(server: Served, prompt: list[int], **more: Any) -> int:
    return int(server.generate(prompt, 1, **more)["meta_info"]["cached_tokens"])


def test_the_folder_was_loaded_before_the_server_answered(server: Served) -> None:
    listed = {d["id"]: d for d in server.get(PATH).json()["documents"]}
    assert {"rules", "librarian"} <= listed.keys()
    assert all(d["state"] == "resident" and d["pages"] > 0 for d in listed.values())
    log = server.log_text()
    assert log.index("pinned, #document: 2") < log.index("Application startup complete")


def test_a_chat_finds_its_system_prompt(server: Served) -> None:
    """The template ends the system turn in the same way, whoever follows."""
    pages = server.get(f"{PATH}/librarian").json()["pages"]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who are you?"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    before = server.stats()["prefix_hit_tokens_total"]
    server.post("/v1/chat/completions", **body).raise_for_status()
    assert server.stats()["prefix_hit_tokens_total"] - before == pages * 64
    assert server.get(f"{PATH}/librarian").json()["hits"] >= 1


def test_a_document_survives_pressure_and_goes_when_asked(server: Served, text_ids: list[int]) -> None:
    shown = pin(server, id="book", input_ids=text_ids[:600])
    assert (shown["tokens"], shown["pages"], shown["formats"]) == (576, 9, {"bf16": 1, "fp8": 8})
    again = pin(server, id="book", input_ids=text_ids[:600])
    assert again["serial"] == shown["serial"]
    calls = [Later(lambda i=i: server.generate(text_ids[1000 + 700 * i : 1700 + 700 * i], 20)) for i in range(8)]
    assert all(call.result()["meta_info"]["completion_tokens"] == 20 for call in calls)
    assert cached(server, text_ids[:600]) == 576
    assert server.get(f"{PATH}/book").json()["hits"] == 1
    server.flush()
    assert cached(server, text_ids[:600]) == 576
    assert delete(server, f"{PATH}/book").ok
    server.flush()
    assert cached(server, text_ids[:600]) == 0
    other = pin(server, id="book", input_ids=text_ids[100:300])
    assert other["tokens"] == 192
    assert delete(server, f"{PATH}/book").ok


def test_documents_come_and_go_under_load(server: Served, text_ids: list[int]) -> None:
    calls = [Later(lambda i=i: server.generate(text_ids[900 * i : 900 * i + 600], 30)) for i in range(5)]
    for i in range(3):
        start = 40 + 300 * i
        assert pin(server, id=f"d{i}", input_ids=text_ids[start : start + 200], format="fp4")["state"] == "resident"
        assert delete(server, f"{PATH}/d{i}").ok
    assert all(call.result()["meta_info"]["completion_tokens"] == 30 for call in calls)


def test_a_document_ends_with_its_time(server: Served, text_ids: list[int]) -> None:
    pin(server, id="short", input_ids=text_ids[:64], ttl=0.2)
    poll("document removed", lambda: server.get(f"{PATH}/short").status_code == 404, 30)


def test_too_much_is_refused_with_the_numbers(server: Served, text_ids: list[int]) -> None:
    statuses = []
    for i in range(40):
        answer = server.post(PATH, id=f"big{i}", input_ids=[(x + i) % 40000 for x in text_ids[:2000]])
        statuses.append(answer.status_code)
        if not answer.ok:
            break
    assert statuses[-1] == 409
    assert re.search(r"\d+ pages would be pinned, which leaves \d+ tokens", answer.json()["error"]["message"])
    assert server.generate(text_ids[3000:4800], 20)["meta_info"]["completion_tokens"] == 20
    for i in range(len(statuses) - 1):
        assert delete(server, f"{PATH}/big{i}").ok


def test_bad_input_is_4xx(server: Served, text_ids: list[int]) -> None:
    pin(server, id="known", input_ids=text_ids[:64])
    bodies = [
        ({"id": "a"}, 400),
        ({"id": "a", "text": "x", "input_ids": [1]}, 400),
        ({"id": "a", "text": "too short"}, 400),
        ({"id": "a", "text": 7}, 400),
        ({"id": "../a", "text": "x"}, 400),
        ({"id": "a", "input_ids": [10**6] * 64}, 400),
        ({"id": "a", "input_ids": text_ids[:64], "format": "fp3"}, 400),
        ({"id": "a", "input_ids": text_ids[:64], "ttl": -1}, 400),
        ({"id": "a", "messages": [{"role": "nobody", "content": 3}]}, 400),
        ({"id": "known", "input_ids": text_ids[64:128]}, 409),
    ]
    for body, status in bodies:
        answer = server.post(PATH, **body)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True), (body, answer.text)
    huge = requests.post(server.url + PATH, data=b"x" * (9 * 2**20), timeout=60)
    assert huge.status_code == 413
    for path, status in (("unknown", 404), ("-a", 400), ("..%2f..%2fetc", 404)):
        assert server.get(f"{PATH}/{path}").status_code == status
        assert delete(server, f"{PATH}/{path}").status_code == status
    answer = server.post("/generate", text="x", sampling_params={"custom_params": {"csa2_static": "yes"}})
    assert answer.status_code == 400
    assert "give true or false" in answer.text


def test_the_commands_of_the_documentation(server: Served) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)
    commands = block.replace("localhost:30000", server.url.removeprefix("http://")).replace("...", "A page. " * 100)
    output = subprocess.run(
        ["bash", "-ec", commands], capture_output=True, text=True, timeout=120, check=True, env=os.environ
    )
    decoder, text, answers = json.JSONDecoder(), output.stdout, []
    while text:
        answer, end = decoder.raw_decode(text)
        answers.append(answer)
        text = text[end:]
    posted, listed, shown, removed = answers
    assert posted["state"] == shown["state"] == removed["state"] == "resident"
    assert "manual" in [d["id"] for d in listed["documents"]]


def test_new_weights_encode_documents_again(server: Served, demo_model: Path) -> None:
    answer = server.post("/update_weights_from_disk", model_path=str(demo_model))
    assert answer.ok, answer.text
    started = time.monotonic()
    states: set[str] = set()
    while states != {"resident"}:
        assert time.monotonic() - started < 60
        states = {d["state"] for d in server.get(PATH).json()["documents"]}
    assert delete(server, PATH).ok  # so that the fixture finds an empty cache after its flush
