"""The HTTP routes, on apps with SGLang's own middleware and a fake tokenizer manager."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.testclient import TestClient

from sglang_csa2 import control, http
from sglang_csa2.control import Csa2ControlReqOutput, ReplyTimeoutError

STATS = {"arena_bytes": 1, "pages": {"bf16": 0}, "options": {"arena_size": None}}


class FakeTokenizerManager:
    """Stands in for `control.call`'s partner."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.payloads: list[Any] = []
        self.reply: Csa2ControlReqOutput | Exception = Csa2ControlReqOutput(ok=True, status=200, data=STATS)

    async def call(self, tokenizer_manager: Any, op: str, payload: Any = None) -> Csa2ControlReqOutput:
        assert tokenizer_manager is self
        self.ops.append(op)
        self.payloads.append(payload)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@pytest.fixture
def tokenizer_manager(monkeypatch: pytest.MonkeyPatch) -> FakeTokenizerManager:
    fake = FakeTokenizerManager()
    monkeypatch.setattr(control, "call", fake.call)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=fake))
    return fake


@pytest.fixture
def client(tokenizer_manager: FakeTokenizerManager) -> TestClient:
    app = FastAPI()
    http.add_routes(app)
    return TestClient(app)


@pytest.fixture
def sglang_app() -> Iterator[FastAPI]:
    """SGLang's app, with the routes it had restored afterwards."""
    routes = list(http_server.app.router.routes)
    yield http_server.app
    http_server.app.router.routes[:] = routes


def set_enabled(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    module: Any = ModuleType("sglang_csa2.args")
    module.enabled_here = lambda: enabled
    module.options_here = lambda: SimpleNamespace(documents=None)
    monkeypatch.setitem(sys.modules, "sglang_csa2.args", module)


def test_stats_answers_json(client: TestClient, tokenizer_manager: FakeTokenizerManager) -> None:
    response = client.get("/csa2/stats")
    assert (response.status_code, response.json()) == (200, STATS)
    assert response.headers["content-type"] == "application/json"
    assert tokenizer_manager.ops == ["stats"]


@pytest.mark.parametrize(("sent", "ratio"), [(2, 2.0), (2.5, 2.5), ("auto", None)])
def test_the_ratio_goes_to_the_scheduler(
    client: TestClient, tokenizer_manager: FakeTokenizerManager, sent: Any, ratio: float | None
) -> None:
    tokenizer_manager.reply = Csa2ControlReqOutput(ok=True, status=200, data={"ratio": 2.0, "automatic": False})
    response = client.post("/csa2/ratio", json={"ratio": sent})
    assert (response.status_code, response.json()) == (200, {"ratio": 2.0, "automatic": False})
    assert tokenizer_manager.ops == ["ratio"]
    assert tokenizer_manager.payloads == [{"ratio": ratio}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not JSON"),
        (b"ratio=2", "is not JSON"),
        (b"[" * 4000, "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[2]", "is not a JSON object with the keys ratio"),
        (b"{}", "is not a JSON object with the keys ratio"),
        (b'{"ratio": 2, "more": 1}', "is not a JSON object with the keys ratio"),
        (b'{"ratio": 0.5}', "ratio is 0.5: give a number from 1 to 8"),
        (b'{"ratio": NaN}', "ratio is nan"),
        (b'{"ratio": "2"}', "ratio is '2'"),
        (b'{"ratio": true}', "ratio is True"),
        (b'{"ratio": null}', "ratio is None"),
    ],
)
def test_a_bad_ratio_is_400_and_goes_nowhere(
    client: TestClient, tokenizer_manager: FakeTokenizerManager, body: bytes, message: str
) -> None:
    response = client.post("/csa2/ratio", content=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert tokenizer_manager.ops == []


def test_a_huge_body_is_413(client: TestClient, tokenizer_manager: FakeTokenizerManager) -> None:
    response = client.post("/csa2/ratio", content=b'{"ratio": 2' + b" " * 5000 + b"}")
    assert response.status_code == 413
    assert tokenizer_manager.ops == []


@pytest.mark.parametrize(
    ("api_key", "admin_api_key", "sent", "status"),
    [("key", None, None, 401), ("key", None, "key", 200), ("key", "admin", "key", 401), ("key", "admin", "admin", 200)],
)
def test_the_ratio_is_protected_as_admin_routes_are(
    tokenizer_manager: FakeTokenizerManager, api_key: str, admin_api_key: str | None, sent: str | None, status: int
) -> None:
    app = FastAPI()
    http.add_routes(app)
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    headers = {"Authorization": f"Bearer {sent}"} if sent else {}
    assert TestClient(app).post("/csa2/ratio", json={"ratio": 2}, headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_wrong_method_is_405(client: TestClient, method: str) -> None:
    assert client.request(method, "/csa2/stats").status_code == 405


def test_silent_scheduler_is_503(client: TestClient, tokenizer_manager: FakeTokenizerManager) -> None:
    tokenizer_manager.reply = ReplyTimeoutError("no answer", 503)
    response = client.get("/csa2/stats")
    assert (response.status_code, response.json()) == (503, {"error": {"message": "no answer"}})


def test_failed_operation_keeps_its_status(client: TestClient, tokenizer_manager: FakeTokenizerManager) -> None:
    tokenizer_manager.reply = Csa2ControlReqOutput(ok=False, status=500, data={"message": "division by zero"})
    response = client.get("/csa2/stats")
    assert (response.status_code, response.json()) == (500, {"error": {"message": "division by zero"}})


@pytest.mark.parametrize(
    ("api_key", "admin_api_key", "sent", "status"),
    [
        ("key", None, None, 401),
        ("key", None, "wrong", 401),
        ("key", None, "key", 200),
        ("key", "admin", "key", 200),
        (None, "admin", None, 200),
    ],
)
def test_protected_like_server_info(
    tokenizer_manager: FakeTokenizerManager,
    api_key: str | None,
    admin_api_key: str | None,
    sent: str | None,
    status: int,
) -> None:
    app = FastAPI()

    @app.get("/server_info")
    async def server_info() -> dict[str, str]:
        return {}

    http.add_routes(app)
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    client = TestClient(app)
    headers = {"Authorization": f"Bearer {sent}"} if sent else {}
    for path in ("/csa2/stats", "/server_info"):
        assert client.get(path, headers=headers).status_code == status


def test_hook_adds_the_route_once(
    sglang_app: FastAPI, tokenizer_manager: FakeTokenizerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_enabled(monkeypatch, True)
    http.before_setup_and_run_http_server(object(), tokenizer_manager)
    http.before_setup_and_run_http_server(object(), tokenizer_manager)
    added = [route for route in sglang_app.routes if getattr(route, "path", None) == http.STATS_PATH]
    assert [type(route) for route in added] == [http_server.ORJSONRoute]
    assert TestClient(sglang_app).get("/csa2/stats").json() == STATS


def test_without_csa2_there_is_no_route(sglang_app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    set_enabled(monkeypatch, False)
    http.before_setup_and_run_http_server()
    assert TestClient(sglang_app).get("/csa2/stats").status_code == 404
