"""`csa2 doctor` against a server that is played: what it asks, prints and returns."""

import json
import os
import re
import shutil
import subprocess
import sys

import msgspec
import pytest
from doctor_cases import histogram
from doctor_cases import stats as healthy
from fake_server import serving

from csa2.cli import main
from csa2.doctor import collect
from csa2.doctor.calibration import calibration_fault
from csa2.doctor.readings import Load
from csa2.stats import CacheStats

BUSY = {
    "loads": [
        {"num_running_reqs": 3, "num_waiting_reqs": 2, "max_running_requests": 64, "queues": {"retracted": 1}},
        {
            "num_running_reqs": 1,
            "num_waiting_reqs": 0,
            "max_running_requests": 64,
            "decode_moments": [2, 6, 5e5, 18, 2e6, 6],
        },
    ]
}
"""/v1/loads of two ranks, of which one has counted no step yet."""


def stats(**changes):
    """Bytes of the statistics, whatever fields this version has."""
    known = healthy(**changes) | {"logical_tokens": 640, "capacity_tokens": 6400, "metadata_fraction": 0.05}
    known |= {"demotions_total": {}, "compactions_total": 0, "identity_basis_layers": [], "weight_copy_bytes": 0}
    for field in msgspec.structs.fields(CacheStats):
        if field.name not in known and field.required:
            known[field.name] = {} if "dict" in str(field.type) else 0
    return json.dumps(known).encode()


@pytest.fixture
def server():
    answers = {
        "/csa2/stats": (200, stats(options={"calibration": None})),
        "/server_info": (200, b'{"page_size": 64, "max_running_requests": 64}'),
        "/model_info": (200, b'{"model_path": "/no/such/model"}'),
        "/csa2/documents": (200, b'{"documents": []}'),
        "/v1/loads": (200, json.dumps({"loads": BUSY["loads"][1:]}).encode()),
        "/metrics": (200, histogram("time_to_first_token_seconds", 0.2, 10).encode()),
    }
    with serving(answers) as server:
        yield server


def doctor(server, *more):
    return main(["doctor", "--url", server.url, "--seconds", "0", *more])


def test_a_healthy_server_exits_with_0(server, capsys, monkeypatch):
    monkeypatch.setenv("CSA2_API_KEY", "secret")
    assert doctor(server) == 0
    out = capsys.readouterr().out
    assert "Nothing stands out." in out
    assert "80000 of 100000 prompt tokens were found in the cache" in out
    assert "1 requests run, 0 wait" in out
    assert "first token after 0.20 s (mean of 10 requests)" in out
    assert "Could not look at" not in out
    assert {key for _, key in server.asked} == {"Bearer secret"}


def test_findings_exit_with_1_and_say_what_to_do(server, capsys):
    server.answers["/csa2/stats"] = (
        200,
        stats(prefix_hit_tokens_total=1000, options={"impl": "reference", "calibration": None}),
    )
    server.answers["/v1/loads"] = (200, json.dumps(BUSY).encode())
    assert doctor(server) == 1
    out = capsys.readouterr().out
    titles = re.findall(r"^\d\. (.*)$", out, flags=re.MULTILINE)
    assert titles == [
        "No compiled code: attention is computed by the torch reference",
        "Few prompt tokens are found in the cache",
        "The first token is late because requests wait",
        "Running requests lose their pages and start over",
    ]
    assert out.count("   do:   ") >= 4
    assert "more: docs/troubleshooting.md#low-hit-rate" in out


def test_json_has_the_same(server, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    rules = " ".join(f"Rule {number} is to be kept." for number in range(60))
    prompts.write_text("".join(f"Request {number}: {rules}\n" for number in range(10, 30)))
    assert doctor(server, "--json", "--prompts", str(prompts)) == 1
    record = json.loads(capsys.readouterr().out)
    (finding,) = record["findings"]
    assert finding["name"] == "prompts-differ-early"
    assert finding["link"] == "docs/troubleshooting.md#low-hit-rate"
    assert set(finding) == {"name", "title", "seen", "why", "fix", "link"}
    assert any("characters are compared" in reason for reason in record["not_seen"])
    assert record["url"] == server.url


def test_what_cannot_be_looked_at_is_told(server, capsys):
    server.answers |= {"/csa2/documents": (401, b""), "/v1/loads": (500, b""), "/server_info": (200, b"[]")}
    del server.answers["/metrics"]
    server.answers["/csa2/stats"] = (200, stats())
    assert doctor(server) == 0
    out = capsys.readouterr().out
    for reason in (
        "/csa2/documents wants another key (HTTP 401)",
        "/v1/loads answers with HTTP 500",
        "/server_info does not answer with a JSON object",
        "start the server with --enable-metrics",
        "whether the calibration fits the model",
    ):
        assert reason in out


def test_no_server_and_wrong_usage_exit_with_2(server, capsys, tmp_path):
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--seconds", "0"]) == 2
    assert "csa2 doctor failed: no server answers" in capsys.readouterr().err
    server.answers["/csa2/stats"] = (404, b"")
    assert doctor(server) == 2
    assert "started without --kv-compress csa2" in capsys.readouterr().err
    for arguments in (("--seconds", "-1"), ("--prompts", str(tmp_path / "nothing"))):
        assert doctor(server, *arguments) == 2
        assert "csa2 doctor failed: --" in capsys.readouterr().err


def test_loads_are_read_once_a_second_and_summed_over_ranks(server):
    server.answers["/v1/loads"] = (200, json.dumps(BUSY).encode())
    slept = []
    case = collect.observe(server.url, 3.0, slept.append).case
    assert slept == [1.0, 1.0, 1.0]
    assert len(case.loads) == 4
    assert case.loads[0] == Load(running=4, waiting=2, retracted=1, limit=128, steps=2, batch_sum=6, tokens=6, busy_us=5e5)


def test_the_command_starts_without_torch(server, clean_env):
    code = (
        "import sys\nfrom csa2.cli import main\n"
        f"main(['doctor', '--url', {server.url!r}, '--seconds', '0'])\n"
        "print(sorted({'torch', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_calibration_is_compared_with_the_model(demo_model, tmp_path):
    shipped = os.path.join(os.path.dirname(collect.__file__), "..", "calibrations", "smollm2-135m-instruct")
    assert calibration_fault(collect.Path(shipped), demo_model) is None
    other = tmp_path / "calibration"
    shutil.copytree(shipped, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"weights_digest": "0" * 64}))
    assert "same shape but other weights" in calibration_fault(other, demo_model)
    (other / "config.json").write_text(json.dumps(config | {"shape": config["shape"] | {"num_layers": 31}}))
    assert "31 layers" in calibration_fault(other, demo_model)
    (other / "config.json").write_text("{}")
    assert "cannot be read" in calibration_fault(other, demo_model)
    assert "is not a model folder" in calibration_fault(collect.Path(shipped), tmp_path)
