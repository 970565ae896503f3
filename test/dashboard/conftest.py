"""A browser, a server whose answers are made up, and the page of the one in the other."""

from collections.abc import Iterator

import pytest
from browser import Browser, open_browser
from dashboard_server import DashboardServer

FASTER = "{ const timer = setTimeout; window.setTimeout = (f, ms, ...more) => timer(f, ms / 40, ...more); }"
"""Two seconds become 50 ms. The clock stays, so what is done in every tenth reading comes after real seconds."""


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The tab that all tests share, and in which time-outs are short."""
    with open_browser(tmp_path_factory.mktemp("chromium")) as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=FASTER)
        yield browser


@pytest.fixture
def server() -> Iterator[DashboardServer]:
    """A server of the page."""
    server = DashboardServer()
    yield server
    server.stop()


@pytest.fixture
def browser(tab: Browser, server: DashboardServer) -> Iterator[Browser]:
    """The page, opened. At the end it must have run without a fault, and asked for nothing but what it shows."""
    tab.set_window(1200, 900)
    tab.open(server.url + "/csa2/dashboard")
    yield tab
    assert tab.faults() == []
    paths = ("/csa2/dashboard", "/csa2/stats", "/csa2/documents", "/metrics")
    assert set(tab.requested()) <= {server.url + path for path in paths}
    tab.open("about:blank")
