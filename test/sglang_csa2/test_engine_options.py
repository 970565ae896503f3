"""Keywords of `sgl.Engine`: what was asked for, and the folder of documents; no engine is started."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from resolving import write_model
from sglang.srt.entrypoints.engine import Engine

from csa2.errors import OptionError
from sglang_csa2 import engine_documents, plugin


class StoppedError(Exception):
    """Ends the start of an engine where processes would be spawned."""


def arguments_of_engine(**keywords: Any) -> Any:
    """The resolved arguments of an engine with these keywords."""
    found = []

    def launch(_engine: Any, server_args: Any, **_: Any) -> None:
        with mock.patch.object(plugin, "wire_launcher"):
            server_args.resolve_once()
        found.append(server_args)
        raise StoppedError

    # Without its exit handler, which would end all children of this process.
    launching = mock.patch.multiple(Engine, _launch_subprocesses=launch, shutdown=lambda _: None)
    with launching, mock.patch("atexit.register"), pytest.raises(StoppedError):
        Engine(kv_compress="csa2", skip_tokenizer_init=True, **keywords)
    return found[0].resolved_dict()


@pytest.mark.parametrize(
    ("keywords", "policy"),
    [({}, "csa2"), ({"radix_eviction_policy": "lru"}, "lru"), ({"radix_eviction_policy": "lfu"}, "lfu")],
)
def test_an_eviction_policy_that_is_asked_for_is_kept(tmp_path: Any, keywords: dict[str, str], policy: str) -> None:
    model = str(write_model(tmp_path / "model"))
    assert arguments_of_engine(model_path=model, **keywords)["radix_eviction_policy"] == policy


class FakeEngine:
    """As `Engine.__init__` when it takes its event loop."""

    _ensure_event_loop = staticmethod(Engine._ensure_event_loop)

    def __init__(self, folder: str | None) -> None:
        self.server_args = SimpleNamespace(csa2_documents=folder)
        self.tokenizer_manager, self.template_manager = object(), object()
        self.shut_down = False
        self.loop = self._ensure_event_loop()

    def shutdown(self) -> None:
        self.shut_down = True


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    async def load(folder: str, *managers: Any) -> None:
        calls.append((folder, *managers))
        if folder == "bad":
            raise OptionError("no such folder")

    monkeypatch.setattr(engine_documents, "load_folder", load)
    monkeypatch.setattr(FakeEngine, "_ensure_event_loop", engine_documents._loading(Engine._ensure_event_loop))
    return calls


def test_an_engine_loads_its_documents_once(loaded: list[Any]) -> None:
    engine = FakeEngine("here")
    engine._ensure_event_loop()
    assert loaded == [("here", engine.tokenizer_manager, engine.template_manager)]
    assert FakeEngine(None).loop is not None
    assert len(loaded) == 1


def test_called_on_the_class_it_only_gives_a_loop(loaded: list[Any]) -> None:
    assert isinstance(FakeEngine._ensure_event_loop(), asyncio.AbstractEventLoop)
    assert loaded == []


def test_an_engine_with_a_bad_folder_ends(loaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(FakeEngine, "shutdown", lambda engine: ended.append(engine.server_args.csa2_documents))
    with pytest.raises(OptionError, match="no such folder"):
        FakeEngine("bad")

    async def inside() -> None:
        FakeEngine("here")

    with pytest.raises(OptionError, match="running event loop"):
        asyncio.run(inside())
    assert ended == ["bad", "here"]


def test_installing_twice_wraps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_ensure_event_loop", staticmethod(Engine._ensure_event_loop))
    engine_documents.install()
    wrapped = Engine._ensure_event_loop
    engine_documents.install()
    assert Engine._ensure_event_loop is wrapped
