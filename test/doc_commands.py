"""Commands in the documentation, and whether the programs that they call would take them."""

import argparse
import importlib.util
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = ("python", ".venv/bin/python", "csa2", "make", "curl", "pip", "lm_eval", "docker", "bash")
"""An indented line that begins with one of these is a command."""
SCRIPTS = re.compile(r"benchmark/recipes/\w+\.sh")
PASSED_ON = {"quality.py": ("check", "--model", "m", "--text", "t"), "calibrate_demo.py": ("calibrate",)}
"""Scripts that pass what they do not know on to a command of `csa2`, with what they add."""
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.S | re.M)
_INDENTED = re.compile(r"(?:(?<=\n)\n|\A)((?:    [^\n]*\n)+)")


class NotAccepted(Exception):  # noqa: N818 - what the test reports
    """A command that its program would refuse."""


class Command(NamedTuple):
    """One command of a page, on one line."""

    page: str
    text: str
    section: str
    """The text around it, from heading to heading."""


class Parsed(BaseException):
    """Ends a script once it has parsed its arguments."""


def commands() -> Iterator[Command]:
    """Every command of every page."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for start, block, every in sorted(_blocks(text)):
            for line in _lines(block, every):
                yield Command(path.relative_to(ROOT).as_posix(), line, _section(text, start))


def _blocks(text: str) -> Iterator[tuple[int, str, bool]]:
    """Where blocks begin, what they hold, and whether all of it is commands; other fences show what is printed."""
    for fence in _FENCE.finditer(text):
        if fence[2] == "bash":
            yield fence.start(), fence[3], True
    without = _FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), text)
    for block in _INDENTED.finditer(without):
        yield block.start(), "\n".join(line[4:] for line in block[1].splitlines()), False


def _lines(block: str, every: bool) -> Iterator[str]:
    """Commands of a block: continued lines and strings over several lines joined, loops and comments left out."""
    joined = re.sub(r"[ \t]*\\\n[ \t]*", " ", block)
    joined = re.sub(r"'[^'\n]*\{[^']*'", lambda found: " ".join(found[0].split()), joined)
    for line in joined.splitlines():
        words = re.split(r"(?:^| )#(?: |$)", line)[0].strip()
        first = strip_environment(words).partition(" ")[0]
        if first and (first in PROGRAMS or SCRIPTS.fullmatch(first) or (every and first not in ("for", "done"))):
            yield words


def _section(text: str, start: int) -> str:
    heads = [match.start() for match in re.finditer(r"^#+ ", text, re.M)]
    before = max((head for head in heads if head <= start), default=0)
    after = min((head for head in heads if head > start), default=len(text))
    return text[before:after]


def strip_environment(text: str) -> str:
    """The command without `NAME=value` and `taskset` before it."""
    return re.sub(r"^(?:[A-Z_0-9]+=(?:'[^']*'|\S*) )+", "", text).removeprefix("taskset -c 1 ")


def words_of(text: str) -> list[str]:
    """A command as a shell splits it; what follows a pipe or redirects is left out."""
    text = re.split(r" \| | > ", strip_environment(text))[0]
    return [word.removesuffix("...") for word in shlex.split(re.sub(r'"?\$\([^)]*\)"?', "DIR", text))]


def check(text: str, launch: Callable[[list[str]], object], routes: set[str]) -> str | None:
    """How a command was checked, or None where this file knows no way.

    Args:
        launch: parses flags of a server; exits, or raises ValueError, where they are wrong.
        routes: of a server, `{...}` for what varies.

    Raises:
        NotAccepted: its program would not take it.
    """
    words = words_of(text)
    if words[0] == "csa2":
        accept(lambda: _csa2(words[1:], launch))
    elif words[0] == "make":
        _make(words[1:], launch)
    elif words[0] == "curl":
        _curl(words[1:], routes)
    elif SCRIPTS.fullmatch(words[0]):
        _exists(ROOT / words[0])
    elif words[0].endswith("python") and words[1] == "-m":
        return _module(words[2], words[3:], launch)
    elif words[0].endswith("python"):
        _exists(ROOT / words[1])
        accept(lambda: _script(ROOT / words[1], words[2:], launch))
    else:
        return None
    return "parsed"


def accept(parse: Callable[[], object]) -> None:
    """Raises NotAccepted where `parse` exits or refuses."""
    errors = []

    def fail(parser: argparse.ArgumentParser, message: str) -> None:
        errors.append(message)
        raise SystemExit(2)

    with mock.patch.object(argparse.ArgumentParser, "error", fail):
        try:
            parse()
        except (SystemExit, ValueError) as error:
            raise NotAccepted(errors[0] if errors else str(error)) from error


def _csa2(words: list[str], launch: Callable[[list[str]], object]) -> None:
    from csa2.cli import _parser

    arguments = _parser().parse_args(words)
    if arguments.command == "doctor" and arguments.flags:
        first = next(i for i, word in enumerate(arguments.flags) if word.startswith("--"))
        launch(arguments.flags[first:])
    if arguments.command == "check":
        from csa2.check.formats import parse_formats
        from csa2.check.tasks.suite import parse_tasks

        parse_formats(arguments.formats)
        if arguments.tasks is not None:
            parse_tasks(arguments.tasks)


def _make(words: list[str], launch: Callable[[list[str]], object]) -> None:
    goals = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.M))
    values = dict(word.split("=", 1) for word in words if "=" in word)
    wrong = [word for word in words if "=" not in word and word not in goals]
    if wrong:
        raise NotAccepted(f"make has no goal {wrong[0]!r}")
    if "serve" in words and "ARGS" in values:
        accept(lambda: launch(["--model-path", "DIR", *shlex.split(values["ARGS"])]))


def _curl(words: list[str], routes: set[str]) -> None:
    if "-d" in words and not (body := words[words.index("-d") + 1]).startswith("@"):
        try:
            json.loads(body)
        except ValueError as error:
            raise NotAccepted(f"no JSON: {body}") from error
    (address,) = (word for word in words if "/" in word and not word.startswith(("{", "application/", "Content-Type")))
    path = re.sub(r"^(?:http://)?[^/]*", "", address)
    if not any(re.fullmatch(re.sub(r"\{\w+\}", r"[^/]+", route), path) for route in routes):
        raise NotAccepted(f"no route {path}")


def _module(name: str, words: list[str], launch: Callable[[list[str]], object]) -> str | None:
    if name == "sglang.launch_server":
        accept(lambda: launch(words))
    elif name in ("sglang_csa2.check", "sglang_csa2.options_doc"):
        accept(lambda: _run(lambda: importlib.import_module(name).main(words)))
    elif name in ("pytest", "sgl_kernels.triton.gate"):
        for word in words:
            if "/" in word:
                _exists(ROOT / word)
    else:
        return None
    return "parsed"


def _script(path: Path, words: list[str], launch: Callable[[list[str]], object]) -> None:
    with (
        mock.patch.object(sys, "argv", [str(path), *words]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        rest = _run(lambda: runpy.run_path(str(path), run_name="__main__"))
    if rest:
        _csa2([*PASSED_ON[path.name], *rest], launch)


def _run(start: Callable[[], object]) -> list[str]:
    """Words that a program does not know, from its own parser; it ends there."""
    known = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, args: list[str] | None = None, *_: object) -> None:
        _, rest = known(parser, args)
        raise Parsed(rest)

    def parse_all(parser: argparse.ArgumentParser, args: list[str] | None = None, *_: object) -> None:
        _, rest = known(parser, args)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        raise Parsed([])

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_all),
    ):
        try:
            start()
        except Parsed as parsed:
            rest: list[str] = parsed.args[0]
            return rest
    raise NotAccepted("it parses no arguments")


def _exists(path: Path) -> None:
    if not path.exists():
        raise NotAccepted(f"there is no {path.relative_to(ROOT)}")
