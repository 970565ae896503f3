"""Documents in programs of the SGLang language, on a small server that answers as a real one does."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import sglang as sgl
from document_server import DocumentServer
from sglang.lang.backend.base_backend import BaseBackend

from csa2.errors import BackendError, DocumentConflictError, DocumentError, ProgramError, UnknownDocumentError
from sglang_csa2.frontend import fixed_prefix, static

TEXT = "The harbour opens at seven. " * 10
MESSAGES = [{"role": "system", "content": TEXT}]
CHAT = f"[system]{TEXT}"
"""`MESSAGES` as the server renders them."""


@pytest.fixture
def server() -> Iterator[DocumentServer]:
    with DocumentServer().running() as server:
        yield server


@pytest.fixture
def backend(server: DocumentServer) -> Any:
    return sgl.RuntimeEndpoint(server.url)


@sgl.function
def ask(s, question):
    s += static("manual", TEXT)
    s += question
    s += sgl.gen("answer")


@sgl.function
def ask_known(s, question):
    s += static("manual") + question + sgl.gen("answer")


def test_a_prompt_begins_with_the_document(server: DocumentServer, backend: Any) -> None:
    state = ask.run("When?", backend=backend)
    assert (state["answer"], state.text()) == (" word", TEXT + "When? word")
    assert server.prompts == [TEXT + "When?"]
    assert ask_known.run("Why?", backend=backend).text() == TEXT + "Why? word"
    assert server.posts == 1


def test_a_document_is_pinned_once_and_again_when_it_is_gone(server: DocumentServer, backend: Any) -> None:
    for _ in range(3):
        ask.run("When?", backend=backend)
    assert server.posts == 1
    server.documents.clear()
    assert ask.run("When?", backend=backend)["answer"] == " word"
    assert server.posts == 2
    other = sgl.RuntimeEndpoint(server.url)
    ask.run("When?", backend=other)
    assert server.posts == 3


def test_a_batch_pins_once_and_its_common_beginning_is_that_of_the_document(server: DocumentServer, backend: Any) -> None:
    states = ask.run_batch([{"question": str(i)} for i in range(20)], backend=backend, num_threads=8)
    assert [state.text() for state in states] == [f"{TEXT}{i} word" for i in range(20)]
    assert server.posts == 1
    assert server.prompts[0] == TEXT  # found by tracing, and computed before the others


def test_a_batch_over_different_documents(server: DocumentServer, backend: Any) -> None:
    @sgl.function
    def about(s, name, text):
        s += static(name, text) + sgl.gen("answer")

    states = about.run_batch([{"name": f"d{i}", "text": TEXT + str(i)} for i in range(3)], backend=backend)
    assert [state.text() for state in states] == [f"{TEXT}{i} word" for i in range(3)]


def test_forks_and_choices_go_on_from_the_document(server: DocumentServer, backend: Any) -> None:
    @sgl.function
    def judge(s):
        s += static("manual", TEXT)
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f" {i}?" + sgl.select("verdict", [" yes", " no"])
        forks.join()

    assert judge.run(backend=backend)["verdict"] == [" no", " no"]
    assert all(prompt.startswith(TEXT) for prompt in server.prompts)
    assert {TEXT + " 0? yes", TEXT + " 1? no"} <= set(server.prompts)


def test_a_fork_may_begin_with_a_document(server: DocumentServer, backend: Any) -> None:
    @sgl.function
    def both(s):
        for name, fork in zip(("a", "b"), s.fork(2), strict=True):
            fork += static(name, TEXT + name)
            fork += sgl.gen("answer")
            fork.sync()

    both.run(backend=backend)
    assert sorted(server.prompts) == [TEXT + "a", TEXT + "b"]


@pytest.mark.parametrize("above", [False, True])
def test_a_fixed_prefix_stands_first_in_every_run(server: DocumentServer, backend: Any, above: bool) -> None:
    prefix = fixed_prefix(MESSAGES)

    def chat(s, question, mark="?"):
        s += sgl.user(question + mark)
        s += sgl.assistant(sgl.gen("answer"))

    program = prefix(sgl.function(chat)) if above else sgl.function(prefix(chat))
    assert (program.arg_names, program.arg_defaults) == (["question", "mark"], ("?",))
    state = program.run("When", backend=backend)
    state.sync()
    assert server.prompts == [CHAT + "USER:When?\nASSISTANT:"]
    assert state.messages() == [
        *MESSAGES,
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "word"},
    ]
    batch = program.run_batch([{"question": "a"}, {"question": "b", "mark": "!"}], backend=backend)
    assert [state.text() for state in batch] == [f"{CHAT}USER:{q}\nASSISTANT: word\n" for q in ("a?", "b!")]
    assert server.posts == 1
    (name,) = server.documents
    assert name.startswith("prefix-")


def test_options_of_a_document_reach_the_server(server: DocumentServer, backend: Any) -> None:
    program = sgl.function(fixed_prefix(TEXT, document_id="mine", format="fp4", ttl=60)(lambda s: None))
    program.run(backend=backend)
    assert (server.documents["mine"]["format"], server.documents["mine"]["ttl"]) == ("fp4", 60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_ends_with_the_error(backend: Any) -> None:
    state = ask_known.run("When?", backend=backend, stream=True)
    assert "".join(state.text_iter()) == ""
    assert isinstance(state.error(), UnknownDocumentError)


# Wrong use


def run(backend: Any, *parts: Any) -> None:
    def program(s):
        for part in parts:
            s += part

    sgl.function(program).run(backend=backend)


@pytest.mark.parametrize(
    "parts",
    [
        ("Hello. ", static("manual", TEXT)),
        (sgl.gen("x"), static("manual", TEXT)),
        ("Hello. " + static("manual", TEXT),),
        (sgl.system(static("manual", TEXT)),),
        (sgl.user_begin(), static("manual", TEXT)),
        (static("manual", TEXT), static("manual", TEXT)),
        (static("manual", TEXT) + static("manual", TEXT),),
    ],
    ids=["after text", "after an answer", "after text in one", "in a role", "in an open role", "twice", "twice in one"],
)
def test_a_document_that_is_not_at_the_beginning_is_refused(backend: Any, parts: tuple[Any, ...]) -> None:
    with pytest.raises(ProgramError, match=r"not at the beginning of the program.*outside of roles"):
        run(backend, *parts)


def test_an_unknown_document(backend: Any) -> None:
    with pytest.raises(UnknownDocumentError, match="no such document"):
        run(backend, static("manual"))
    with pytest.raises(UnknownDocumentError, match="no such document"):
        ask_known.run_batch([{"question": "a"}, {"question": "b"}], backend=backend)


def test_other_content_and_content_that_is_no_document(server: DocumentServer, backend: Any) -> None:
    run(backend, static("manual", TEXT))
    with pytest.raises(DocumentConflictError, match="other content"):
        run(backend, static("manual", TEXT + "more"))
    with pytest.raises(DocumentError, match="less than one page"):
        run(backend, static("short", "short"))
    server.documents["manual"]["text"] = TEXT + "changed by somebody else"
    with pytest.raises(DocumentConflictError, match="DELETE it first"):
        run(backend, static("manual", TEXT))


def test_a_document_of_another_namespace(server: DocumentServer, backend: Any) -> None:
    server.documents["manual"] = {"id": "manual", "text": TEXT, "messages": None, "extra_key": "tenant"}
    with pytest.raises(DocumentConflictError, match="extra_key 'tenant'"):
        run(backend, static("manual"))


def test_a_server_without_documents() -> None:
    with DocumentServer(documents=False).running() as plain:
        backend = sgl.RuntimeEndpoint(plain.url)
        with pytest.raises(BackendError, match=r"no pinned documents.*--kv-compress csa2"):
            run(backend, static("manual", TEXT))
    with pytest.raises(BackendError, match="Is the server running"):
        run(backend, static("manual"))
    with pytest.raises(BackendError, match="BaseBackend, which has no pinned documents"):
        run(BaseBackend(), static("manual"))


def test_keys_are_those_of_the_backend() -> None:
    with DocumentServer(key="admin").running() as server:
        backend = sgl.RuntimeEndpoint(server.url, api_key="key")
        with pytest.raises(BackendError, match=r"set backend\.admin_api_key"):
            run(backend, static("manual", TEXT))
        backend.admin_api_key = "admin"
        run(backend, static("manual", TEXT))
        run(sgl.RuntimeEndpoint(server.url, api_key="admin"), static("manual"))


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ProgramError, match="give the id"):
        static("")
    with pytest.raises(ProgramError, match="those of new content"):
        static("manual", ttl=5)
    with pytest.raises(ProgramError, match="text or a list of messages"):
        static("manual", {1, 2})
    with pytest.raises(ProgramError, match="is empty"):
        fixed_prefix([])


def test_importing_it_starts_nothing() -> None:
    code = (
        "import sys, threading, sglang_csa2.frontend; print(threading.active_count(), 'sglang_csa2.plugin' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert ended.stdout.split()[-2:] == ["1", "False"]
