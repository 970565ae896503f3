"""`csa2 top` as a command: what it asks a server, and how it behaves in a terminal and in a pipe."""

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import msgspec
import pytest
from fake_server import serving
from top_samples import MANUAL, METRICS, STATS

from csa2.cli import main
from csa2.top.readings import take_reading


@pytest.fixture
def server():
    answers = {
        "/csa2/stats": (200, msgspec.json.encode(STATS)),
        "/csa2/documents": (200, msgspec.json.encode({"documents": [MANUAL]})),
        "/metrics": (404, b""),
    }
    with serving(answers) as server:
        yield server


def test_once_prints_one_reading(server, capsys):
    assert main(["top", "--once", "--url", server.url + "/"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.isascii()
    assert "\x1b" not in out
    assert out.splitlines()[0] == f"csa2 top  {server.url}/"
    assert "tokens held             7168 of 25600" in out
    assert [path for path, _ in server.asked] == ["/csa2/stats", "/metrics", "/csa2/documents"]


def test_metrics_and_documents_are_asked_for_less_often(server, monkeypatch):
    clock = iter([0.0, 2.0, 9.9, 10.0])
    monkeypatch.setattr("csa2.top.readings.time.monotonic", lambda: next(clock))
    server.answers["/metrics"] = (200, METRICS.encode())
    reading = None
    for expected in (1, 1, 1, 2):
        reading = take_reading(server.url, reading)
        assert reading.load.running == 3
        assert sum(path == "/metrics" for path, _ in server.asked) == expected
        assert sum(path == "/csa2/documents" for path, _ in server.asked) == expected
    assert sum(path == "/csa2/stats" for path, _ in server.asked) == 4
    assert (reading.time_s, reading.slow_time_s) == (10.0, 10.0)


def test_once_with_metrics(server, capsys):
    server.answers["/metrics"] = (200, METRICS.encode())
    assert main(["top", "--once", "--url", server.url]) == 0
    assert "requests                3 running, 2 waiting" in capsys.readouterr().out


def test_keys_come_from_the_environment_and_go_where_they_belong(server, monkeypatch, capsys):
    monkeypatch.setenv("CSA2_API_KEY", "reader")
    assert main(["top", "--once", "--url", server.url]) == 0
    assert server.asked == [("/csa2/stats", "Bearer reader"), ("/metrics", None), ("/csa2/documents", "Bearer reader")]
    monkeypatch.setenv("CSA2_ADMIN_API_KEY", "admin")
    server.asked.clear()
    assert main(["top", "--once", "--url", server.url]) == 0
    assert server.asked == [("/csa2/stats", "Bearer reader"), ("/metrics", None), ("/csa2/documents", "Bearer admin")]


def test_a_redirection_does_not_get_the_key(server, monkeypatch):
    monkeypatch.setenv("CSA2_API_KEY", "reader")
    server.answers["/csa2/stats"] = (302, b"")
    assert main(["top", "--once", "--url", server.url]) == 1
    assert [path for path, _ in server.asked] == ["/csa2/stats"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((401, b""), "the list needs the admin key: set CSA2_ADMIN_API_KEY"),
        ((404, b""), "the server answers with status 404"),
        ((200, b"{}"), "the list is not that of this version"),
        ((200, b'{"documents": []}'), "none"),
    ],
)
def test_documents_that_cannot_be_listed(server, capsys, answer, told):
    server.answers["/csa2/documents"] = answer
    assert main(["top", "--once", "--url", server.url]) == 0
    assert f"pinned documents        {told}" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_out_of_range_is_refused(capsys, interval):
    assert main(["top", "--interval", interval]) == 1
    assert capsys.readouterr().err.startswith(f"csa2 top failed: --interval {float(interval):g} is out of range")


def test_a_server_without_the_cache_is_one_line(server, capsys):
    server.answers["/csa2/stats"] = (404, b"")
    assert main(["top", "--url", server.url]) == 1
    assert "was started without --kv-compress csa2" in capsys.readouterr().err


@contextmanager
def start(server, clean_env, **options):
    command = [sys.executable, "-m", "csa2.cli", "top", "--url", server.url, "--interval", "0.1"]
    # The background of a shell ignores SIGINT, and a child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, env={**clean_env, "NO_COLOR": "1"}, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_in_a_pipe_readings_follow_each_other_until_nobody_reads(server, clean_env):
    with start(server, clean_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        taken = [process.stdout.readline() for _ in range(60)]
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    assert "\x1b" not in "".join(taken)
    assert taken.count(f"csa2 top  {server.url}\n") >= 2


def test_a_server_that_stops_answering_is_told(server, clean_env):
    with start(server, clean_env, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        server.answers["/csa2/stats"] = (500, b"")
        told = next(line for line in process.stdout if "Trying again." in line)
        server.answers["/csa2/stats"] = (200, msgspec.json.encode(msgspec.structs.replace(STATS, logical_tokens=64)))
        assert any("64 of 25600" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 0
    assert "HTTP 500" in told


class Terminal:
    """A terminal that `csa2 top` runs in."""

    def __init__(self, columns, rows):
        self.outside, self.inside = pty.openpty()
        self.resize(columns, rows)
        self.written = ""

    def resize(self, columns, rows):
        fcntl.ioctl(self.inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, condition):
        """Go on reading until `condition` holds of all that was written."""
        deadline = time.monotonic() + 60
        while not condition(self.written):
            ready, _, _ = select.select([self.outside], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"not within 60 s: {self.written[-2000:]!r}"
            self.written += os.read(self.outside, 65536).decode()

    def close(self):
        os.close(self.outside)
        os.close(self.inside)


@pytest.fixture
def terminal():
    terminal = Terminal(80, 24)
    yield terminal
    terminal.close()


def frames(written):
    """The screens drawn so far, as lines; the last may be half there."""
    plain = written.replace("\x1b[K", "").replace("\x1b[J", "")
    return [frame.split("\r\n") for frame in re.split(r"\x1b\[H", plain)[1:]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_in_a_terminal_it_draws_again_and_leaves_the_screen_as_it_was(server, clean_env, terminal, number, code):
    inside = terminal.inside
    with start(server, clean_env, stdin=inside, stdout=inside, stderr=inside) as process:
        terminal.read_until(lambda written: written.count("\x1b[J") >= 3)
        shown = frames(terminal.written)[1]
        assert shown[:2] == [f"csa2 top  {server.url}", "every 0.1 s, Ctrl-C ends"]
        assert len(shown) == 24
        assert len(shown[2]) == 79
        terminal.resize(50, 10)
        process.send_signal(signal.SIGWINCH)
        terminal.read_until(lambda written: any(len(frame) == 10 for frame in frames(written)[:-1]))
        small = next(frame for frame in frames(terminal.written) if len(frame) == 10)
        assert max(map(len, small)) == 49
        process.send_signal(number)
        assert process.wait(60) == code
    terminal.read_until(lambda written: written.endswith("\x1b[?25h\x1b[?1049l"))
    assert terminal.written.startswith("\x1b[?1049h\x1b[?25l")


def test_it_needs_neither_torch_nor_sglang(server, clean_env):
    code = (
        "import sys\nfrom csa2.cli import main\n"
        f"main(['top', '--once', '--url', {server.url!r}])\n"
        "print(sorted({'torch', 'transformers', 'sglang', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_no_server_is_one_line(capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert main(["top", "--url", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"csa2 top failed: no server answers at {url}")
    assert err.count("\n") == 1
