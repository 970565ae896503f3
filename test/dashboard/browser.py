"""Headless Chromium for tests of pages, spoken to over a pipe: no driver, no port, no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BINARIES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60.0
"""For an answer of a browser on a busy machine."""
# Chromium wants its pipe at file descriptors 3 and 4.
LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"


def find_chromium() -> str:
    """Path of a Chromium, or the end of the test as skipped."""
    for name in BINARIES:
        if found := shutil.which(name):
            return found
    pytest.skip("there is no Chromium on PATH: install chromium or chromium-headless-shell to test the dashboard")


class Browser:
    """One tab."""

    def __init__(self, binary: str, profile: Path) -> None:
        commands_in, self._commands = os.pipe()
        self._answers, answers_out = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        options += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(commands_in), str(answers_out), binary, *options],
            pass_fds=(commands_in, answers_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_in)
        os.close(answers_out)
        self._pending = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the tab reported, in order."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser, which goes when its pipe is closed."""
        os.close(self._commands)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command of the DevTools protocol."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium does not answer within {PATIENCE_S:g} s"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium ended"
            self._pending += part
        line, self._pending = self._pending.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    # What tests do

    def open(self, url: str) -> None:
        """Go to `url`; events start anew."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        loaded = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        self.wait(url, lambda: self.run(loaded))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What is written in the first element of `selector`."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def rows(self, table: str) -> list[list[str]]:
        """Texts of the cells of the table of that id, without its head."""
        cells = f"[...document.querySelectorAll('#{table} tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
        rows: list[list[str]] = self.run(cells)
        return rows

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"Enter": 13, "Tab": 9, " ": 32}[key]
        text = {"Enter": "\r", "Tab": "", " ": " "}[key]
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """What `condition` gives once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {PATIENCE_S:g} s; the page says {self.text('body')[:2000]!r}")
            time.sleep(0.05)
        return found

    def faults(self) -> list[str]:
        """Errors of scripts and of the policy since the page was opened. Answers that are no success are none."""
        self.call("Runtime.evaluate", expression="0")
        entries = [e["params"] for e in self.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
        texts = [json.dumps(entry) for entry in entries if entry.get("entry", {}).get("source") != "network"]
        called = [e["params"] for e in self.events if e.get("method") == "Runtime.consoleAPICalled"]
        return texts + [json.dumps(call) for call in called if call["type"] == "error"]

    def requested(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def screenshot(self, path: Path, width: int, height: int, scheme: str = "light") -> None:
        """A picture of the page in a window of that size."""
        self.set_window(width, height, scheme)
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def set_window(self, width: int, height: int, scheme: str = "light") -> None:
        """Size of the window, and the scheme of colours that its reader prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser for a while."""
    browser = Browser(find_chromium(), profile)
    try:
        yield browser
    finally:
        browser.close()
