"""The `csa2` command and the report of `csa2 info`."""

import json
import socket
import subprocess
import sys

import msgspec
import pytest
from fake_server import serving
from stats_samples import cache_stats

import csa2
from csa2 import info
from csa2.cli import main
from csa2.errors import OptionError
from csa2.info import ServerStatsError, fetch_stats
from csa2.stats import CacheStats, combined_stats

STATS = cache_stats(
    arena_bytes=2**30,
    used_bytes=2**20,
    slab_bytes=2**21,
    pages={"bf16": 2, "fp8": 0, "fp4": 30},
    page_bytes={"bf16": 737280, "fp8": 380000, "fp4": 194000},
    logical_tokens=2048,
    capacity_tokens=100_000,
    compression_ratio=3.4567,
    metadata_fraction=0.0625,
    demotions_total={"bf16->fp4": 30},
    compactions_total=1,
    evicted_tokens_total=64,
    prefix_hit_tokens_total=128,
    prompt_tokens_total=4096,
    turns_total=5,
    prefix_hit_tokens_by_format={"bf16": 64, "fp8": 0, "fp4": 64},
    identity_basis_layers=[0, 7],
    options={"ratio": "1", "arena_size": None, "hot_tokens": 128},
)


@pytest.fixture
def server():
    with serving({"/csa2/stats": (200, msgspec.json.encode(STATS))}) as server:
        yield server


def run(clean_env, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "csa2.cli", *arguments], env=clean_env, capture_output=True, text=True, timeout=120
    )


def test_version(clean_env):
    done = run(clean_env, "--version")
    assert (done.returncode, done.stdout) == (0, f"sglang-csa2 {csa2.__version__}\n")


def test_help_names_the_commands_and_imports_nothing_heavy(clean_env):
    code = (
        "import sys\nfrom csa2.cli import main\ntry:\n    main(['--help'])\n"
        "except SystemExit:\n    print(sorted({'torch', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, timeout=120)
    assert "demo-model" in done.stdout
    assert "info" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["info", "--frobnicate"], ["demo-model", "extra"]])
def test_bad_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: csa2" in capsys.readouterr().err


def test_demo_model_prints_the_folder_alone(clean_env, demo_model):
    done = run(clean_env, "demo-model", "--cache-dir", str(demo_model.parent))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{demo_model}\n", "")


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("csa2.demo_model.ensure_demo_model", interrupt)
    assert main(["demo-model"]) == 130
    assert capsys.readouterr().err == "csa2 demo-model was interrupted\n"


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"versions", "platform", "options"}
    assert report["versions"]["sglang"] == "0.5.23"
    assert set(info.PACKAGES) < set(report["versions"])
    assert set(report["platform"]["isa"]) == set(info.ISA_FLAGS)
    assert report["platform"]["memory_bytes"] > 2**30
    assert report["options"]["resolved_impl"] == "cpu"


def test_info_as_text(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for line in ("versions:", "machine:", "options (defaults):", "  cuda", "  resolved_impl         cpu"):
        assert line in text
    assert "server" not in text


def test_info_never_imports_sglang(clean_env):
    code = "import sys\nfrom csa2.info import collect\ncollect()\nprint('sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(info, "PACKAGES", ("no-such-package-here",))
    assert info.versions()["no-such-package-here"] == "not installed"


def test_info_of_a_server_as_text(server, capsys):
    assert main(["info", "--url", server.url + "/"]) == 0
    assert server.asked == [("/csa2/stats", None)]
    words = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "arena 1 MiB used of 1 GiB, 2 MiB in slabs",
        "compression ratio 3.46 against bf16",
        "metadata 6.2 % of the bytes used",
        "pages fp4 30, 194000 bytes each",
        "demotions bf16->fp4 30",
        "identity basis layers 0, 7",
        "server options:",
        "hot_tokens 128",
    ):
        assert line in words


def test_info_of_a_server_as_json(server, capsys):
    assert main(["info", "--url", server.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["server"].pop("url") == server.url
    assert msgspec.convert(report["server"], CacheStats) == STATS


def test_info_of_replicas_is_of_all_and_says_how_many(server, capsys):
    server.answers["/csa2/stats"] = (200, msgspec.json.encode(combined_stats([STATS, STATS])))
    assert main(["info", "--url", server.url]) == 0
    words = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("arena 2 MiB used of 2 GiB, 4 MiB in slabs", "replicas 2", "documents 1 with 4 pages, 512 B"):
        assert line in words


def test_a_proxy_does_not_stand_between_this_machine_and_itself(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert fetch_stats(server.url) == STATS


def test_the_key_of_the_server_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("CSA2_API_KEY", "secret")
    fetch_stats(server.url)
    assert server.asked == [("/csa2/stats", "Bearer secret")]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, b"", "it was started without --kv-compress csa2"),
        (401, b"", "set CSA2_API_KEY"),
        (500, b"", "answers /csa2/stats with HTTP 500"),
        (200, b"<html>", "not the statistics of this version"),
        (200, b'{"arena_bytes": 1}', "not the statistics of this version"),
    ],
)
def test_a_server_without_statistics_is_one_line(server, capsys, status, body, expected):
    server.answers["/csa2/stats"] = (status, body)
    assert main(["info", "--url", server.url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("csa2 info failed: ")
    assert expected in err
    assert err.count("\n") == 1


def test_no_server_is_one_line(capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert main(["info", "--url", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"csa2 info failed: no server answers at {url}")
    assert err.count("\n") == 1


def test_a_server_that_does_not_answer_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ServerStatsError, match="no server answers"):
            fetch_stats(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "file:///etc/passwd", "http://", "http://[1", "http://a:port"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(OptionError, match="is not an address"):
        fetch_stats(url)


class _Entry:
    """An entry point that is named `name` and loads `add`."""

    def __init__(self, name, add):
        self.name = name
        self.add = add

    def load(self):
        if isinstance(self.add, Exception):
            raise self.add
        return self.add


def test_further_commands_come_from_entry_points(monkeypatch, capsys):
    def add(commands):
        commands.add_parser("greet").set_defaults(run=lambda arguments: 7)

    def entries(*, group):
        assert group == "csa2.commands"
        return [_Entry("greet", add), _Entry("broken", ImportError("no such module"))]

    monkeypatch.setattr("importlib.metadata.entry_points", entries)
    assert main(["greet"]) == 7
    assert "csa2 broken is not available (no such module)" in capsys.readouterr().err
