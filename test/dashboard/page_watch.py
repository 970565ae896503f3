"""What tests read from the page, and wait for."""

from browser import Browser
from dashboard_server import DashboardServer

DASH = "\N{EN DASH}"
"""Stands for a number that is not known."""


def facts(browser: Browser) -> dict[str, tuple[str, str]]:
    """The numbers on top: what -> (value, remark)."""
    texts = "d => [d.children[0], ...d.children[1].children].map(e => e.textContent)"
    rows: list[list[str]] = browser.run(f"[...document.querySelectorAll('#now > div')].map({texts})")
    return {what: (value, remark) for what, value, remark in rows}


def wait_live(browser: Browser) -> None:
    browser.wait("a reading", lambda: browser.rows("formats"))


def wait_readings(browser: Browser, server: DashboardServer, more: int = 2) -> None:
    """Return when the page has asked `more` times again, and written what it got before the last."""
    wanted = server.count("/csa2/stats") + more
    browser.wait("readings", lambda: server.count("/csa2/stats") >= wanted)


def renew(browser: Browser) -> None:
    """Have documents and metrics asked for at once, as for a new key."""
    browser.run("document.querySelector('#key-form').requestSubmit()")
