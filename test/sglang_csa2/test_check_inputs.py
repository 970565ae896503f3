"""User errors of `csa2 check`: named before any engine is started. And an engine that dies."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from csa2.check.errors import EngineError
from csa2.check.metrics import TokenScores
from csa2.check.prompts import Protocol
from csa2.check.results import Measured
from sglang_csa2 import check, check_engine, check_measure, check_tasks
from sglang_csa2.check_engine import Engine
from sglang_csa2.check_inputs import ModelFacts

LONG_TEXT = "The quick brown fox jumps over the lazy dog, said number {}. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(LONG_TEXT.format(i) for i in range(200)))
    return path


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was about to start")

    monkeypatch.setattr(check_measure, "measure", refuse)
    # Set by the command for itself and its engines.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


SMALL = ("--context", "512", "--score-tokens", "64", "--copies", "1")


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error line of a check that does not start."""
    assert check.main([str(argument) for argument in arguments]) == check.NOT_MEASURED
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("csa2 check failed: ")
    return lines[-1]


def test_missing_model(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    assert "is not a folder" in failure(capsys, "--model", tmp_path / "none", "--text", text, *SMALL)
    assert "holds no config.json" in failure(capsys, "--model", tmp_path, "--text", text, *SMALL)


def test_model_that_cannot_be_read(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "has no readable tokenizer" in failure(capsys, "--model", tmp_path, "--text", text, *SMALL)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--formats", "fp5"), "--formats 'fp5' is unknown: choose from bf16"),
        (("--context", "4096", "--score-tokens", "64"), "tokens, 4161 are needed"),
        (("--context", "100"), "--context 100 is not a positive multiple of 64"),
        (("--min-agreement", "101"), "--min-agreement 101 is no percentage"),
        (("--json", "/nowhere/out.json"), "there is no folder /nowhere"),
        (("--variant", "separated", "--csa2-impl", "cpu"), "--csa2-impl cpu does not read pages of --variant separated"),
    ],
)
def test_unusable_options(
    capsys: pytest.CaptureFixture[str], demo_model: Path, text: Path, more: tuple[str, ...], said: str
) -> None:
    assert said in failure(capsys, "--model", demo_model, "--text", text, *SMALL, *more)


def test_calibration_that_is_not_there(
    capsys: pytest.CaptureFixture[str], demo_model: Path, text: Path, tmp_path: Path
) -> None:
    said = failure(capsys, "--model", demo_model, "--text", text, *SMALL, "--csa2-calibration", tmp_path)
    assert str(tmp_path) in said


def test_target_that_is_a_folder(capsys: pytest.CaptureFixture[str], demo_model: Path, text: Path, tmp_path: Path) -> None:
    assert "is a folder" in failure(capsys, "--model", demo_model, "--text", text, *SMALL, "--json", tmp_path)


def test_texts_that_cannot_be_used(capsys: pytest.CaptureFixture[str], demo_model: Path, text: Path, tmp_path: Path) -> None:
    twin, binary = tmp_path / "twin.txt", tmp_path / "binary"
    twin.write_bytes(text.read_bytes())
    binary.write_bytes(b"\xff\xfe")
    model = ("--model", demo_model)
    assert "has the same content as text" in failure(capsys, *model, "--text", text, twin, *SMALL)
    assert "is not UTF-8" in failure(capsys, *model, "--text", binary, *SMALL)
    assert "No such file" in failure(capsys, *model, "--text", tmp_path / "none", *SMALL)


def test_context_beyond_the_window_of_the_model(
    capsys: pytest.CaptureFixture[str], demo_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(LONG_TEXT.format(i) for i in range(1000)))
    said = failure(capsys, "--model", demo_model, "--text", path, "--context", 8192, "--score-tokens", 64)
    assert "but the model takes 8192" in said


def config_of(model: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((model / "config.json").read_text())
    return config


def with_config(model: Path, folder: Path, config: dict[str, object]) -> None:
    """The files of `model` in `folder`, with another config.json."""
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))


def test_model_that_cannot_be_compressed(
    capsys: pytest.CaptureFixture[str], demo_model: Path, text: Path, tmp_path: Path
) -> None:
    with_config(demo_model, tmp_path, {**config_of(demo_model), "head_dim": 20})
    assert "head dimension 20" in failure(capsys, "--model", tmp_path, "--text", text, *SMALL)


def made_up(top_token: int) -> Measured:
    """64 tokens, of which an engine would have written `top_token`."""
    tokens = np.full(64, 7)
    top = np.full((64, 1), top_token)
    stats = {"pages": {"fp32": 1, "fp4": 1}, "page_bytes": {"fp32": 8, "fp4": 1}, "identity_basis_layers": []}
    return Measured((TokenScores(tokens, np.full(64, -1.0), top, np.full((64, 1), -1.0)),), (), (stats,))


@pytest.mark.parametrize(("choice", "code"), [(7, check.AGREES), (8, check.DISAGREES)])
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    demo_model: Path,
    text: Path,
    choice: int,
    code: int,
) -> None:
    monkeypatch.setattr(check_measure, "measure", lambda name, *_: made_up(7 if name == check_measure.FULL else choice))
    given = ["--model", str(demo_model), "--text", str(text), "--context", "512", "--score-tokens", "64"]
    assert check.main([*given, "--copies", "0", "--no-layers", "--min-agreement", "100"]) == code
    assert ("Look, in this order" in capsys.readouterr().out) == (code == check.DISAGREES)


def test_a_variant_is_measured_beside_the_default_one_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, demo_model: Path, text: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(check_measure, "measure", lambda *_: made_up(7))
    out = tmp_path / "out.json"
    given = ["--model", str(demo_model), "--text", str(text), "--context", "512", "--score-tokens", "64"]
    given += ["--copies", "0", "--no-layers", "--json", str(out), "--variant", "separated"]
    assert check.main(given) == check.AGREES
    record = json.loads(out.read_text())
    assert [(row["format"], row["variant"]) for row in record["results"]] == [("fp4", "rotated"), ("fp4", "separated")]
    rotated, separated = record["engines"]["fp4"], record["engines"]["fp4 (separated)"]
    assert separated == {**rotated, "csa2_rope": "separated"}
    assert separated["csa2_impl"] == "reference"


def test_a_rotary_embedding_without_the_variant(
    capsys: pytest.CaptureFixture[str], demo_model: Path, text: Path, tmp_path: Path
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 100000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
    config = config_of(demo_model)
    changed = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "rope_parameters")}
    with_config(demo_model, tmp_path, {**changed, "rope_parameters": yarn})
    said = failure(capsys, "--model", tmp_path, "--text", text, *SMALL, "--variant", "separated")
    assert "does not know the rotary embedding 'yarn'" in said


def test_both_sides_differ_in_the_cache_alone() -> None:
    def arguments(name: str, calibration: Path | None = None) -> dict[str, object]:
        settings = check_measure.EngineSettings("float32", "auto", "cpu", calibration)
        return check_measure.engine_arguments(name, Path("m"), ModelFacts(8192, 1000), Protocol(), settings)

    full, packed = arguments(check_measure.FULL), arguments("fp4")
    assert {key for key in full if key not in packed} == {"max_total_tokens"}
    assert all(packed[key] == full[key] for key in full if key in packed)
    assert all(key == "kv_compress" or key.startswith("csa2_") for key in packed if key not in full)
    with_calibration = arguments("csa2-2x", Path("c"))
    assert with_calibration == {**arguments("csa2-2x"), "csa2_calibration": "c"}
    assert arguments("fp8", Path("c")) == arguments("fp8")  # which has one code


def test_an_engine_that_dies_shows_the_end_of_its_log() -> None:
    engine = Engine("fp4", {"model_path": "nowhere"})
    engine._command = [sys.executable, "-c", "print('first'); print('out of luck'); raise SystemExit(3)"]
    with pytest.raises(EngineError, match=r"for fp4 ended while it started(.|\n)*out of luck"), engine:
        pass


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[-3].encode())
    def do_POST(self):
        self.send_error(400, "too long")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
"""Answers with the model name from the command line, and refuses every request."""


def test_an_engine_that_refuses_a_request_shows_why() -> None:
    engine = Engine("fp4", {})
    engine._command = [sys.executable, "-c", SERVER]
    with pytest.raises(EngineError, match="refused /generate with 400"), engine:
        engine.generate([1, 2])


def test_a_port_that_was_taken_is_left_for_another(tmp_path: Path) -> None:
    once = tmp_path / "once"
    script = (
        f"import pathlib, sys; once = pathlib.Path({str(once)!r})\n"
        "if not once.exists(): once.touch(); sys.exit('[Errno 98] address already in use')\n" + SERVER
    )
    engine = Engine("fp4", {})
    engine._command = [sys.executable, "-c", script]
    with engine:
        assert once.exists()


def test_a_foreign_server_is_not_taken_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engine, "START_TIMEOUT_S", 2)
    engine = Engine("fp4", {})
    engine._command = [sys.executable, "-c", SERVER.replace("sys.argv[-3]", "'another model'")]
    with pytest.raises(EngineError, match="did not start within 2 s"), engine:
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--samples", "3"), "--text is missing"),
        (("--tasks", "needle", "--text", "some.txt"), "--text does nothing with --tasks"),
        (("--tasks", "needle", "--copies", "2"), "--copies does nothing with --tasks"),
        (("--tasks", "needle", "--no-layers"), "--no-layers does nothing with --tasks"),
        (("--tasks", "needle", "--context", "1k"), "--context '1k' is no number of tokens"),
        (("--tasks", "needle", "--context", "16384"), "--context 16384 is beyond the 8192 tokens"),
        (("--tasks", "needle", "--csa2-warm-tokens", "64"), "--csa2-warm-tokens 64 is smaller than --csa2-hot-tokens 128"),
    ],
)
def test_options_of_tasks(
    capsys: pytest.CaptureFixture[str], demo_model: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in failure(capsys, "--model", demo_model, *arguments)


def test_options_that_only_tasks_have(capsys: pytest.CaptureFixture[str], demo_model: Path, text: Path) -> None:
    given = ("--model", demo_model, "--text", text, *SMALL)
    assert "--samples does nothing without --tasks" in failure(capsys, *given, "--samples", 3)
    assert "give one number of tokens" in failure(capsys, *given, "--context", "512,1024")


class FakeEngine:
    """Answers with what it is asked for in the first sample, and with nothing afterwards."""

    def __init__(self, name: str, arguments: dict[str, object]) -> None:
        self.name, self.cached, self.answers = name, 0, 0

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def flush(self) -> None:
        self.cached = 0

    def generate(self, tokens: tuple[int, ...]) -> None:
        assert len(tokens) % 64 == 0
        self.cached = len(tokens)

    def answer(self, tokens: tuple[int, ...], new_tokens: int) -> tuple[str, int]:
        self.answers += 1
        return ("10000" if self.name == "fp4" else "nothing"), self.cached

    def stats(self) -> dict[str, object]:
        return {"pages": {"bf16": 1, "fp4": 3}, "page_bytes": {"bf16": 8, "fp4": 2}}


def test_tasks_from_question_to_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], demo_model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(check_tasks, "Engine", FakeEngine)
    out, results = tmp_path / "out.json", tmp_path / "results"
    given = ["--model", str(demo_model), "--tasks", "needle,variables", "--context", "320,384", "--samples", "2"]
    given += ["--csa2-warm-tokens", "128", "--json", str(out), "--kvpress", str(results)]
    assert check.main(given) == check.AGREES
    said = capsys.readouterr().out
    assert "320 tokens" in said
    assert "384 tokens" in said
    record = json.loads(out.read_text())
    assert record["engines"]["fp4"]["csa2_warm_tokens"] == 128
    assert record["bytes_fraction_total"] == {"full": {"320": 1, "384": 1}, "fp4": {"320": 14 / 32, "384": 14 / 32}}
    assert len(record["answers"]["fp4"]) == 8
    assert len(list(results.iterdir())) == 4
