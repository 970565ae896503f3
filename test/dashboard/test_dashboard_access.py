"""Who may read the page of /csa2/dashboard, and with what: keys, keyboards, screen readers, phones, hidden tabs."""

from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from dashboard_server import DashboardServer
from page_watch import renew, wait_live, wait_readings

CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
KEY = "s3cret-key"


def test_a_key_is_asked_for_and_kept_in_memory(browser: Browser, server: DashboardServer) -> None:
    server.api_key = KEY
    browser.open(server.url + "/csa2/dashboard")
    browser.wait("question", lambda: browser.text("#state") == "The server wants its API key.")
    assert browser.run("document.querySelector('#keys').open && document.activeElement.id") == "key"
    asked = server.count("/csa2/stats")
    browser.call("Input.insertText", text="wrong")
    browser.press("Enter")
    browser.wait("refusal", lambda: browser.text("#state") == "The server does not take this API key.")
    # It asks once for each key, and not every two seconds with one that is wrong.
    assert server.count("/csa2/stats") == asked + 1
    browser.run("document.querySelector('#key').select()")
    browser.call("Input.insertText", text=KEY)
    browser.press("Enter")
    wait_live(browser)
    assert ("/csa2/stats", f"Bearer {KEY}") in server.requests
    assert all(KEY not in path for path, _ in server.requests)
    assert not any(authorization for path, authorization in server.requests if path in ("/metrics", "/csa2/dashboard"))
    assert browser.run("[location.search, location.hash, document.cookie, localStorage.length, sessionStorage.length]") == [
        "",
        "",
        "",
        0,
        0,
    ]
    browser.wait("documents", lambda: browser.rows("documents"))


def test_documents_may_want_another_key(browser: Browser, server: DashboardServer) -> None:
    server.admin_api_key = "admin-" + KEY
    renew(browser)
    browser.wait("note", lambda: "admin key" in browser.text("#documents-note"))
    wait_live(browser)
    assert browser.run("document.querySelector('#documents').parentElement.hidden") is True
    browser.run("document.querySelector('#keys').open = true; document.querySelector('#admin-key').focus()")
    browser.call("Input.insertText", text=server.admin_api_key)
    browser.press("Enter")
    browser.wait("documents", lambda: browser.rows("documents"))
    assert not any(authorization for path, authorization in server.requests if path == "/csa2/stats")


def test_what_is_no_key_is_not_sent(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    browser.run("document.querySelector('#key').value = 'schlüssel'")
    renew(browser)
    browser.wait("message", lambda: browser.text("#state").startswith("A key has letters"))


def test_a_hidden_page_asks_nothing(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    hide(browser, True)
    assert quiet(browser, server)
    hide(browser, False)
    wait_readings(browser, server)


def hide(browser: Browser, hidden: bool) -> None:
    """Tell the page that it is out of sight, or in it again."""
    value = "true" if hidden else "false"
    browser.run(f"Object.defineProperty(document, 'hidden', {{ value: {value}, configurable: true }})")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")


def test_pause_by_keyboard(browser: Browser, server: DashboardServer) -> None:
    wait_live(browser)
    browser.run("document.querySelector('#pause').focus()")
    browser.press(" ")
    browser.wait("pause", lambda: browser.text("#state") == "Paused.")
    assert browser.run("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    assert quiet(browser, server)
    browser.press("Enter")
    wait_readings(browser, server)


def quiet(browser: Browser, server: DashboardServer) -> bool:
    """Whether nothing is asked for twenty times as long as it takes between two readings, once the last one is in."""
    browser.run("new Promise(done => setTimeout(done, 4000))")
    before = len(server.requests)
    browser.run("new Promise(done => setTimeout(done, 40000))")
    return len(server.requests) == before


def test_the_numbers_are_said_on_demand(browser: Browser) -> None:
    wait_live(browser)
    browser.run("document.querySelector('#say').focus()")
    browser.press("Enter")
    said = browser.text("#said")
    assert said.startswith("Arena in use: 50.0 %, 50 MiB of 100 MiB. Compression: 2.33x, against bf16.")
    assert browser.run("['state', 'said'].every(id => document.getElementById(id).getAttribute('role') === 'status')")


def test_everything_has_a_name_and_a_role(browser: Browser) -> None:
    wait_live(browser)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    nodes = [node for node in browser.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "textbox", "image", "region", "link", "heading", "columnheader"):
        assert roles[role], role
        assert all(roles[role]), (role, roles[role])
    assert len(roles["image"]) == 6
    assert "main" in roles
    assert "banner" in roles
    for cell in browser.run("[...document.querySelectorAll('tbody tr')].map(r => r.cells[0].scope)"):
        assert cell == "row"


def test_every_control_is_reached_by_the_keyboard(browser: Browser) -> None:
    browser.wait("documents", lambda: browser.rows("documents"))
    reached = []
    browser.run("document.activeElement.blur()")
    for _ in range(12):
        browser.press("Tab")
        reached.append(
            browser.run("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )
    assert reached[:4] == ["skip", "pause", "say", "SUMMARY"]
    assert reached.count("SUMMARY") == 3
    assert reached.count("scroll") == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_pictures_stand_out(browser: Browser, scheme: str) -> None:
    wait_live(browser)
    browser.set_window(1200, 900, scheme)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    found: dict[str, Any] = browser.run(CONTRAST)
    # WCAG 2.2, 1.4.3 and 1.4.11.
    assert found["texts"] > 50
    assert [text for text in found["low"] if text["ratio"] < 4.5] == []
    assert [mark for mark in found["marks"] if mark["ratio"] < 3] == []


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, width: int) -> None:
    wait_live(browser)
    browser.set_window(width, 800)
    assert browser.run("document.documentElement.scrollWidth") <= width
    seen = "[...document.querySelectorAll('button, input, summary')].filter(e => e.checkVisibility())"
    small = f"{seen}.filter(e => e.getBoundingClientRect().height < 40).length"
    assert browser.run(small) == 0
