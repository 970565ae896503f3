"""Every command in README and docs is accepted by the program it calls, or says what else it needs.

Accepted means: the program's own parser takes the flags. Whole measurements are recipes, see `test_recipes.py`.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from doc_commands import PAGES, NotAccepted, check, commands

sys.path.insert(0, str(Path(__file__).parent / "sglang_csa2"))

MARKS = ("needs a GPU", "needs the network", "CUDA device", "Not run in CI")
"""Words that a section has whose commands this machine cannot check."""
COMMANDS = list(commands())


@pytest.fixture(scope="module")
def launch():
    """Parses flags of a server as SGLang does with the plugin; nothing is resolved."""
    from resolving import parse

    return lambda words: parse(*words)


@pytest.fixture(scope="module")
def routes():
    """Paths of SGLang's server, and of ours."""
    from fastapi import FastAPI
    from sglang.srt.entrypoints.http_server import app

    from sglang_csa2.http import add_routes

    ours = FastAPI()
    add_routes(ours)
    return {path for route in (*app.routes, *ours.routes) if (path := getattr(route, "path", None))}


def test_commands_are_found():
    programs = {command.text.split()[0] for command in COMMANDS}
    assert {"csa2", "make", "curl", "python"} <= programs
    assert len(COMMANDS) > 60
    assert len({command.page for command in COMMANDS}) > 10


def test_every_command_is_accepted_or_says_what_it_needs(launch, routes):
    wrong = []
    for page, text, section in COMMANDS:
        try:
            known = check(text, launch, routes)
        except NotAccepted as error:
            wrong.append(f"{page}: {text}\n    {error}")
            continue
        if known is None and not any(mark in section for mark in MARKS):
            wrong.append(f"{page}: {text}\n    nothing here can check it, and its section does not say {' or '.join(MARKS)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("csa2 check --model DIR --text FILE... --no-such", "unrecognized arguments: --no-such"),
        ("csa2 doctor -- --model-path DIR --no-such", "unrecognized arguments: --no-such"),
        ("csa2 check --model DIR --tasks needles", "'needles' is unknown"),
        ("OMP_NUM_THREADS=1 python -m sglang.launch_server --model-path DIR --csa2-none 1", "unrecognized arguments"),
        ('make serve ARGS="--csa2-ratio 3"', "invalid choice: '3'"),
        ("make surf", "make has no goal 'surf'"),
        ("curl -s localhost:30000/csa2/state", "no route /csa2/state"),
        ("curl -s localhost:30000/csa2/ratio -d '{\"ratio\": }'", "no JSON"),
        ("python benchmark/capacity.py --no-such 3", "unrecognized arguments: --no-such"),
        ("python benchmark/quality.py --split report --no-such", "unrecognized arguments: --no-such"),
        ("python benchmark/none.py", "there is no benchmark/none.py"),
        ("benchmark/recipes/none.sh", "there is no benchmark/recipes/none.sh"),
    ],
)
def test_what_is_gone_is_noticed(text, said, launch, routes):
    with pytest.raises(NotAccepted, match=re.escape(said)):
        check(text, launch, routes)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_python_is_python(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
        ast.parse(block)
