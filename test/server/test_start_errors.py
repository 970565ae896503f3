"""Starts that must fail with one clear line, and the other ways to start that must work."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import requests
from served import poll

pytestmark = pytest.mark.e2e

TIMEOUT_S = 240


def start(*command: str, **environment: str) -> tuple[int, str]:
    """Run a command that is expected to end by itself; its status and output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CSA2_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, *command],
        env={"OMP_NUM_THREADS": "1", **env, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout


def launch(model: Path, *options: str, **environment: str) -> tuple[int, str]:
    return start("-m", "sglang.launch_server", "--model-path", str(model), "--kv-compress", "csa2", *options, **environment)


def test_without_the_plugin_the_option_is_unknown(demo_model: Path) -> None:
    code, output = launch(demo_model, SGLANG_PLUGINS="other")
    assert code != 0
    assert "unrecognized arguments: --kv-compress csa2" in output.splitlines()[-1]


def test_without_our_platform_the_start_says_what_to_list(demo_model: Path) -> None:
    code, output = launch(demo_model, SGLANG_PLUGINS="csa2")
    assert code != 0
    assert "list both csa2 and csa2_cpu" in output.splitlines()[-1]


def test_an_option_that_is_not_available_is_named(demo_model: Path) -> None:
    code, output = launch(demo_model, "--csa2-impl", "cuda")
    assert code != 0
    assert "--csa2-impl cuda needs a CUDA device, and torch sees none" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("size", "message"),
    [("1MB", "an arena of 1000000 bytes"), ("900GiB", "--csa2-arena-size of 966367641600 bytes")],
    ids=["too small", "larger than memory"],
)
def test_an_arena_that_cannot_be_is_named(demo_model: Path, size: str, message: str) -> None:
    code, output = launch(demo_model, "--csa2-arena-size", size)
    assert code != 0
    assert any("OptionError" in line and message in line for line in output.splitlines()), output[-3000:]


def test_sglang_serve_with_a_config_file(demo_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config.write_text(f"kv-compress: csa2\ncsa2-arena-size: 60MB\ncsa2-hot-tokens: 64\nhost: 127.0.0.1\nport: {port}\n")
    sglang = Path(sys.executable).parent / "sglang"
    log = tmp_path / "log"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CSA2_", "SGLANG_"))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sglang, "serve", str(demo_model), "--config", str(config)],
            env={"OMP_NUM_THREADS": "1", **env},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            with suppress(requests.ConnectionError):
                return requests.get(f"http://127.0.0.1:{port}/model_info", timeout=5).ok
            return False

        poll("server ready", ready, TIMEOUT_S)
        options = requests.get(f"http://127.0.0.1:{port}/csa2/stats", timeout=60).json()["options"]
        assert (options["arena_size"], options["hot_tokens"]) == ("60MB", 64)
    finally:
        process.terminate()
        process.wait(60)


ENGINE = """
import json, sys
import sglang
from sglang_csa2.control import engine_stats

if __name__ == "__main__":
    engine = sglang.Engine(model_path=sys.argv[1], kv_compress="csa2", csa2_arena_size="60MB", csa2_hot_tokens=64,
                           csa2_documents=sys.argv[2], context_length=1024, log_level="error")
    text = "The capital of Greece is Athens. The capital of Germany is"
    answer = engine.generate(text, {"max_new_tokens": 6, "temperature": 0})
    print(json.dumps({"text": answer["text"], **engine_stats(engine)}))
    engine.shutdown()
"""


def test_engine(demo_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "rules.txt").write_text("Rule: be brief and exact.\n" * 40)
    code, output = start(str(script), str(demo_model), str(documents))
    assert code == 0, output[-3000:]
    line = next(line for line in output.splitlines() if line.startswith('{"text"'))
    told = json.loads(line)
    assert "Berlin" in told["text"]
    assert told["options"]["hot_tokens"] == 64
    assert told["documents"] == 1
    assert told["pinned_pages"] > 0
