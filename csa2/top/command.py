"""`csa2 top`: asks, writes, waits, until it is interrupted."""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from csa2.errors import OptionError
from csa2.info import ServerStatsError
from csa2.top.readings import Readings, take_reading
from csa2.top.screen import MIN_WIDTH, Span, lines, paint

MAX_INTERVAL_S = 3600.0
# Alternate screen without a cursor, and back. Home; what is left of a line; what is left of the screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def run(arguments: argparse.Namespace) -> int:
    """Show the server at `arguments.url`; the exit code.

    Raises:
        OptionError: an interval out of range, or no address.
        ServerStatsError: the server does not answer the first time.
    """
    interval = arguments.interval
    if not 0.1 <= interval <= MAX_INTERVAL_S:
        raise OptionError(f"--interval {interval:g} is out of range: give seconds from 0.1 to {MAX_INTERVAL_S:.0f}")
    readings = Readings()
    readings.add(take_reading(arguments.url))
    out = sys.stdout
    try:
        if arguments.once:
            _print(out, arguments.url, readings)
        elif out.isatty():
            _watch(out, arguments.url, readings, interval)
        else:
            _follow(out, arguments.url, readings, interval)
    except KeyboardInterrupt:
        return 0  # the way to end it
    except BrokenPipeError:
        # Whoever read has seen enough. Python would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return 0


def _print(out: TextIO, url: str, readings: Readings) -> None:
    width = max(MIN_WIDTH, shutil.get_terminal_size().columns)
    out.write("".join(paint(line, width, False) + "\n" for line in lines(url, readings, width)))
    out.flush()


def _follow(out: TextIO, url: str, readings: Readings, interval: float) -> None:
    """One reading after the other, an empty line between them."""
    while True:
        _print(out, url, readings)
        out.write("\n")
        _pause(interval)
        if note := _read(url, readings):
            out.write(note + "\n")


def _watch(out: TextIO, url: str, readings: Readings, interval: float) -> None:
    """The newest reading on a screen of its own, drawn again when the window changes its size."""
    colours = "NO_COLOR" not in os.environ
    note = f"every {interval:g} s, Ctrl-C ends"
    with _own_screen(out):
        while True:
            _draw(out, url, readings, note, colours)
            if not _pause(interval):
                note = _read(url, readings) or f"every {interval:g} s, Ctrl-C ends"


def _draw(out: TextIO, url: str, readings: Readings, note: str, colours: bool) -> None:
    # Not shutil's: that would believe COLUMNS, which knows nothing of a new size.
    columns, rows = os.get_terminal_size(out.fileno())
    # The last column stays free: some terminals would begin a new line.
    width = max(MIN_WIDTH, columns - 1)
    screen = lines(url, readings, width)
    screen[1] = [Span(note)]
    shown = [paint(line, width, colours) + _END_OF_LINE for line in screen[: max(1, rows)]]
    out.write(_HOME + "\n".join(shown) + _END_OF_SCREEN)
    out.flush()


def _read(url: str, readings: Readings) -> str:
    """Ask again; what is to be told if there is no answer."""
    try:
        readings.add(take_reading(url, readings.last))
    except ServerStatsError as error:
        return f"{error}. Trying again."
    return ""


def _pause(seconds: float) -> bool:
    """Wait; whether it ended early because the window changed its size."""
    return signal.sigtimedwait([signal.SIGWINCH], seconds) is not None


@contextmanager
def _own_screen(out: TextIO) -> Iterator[None]:
    """The alternate screen of the terminal, given back however the body ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    before = signal.signal(signal.SIGTERM, _end)
    out.write(_ENTER)
    try:
        yield
    finally:
        out.write(_LEAVE)
        out.flush()
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGWINCH])


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
