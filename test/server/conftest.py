"""Real servers for tests. They take a minute or two to start, so a module starts one and keeps it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, StartServer
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def start_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts a server with the compressed cache on the demo model: `start_server(*options, **environment)`;
    `model=` serves another folder.

    At the end of the module every server must have become idle, still run, and have logged no fault.
    """
    started: list[Served] = []
    faults = []

    def start(*options: str, model: Path = demo_model, **environment: str) -> Served:
        log = tmp_path_factory.mktemp("server") / "log"
        server = Served(model, options, {**child_environment(), **environment}, log)
        started.append(server)
        server.wait_ready()
        return server

    try:
        yield start
    finally:
        for server in started:
            try:
                if server.process.poll() is None:
                    server.flush()
                    if sum(server.stats()["pages"].values()):
                        faults.append(f"pages stay mapped after a flush: {server.stats()['pages']}")
            except Exception as error:  # noqa: BLE001 - reported below, after every server was stopped
                faults.append(repr(error))
            faults += server.faults()
            server.stop()
    if faults:
        pytest.fail("\n\n".join(faults), pytrace=False)


def child_environment() -> dict[str, str]:
    """This process's environment, with one OpenMP thread unless it says otherwise.

    Barriers between threads stall where other processes want the same cores.
    """
    drop = ("CSA2_", "SGLANG_")
    return {"OMP_NUM_THREADS": "1", **{k: v for k, v in os.environ.items() if not k.startswith(drop)}}


@pytest.fixture(scope="session")
def text_ids(demo_model: Path) -> list[int]:
    """Token ids of some 100 pages of English prose: the reference texts that come with Python."""
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = tokenizer(text[:60000])["input_ids"]
    return ids
