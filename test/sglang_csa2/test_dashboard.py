"""The response of GET /csa2/dashboard, and who may have it."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from fastapi import FastAPI
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.testclient import TestClient

from sglang_csa2 import dashboard, http

MAX_BYTES = 30_000


class Parts(HTMLParser):
    """Attributes of all elements, and the texts of those that run or style."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def parts_of(html: str) -> Parts:
    parts = Parts()
    parts.feed(html)
    parts.close()
    return parts


def app_with_keys(api_key: str | None, admin_api_key: str | None) -> FastAPI:
    app = FastAPI()
    http.add_routes(app)
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    dashboard.after_add_api_key_middleware(None, app, api_key=api_key, admin_api_key=admin_api_key)
    return app


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    http.add_routes(app)
    return TestClient(app)


def test_the_page_is_small_html(client: TestClient) -> None:
    response = client.get("/csa2/dashboard")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!doctype html>")
    assert len(response.content) < MAX_BYTES


def test_the_page_needs_nothing_from_elsewhere(client: TestClient) -> None:
    html = client.get("/csa2/dashboard").text
    parts = parts_of(html)
    links = [value for _, name, value in parts.attributes if name in ("src", "href", "action", "srcset", "data")]
    assert sorted(map(str, links)) == ["#main", "data:,", "stats"]
    assert [name for _, name, _ in parts.attributes if name.startswith("on") or name == "style"] == []
    assert re.findall(r"@import|url\(|innerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", html) == []
    # Names of namespaces are addresses that nobody opens.
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}


def test_the_policy_names_the_script_and_the_style(client: TestClient) -> None:
    response = client.get("/csa2/dashboard")
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    texts = parts_of(response.text).texts
    for rule, kind in (("script-src", "script"), ("style-src", "style")):
        (text,) = ["".join(texts[kind])]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for rule in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[rule] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(("api_key", "admin_api_key"), [("key", None), ("key", "admin"), (None, "admin")])
def test_the_page_is_served_without_a_key(api_key: str | None, admin_api_key: str | None) -> None:
    client = TestClient(app_with_keys(api_key, admin_api_key))
    response = client.get("/csa2/dashboard")
    assert (response.status_code, response.text) == (200, dashboard.page())
    assert response.headers["content-security-policy"] == dashboard.headers()["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    ["/csa2/stats", "/csa2/documents", "/csa2/dashboard/", "/csa2/dashboard/x", "//csa2/dashboard", "/csa2/Dashboard"],
)
def test_nothing_else_is_served_without_a_key(path: str) -> None:
    client = TestClient(app_with_keys("key", None), follow_redirects=False)
    assert client.get(path).status_code == 401


def test_only_reading_is_served_without_a_key() -> None:
    client = TestClient(app_with_keys("key", None))
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/csa2/dashboard").status_code == 401


def test_the_hook_of_the_launcher_serves_the_page_without_a_key() -> None:
    """As the launcher does: hooks of the plugin, then the import and the call of SGLang's `_setup_and_run_http_server`."""
    from sglang.srt.utils import auth

    from sglang_csa2 import plugin

    plugin._apply(hook for hook in plugin._launcher_hooks() if hook.function is dashboard.after_add_api_key_middleware)
    app = FastAPI()
    http.add_routes(app)
    auth.add_api_key_middleware(app, api_key="key", admin_api_key=None)
    client = TestClient(app)
    assert client.get("/csa2/dashboard").status_code == 200
    assert client.get("/csa2/stats").status_code == 401


def test_without_the_route_no_key_is_spared() -> None:
    app = FastAPI()
    add_api_key_middleware(app, api_key="key", admin_api_key=None)
    dashboard.after_add_api_key_middleware(None, app, api_key="key", admin_api_key=None)
    assert TestClient(app).get("/csa2/dashboard").status_code == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_wrong_method_is_405(client: TestClient, method: str) -> None:
    assert client.request(method, "/csa2/dashboard").status_code == 405
