"""The examples, as users run them, against one server; and what a program's prompt shares with a document."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sglang as sgl
from served import ARENA, PAGE_SIZE, Served, StartServer

from csa2.errors import UnknownDocumentError
from sglang_csa2.frontend import fixed_prefix, static

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "documents"
DOCS = EXAMPLES.parent / "docs" / "frontend.md"
CALL = re.compile(r'turn (\d): \{"tool": "(calculator|lookup|answer)", "input": "[^"]+"\}( -> .+)?')
TURN = re.compile(r"turn (\d): (\d) steps, (\d+) of (\d+) prompt tokens cached, hit rate (\d+)%")
FOUND = re.compile(r"document (\w+) \(score [\d.]+\), (\d+) of (\d+) prompt tokens cached")
KEPT = re.compile(r"document (\w+): (\d+) tokens pinned, (\d+) hits")
WRITTEN = "The bell rings at noon. Nobody knows who rings it. " * 12
SYSTEM = [{"role": "system", "content": "You are the keeper of a lighthouse. You speak of nothing but light. " * 16}]


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Served:
    return start_server(*ARENA, "--context-length", "4096", "--csa2-documents", str(FOLDER))


@pytest.fixture(scope="module")
def backend(server: Served) -> Any:
    return sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")


def run_example(name: str, server: Served) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--url", server.url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_agent(server: Served) -> None:
    lines = run_example("agent.py", server).splitlines()
    turns = [tuple(map(int, found.groups())) for line in lines if (found := TURN.fullmatch(line))]
    calls = [found for line in lines if (found := CALL.fullmatch(line))]
    assert len(turns) + len(calls) == len(lines), lines
    assert [turn for turn, *_ in turns] == [1, 2, 3, 4]
    for turn, steps, cached, prompt, _ in turns:
        own = [call for call in calls if int(call[1]) == turn]
        assert len(own) == steps >= 2
        # Tools first, carried out; the answer last.
        assert [bool(call[3]) for call in own] == [True] * (steps - 1) + [False]
        assert [call[2] == "answer" for call in own] == [False] * (steps - 1) + [True]
        assert 0 < cached < prompt
    per_step = [cached / steps for _, steps, cached, _, _ in turns]
    assert per_step == sorted(per_step)
    assert per_step[0] < per_step[-1]
    assert turns[-1][-1] > 80  # at most a page and the newest message are computed
    (document,) = [d for d in server.get("/csa2/documents").json()["documents"] if d["id"].startswith("prefix-")]
    assert document["tokens"] >= 3 * PAGE_SIZE
    # The first step found the system prompt too: it is encoded before the first run.
    assert document["hits"] == len(calls)


def test_rag(server: Served) -> None:
    output = run_example("rag.py", server)
    tokens = {d["id"]: d["tokens"] for d in server.get("/csa2/documents").json()["documents"]}
    found = FOUND.findall(output)
    assert [name for name, _, _ in found] == ["lighthouse", "lighthouse", "ferry", "ferry", "market", "library"]
    for name, cached, prompt in found:
        assert tokens[name] <= int(cached) < int(prompt) < tokens[name] + 3 * PAGE_SIZE
    assert len(re.findall(r"^  answer: ", output, re.MULTILINE)) == len(found)
    assert re.findall(r"verdict: (\w+)$", output, re.MULTILINE) in [
        [a, b, c] for a in ("yes", "no") for b in ("yes", "no") for c in ("yes", "no")
    ]
    kept = {name: (int(size), int(hits)) for name, size, hits in KEPT.findall(output)}
    assert kept.keys() == {file.stem for file in FOLDER.glob("*.txt")}
    assert all(size == tokens[name] for name, (size, _) in kept.items())
    assert all(hits >= sum(name == other for other, _, _ in found) for name, (_, hits) in kept.items())


@pytest.mark.parametrize("following", ["", " ", "\n", "\n\n\n", "s", " 7", ".", "<|im_start|>user\n", "日本"])
def test_a_prompt_begins_with_the_tokens_of_its_document(server: Served, backend: Any, following: str) -> None:
    """Whatever comes after it: the end of the text, which could be tokenised differently, is not kept."""

    @sgl.function
    def program(s):
        s += static("bell", WRITTEN)
        s += following + sgl.gen("answer", max_tokens=1)

    state = program.run(backend=backend, temperature=0)
    meta = state.get_meta_info("answer")
    tokens = server.get("/csa2/documents/bell").json()["tokens"]
    assert tokens <= meta["cached_tokens"] < tokens + 2 * PAGE_SIZE
    ids = server.post("/tokenize", prompt=WRITTEN).json()["tokens"]
    whole = server.post("/tokenize", prompt=WRITTEN + following).json()["tokens"]
    assert tokens <= len(ids)
    assert whole[:tokens] == ids[:tokens]


def test_a_chat_and_a_program_share_a_fixed_prefix(server: Served, backend: Any) -> None:
    @sgl.function
    @fixed_prefix(SYSTEM, document_id="keeper")
    def chat(s, question):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=4))

    states = chat.run_batch([{"question": q} for q in ("Who are you?", "Where do you live?", "Why?")], backend=backend)
    tokens = server.get("/csa2/documents/keeper").json()["tokens"]
    assert tokens >= 2 * PAGE_SIZE
    assert all(state.get_meta_info("answer")["cached_tokens"] >= tokens for state in states)
    hits = server.get("/csa2/documents/keeper").json()["hits"]
    body = {"messages": [*SYSTEM, {"role": "user", "content": "Who are you?"}], "max_tokens": 2}
    server.post("/v1/chat/completions", **body).raise_for_status()
    assert server.get("/csa2/documents/keeper").json()["hits"] == hits + 1


def test_the_text_of_a_document(server: Served, backend: Any, text_ids: list[int]) -> None:
    shown = server.get("/csa2/documents/ferry/text").json()
    text = (FOLDER / "ferry.txt").read_text()
    assert shown == {"id": "ferry", "text": text, "messages": None, "extra_key": None}
    assert server.get("/csa2/documents/nobody/text").status_code == 404
    assert server.get("/csa2/documents/-a/text").status_code == 400
    assert server.post("/csa2/documents", id="ids", input_ids=text_ids[:128]).ok
    assert len(server.get("/csa2/documents/ids/text").json()["text"]) > 200
    letter = server.post("/tokenize", prompt="a").json()["tokens"]  # text has longer tokens for many of it
    assert server.post("/csa2/documents", id="noise", input_ids=letter * 128).ok
    refused = server.get("/csa2/documents/noise/text")
    assert (refused.status_code, "no text" in refused.json()["error"]["message"]) == (409, True)


def test_the_program_of_the_documentation(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program.replace("http://127.0.0.1:30000", server.url), names)
    cached_tokens = int(capsys.readouterr().out.split()[-1])
    assert cached_tokens >= server.get("/csa2/documents/ferry").json()["tokens"]
    chat = names["chat"].run(question="Who are you?")
    assert chat.messages()[0]["role"] == "system"
    assert chat.get_meta_info("answer")["cached_tokens"] >= 2 * PAGE_SIZE


def test_a_document_that_is_gone(server: Served, backend: Any) -> None:
    @sgl.function
    def program(s, name, text):
        s += static(name, text) + sgl.gen("answer", max_tokens=1)

    run = {"name": "brief", "text": WRITTEN.upper()}
    for _ in range(2):  # pinned again after it was removed
        assert program.run(**run, backend=backend).get_meta_info("answer")["cached_tokens"] > 0
        sgl.utils.http_request(f"{server.url}/csa2/documents/brief", method="DELETE")
    with pytest.raises(UnknownDocumentError, match="no document 'brief'"):
        program.run(name="brief", text=None, backend=backend)
    answer = sgl.utils.http_request(f"{server.url}/csa2/documents", method="DELETE")  # so that a flush empties the cache
    assert answer.status_code == 200
