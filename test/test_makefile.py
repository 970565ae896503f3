"""`make` and the scripts of .ci: what they start, and that each failure is one line.

The scripts run in a copy of the few files they read, with an environment whose Python writes down what it is told.
So nothing is installed, downloaded or served here.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GOALS = ("help", "setup", "serve", "test", "asan", "bench", "check", "docs", "dist", "format", "clean")

# Plays $VENV/bin/python. Its answers lie in files beside it: pip.log and pip.code, cuda (there is one), version.
FAKE_PYTHON = """#!/bin/bash
here="$(dirname "$0")"
echo "$*" >>"$here/calls"
case "$*" in
*"pip --version"*) exit 0 ;;
*"pip --log"*) cat "$here/pip.log" >"$4"; exit "$(cat "$here/pip.code")" ;;
*torch*) [ -e "$here/cuda" ] || exit 3 ;;
*version_info*) cat "$here/version" ;;
esac
"""
FAKE_CSA2 = '#!/bin/bash\necho "$*" >>"$(dirname "$0")/calls"\necho /models/demo\n'


class Checkout:
    """A copy of what the scripts read, with a fake environment in `.venv`."""

    def __init__(self, root, env):
        self.root = root
        self.env = env
        self.bin = root / ".venv" / "bin"
        self.stamp = root / ".venv" / "csa2-setup.stamp"
        shutil.copytree(ROOT / ".ci", root / ".ci")
        for name in ("Makefile", "requirements.lock", "pyproject.toml", "csa2/__init__.py"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
        self.bin.mkdir(parents=True)
        (self.bin.parent / "pyvenv.cfg").write_text("prompt = 'sglang-csa2'\n")
        self.script("python", FAKE_PYTHON)
        self.script("csa2", FAKE_CSA2)
        self.answer("version", "3.11")
        self.pip(0)

    def script(self, name, text, folder=None):
        path = (folder or self.bin) / name
        path.write_text(text)
        path.chmod(0o755)

    def answer(self, name, text):
        (self.bin / name).write_text(text)

    def pip(self, code, log=""):
        self.answer("pip.code", str(code))
        self.answer("pip.log", log)

    def make(self, *arguments, **env):
        return subprocess.run(
            ["make", *arguments], cwd=self.root, env=self.env | env, capture_output=True, text=True, timeout=60
        )

    def calls(self):
        """What was started in the environment since the last time, pip's installations and the rest."""
        path = self.bin / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if "--version" not in line and "version_info" not in line]

    def failure(self, *arguments, **env):
        """The line that a failing goal ends with; make's own line comes after it."""
        done = self.make(*arguments, **env)
        assert done.returncode != 0
        lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
        assert len(lines) == 1, done.stderr
        return lines[0]


@pytest.fixture
def checkout(tmp_path, clean_env):
    (tmp_path / "checkout").mkdir()
    # Enough room wherever the tests run.
    checkout = Checkout(tmp_path / "checkout", clean_env | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    (tmp_path / "bin").mkdir()
    set_free_disk(checkout, 100)
    return checkout


def set_free_disk(checkout, gigabytes):
    text = f"#!/bin/sh\necho Filesystem\necho disk 1 1 {gigabytes * 2**20} 1% /\n"
    checkout.script("df", text, checkout.root.parent / "bin")


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_help_is_the_default_and_lists_every_goal(checkout):
    done = checkout.make()
    assert done.returncode == 0
    assert done.stdout == checkout.make("help").stdout
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert [goal for goal in GOALS if goal not in listed] == []
    assert checkout.calls() == []


@pytest.mark.parametrize("goal", GOALS)
def test_every_goal_is_known_to_make(checkout, goal):
    assert checkout.make("-n", goal).returncode == 0


def test_setup_installs_once(checkout):
    done = checkout.make("setup")
    assert done.returncode == 0, done.stderr
    pip, demo = checkout.calls()
    assert pip.endswith("install --editable .[dev]")
    assert demo == "demo-model"
    assert done.stdout.splitlines()[-1] == "/models/demo"
    assert checkout.stamp.is_file()
    assert checkout.make("setup").returncode == 0
    assert checkout.calls() == ["demo-model"]


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_setup_installs_again_when_the_versions_change(checkout, name):
    checkout.make("setup")
    checkout.calls()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    checkout.make("setup")
    assert checkout.calls()[0].endswith("install --editable .[dev]")


def test_setup_points_a_shared_environment_to_this_checkout(checkout):
    checkout.make("setup")
    moved = checkout.root.rename(checkout.root.parent / "moved")
    checkout.root, checkout.bin = moved, moved / ".venv" / "bin"
    checkout.calls()
    assert checkout.make("setup").returncode == 0
    assert checkout.calls()[0].endswith("install --no-deps --editable .")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("2026-01-01 ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("connection error: HTTPSConnectionPool: Max retries exceeded with url", "the package index does not answer"),
        (
            "1 WARNING: Retrying (Retry(total=0, connect=None))\n1 ERROR: ResolutionImpossible: for help",
            "the package index does not answer",
        ),
        (
            "1 ERROR: Cannot install a and b because of conflicting dependencies.\n1 ERROR: ResolutionImpossible",
            "exclude each other (Cannot install a and b because",
        ),
        ("2026-01-01 ERROR: something new", "pip said: something new"),
        ("", "pip said: nothing"),
    ],
)
def test_a_failed_install_is_one_line_and_leaves_no_stamp(checkout, log, expected):
    checkout.make("setup")
    (checkout.root / "requirements.lock").write_text("changed==1\n")
    checkout.pip(1, log + "\n")
    line = checkout.failure("setup")
    assert line.startswith("setup failed: ")
    assert expected in line
    assert line.endswith("log: .venv/csa2-setup.log")
    assert not checkout.stamp.exists()
    checkout.pip(0)
    assert checkout.make("setup").returncode == 0
    assert checkout.stamp.is_file()


def test_a_failed_setup_stops_the_goals_that_need_it(checkout):
    checkout.pip(1)
    for goal in ("test", "check", "format"):
        assert checkout.failure(goal).startswith("setup failed: ")


def test_too_little_disk_is_told_before_anything_is_made(checkout):
    set_free_disk(checkout, 3)
    line = checkout.failure("setup", "VENV=new")
    assert "3 GB free, a new environment needs 12 GB" in line
    assert not (checkout.root / "new").exists()


def test_a_python_that_is_too_old_is_named(checkout):
    checkout.script("python3.9", "#!/bin/sh\necho 3.9\n", checkout.root.parent / "bin")
    line = checkout.failure("setup", "VENV=new", "PYTHON=python3.9")
    assert line.startswith("setup failed: python3.9 is Python 3.9, but SGLang 0.5.23 needs 3.11 or 3.12")
    assert not (checkout.root / "new").exists()


def test_an_environment_with_an_old_python_is_named(checkout):
    checkout.answer("version", "3.9")
    assert ".venv/bin/python is Python 3.9" in checkout.failure("setup")


def test_a_python_that_is_missing_is_named(checkout):
    line = checkout.failure("setup", "VENV=new", "PYTHON=no-such-python")
    assert line.startswith("setup failed: there is no no-such-python")


def test_a_folder_that_is_no_environment_is_left_alone(checkout):
    for goal, expected in (("setup", "is no virtual environment"), ("clean", "was not made by")):
        assert expected in checkout.failure(goal, "VENV=csa2")
    assert (checkout.root / "csa2" / "__init__.py").is_file()


def test_clean_removes_the_environment(checkout):
    (checkout.root / ".ruff_cache").mkdir()
    for name in ("benchmark", "python", "sgl_kernels", "test"):
        (checkout.root / name).mkdir()
    assert checkout.make("clean").returncode == 0
    assert not checkout.bin.exists()
    assert not (checkout.root / ".ruff_cache").exists()
    assert (checkout.root / "csa2" / "__init__.py").is_file()


def test_serve_says_when_the_port_is_taken_and_starts_nothing(checkout, taken_port):
    line = checkout.failure("serve", f"PORT={taken_port}")
    assert line.startswith(f"serve failed: port {taken_port} on 127.0.0.1 cannot be used (Address already in use)")
    assert checkout.calls() == []


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1", "99999999999"])
def test_serve_refuses_what_is_no_port(checkout, port):
    assert checkout.failure("serve", f"PORT={port}") == (
        f"serve failed: PORT={port} is no port: give a number from 1 to 65535"
    )
    assert checkout.calls() == []


@pytest.mark.parametrize("cuda", [False, True])
def test_serve_starts_the_server_with_the_demo_model(checkout, free_port, cuda):
    if cuda:
        checkout.answer("cuda", "")
    done = checkout.make("serve", f"PORT={free_port}", "ARGS=--csa2-hot-tokens 64 --log-level 'very quiet'")
    assert done.returncode == 0, done.stderr
    device = "" if cuda else "--device cpu "
    assert checkout.calls()[-1] == (
        f"-m sglang.launch_server --kv-compress csa2 --model-path /models/demo --enable-fp32-lm-head "
        f"--csa2-calibration {checkout.root}/csa2/calibrations/smollm2-135m-instruct "
        f"--host 127.0.0.1 --port {free_port} {device}--csa2-hot-tokens 64 --log-level very quiet"
    )
    assert f"http://127.0.0.1:{free_port}" in done.stdout


def test_arguments_reach_pytest(checkout):
    assert checkout.make("test", "ARGS=-m 'not slow' -x").returncode == 0
    assert checkout.calls()[-1] == "-m pytest -m not slow -x"


def test_check_runs_every_tool_and_names_the_one_that_fails(checkout):
    tool = '#!/bin/bash\necho "$(basename "$0") $*" >>"$(dirname "$0")/calls"\n'
    checkout.script("ruff", tool)
    checkout.script("mypy", tool)
    assert checkout.make("check").returncode == 0
    assert checkout.calls()[-5:] == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "-m sglang_csa2.options_doc --check docs/options.md",
        "-m mkdocs build --strict --quiet",
    ]
    checkout.script("mypy", "#!/bin/sh\nexit 1\n")
    assert checkout.failure("check") == "check failed: mypy found the faults above"
    checkout.script("ruff", '#!/bin/sh\n[ "$1" = check ]\n')
    assert checkout.failure("check") == "check failed: run `make format`"


def test_the_lock_pins_exact_versions_and_no_places():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if "==" not in line or "/" in line or "@" in line] == []
    assert "sglang==0.5.23" in lines
    assert not any(line.startswith("sglang-csa2=") for line in lines)


def test_every_script_is_sound_shell():
    for script in (*(ROOT / ".ci").glob("*.sh"), ROOT / ".ci" / "run"):
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), script
        assert os.access(script, os.X_OK) or script.name == "common.sh"
