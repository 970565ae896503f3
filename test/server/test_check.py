"""`csa2 check` from end to end: two engines, one document, or a few questions."""

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from conftest import child_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONTEXT, SCORED, COPIES = 2048, 128, 4
TIMEOUT_S = 800
COLUMNS = (
    "bytes_fraction_compressed",
    "bytes_fraction_total",
    "ppl_increase_pct",
    "ppl_se_pct",
    "kl_nats",
    "top1_agreement_pct",
    "copy_recall_pct",
    "copy_recall_full_pct",
)


def run_check(demo_model: Path, text: Path, out: Path, minimum: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_csa2.check", "--model", str(demo_model), "--text", str(text)]
    command += ["--device", "cpu", "--formats", "csa2-8x", "--context", str(CONTEXT), "--score-tokens", str(SCORED)]
    command += ["--copies", str(COPIES), "--json", str(out), "--min-agreement", str(minimum)]
    environment = {**child_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_too_little_agreement_is_exit_code_1(demo_model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "topics.txt", tmp_path / "out.json"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics))[:15_000])
    # No 128 tokens in a row agree in the smallest format, which changes about one in twenty.
    ended = run_check(demo_model, text, out, minimum=100)
    assert ended.returncode == 1, ended.stderr
    assert "is under 100 %. Look, in this order, at" in ended.stdout
    assert "first disagreements" in ended.stdout
    record = json.loads(out.read_text())
    (row,) = record["results"]
    assert row["format"] == "csa2-8x"
    assert all(isinstance(row[column], float) for column in COLUMNS)
    # 16 pages beyond the warm window in the format itself, which takes less than a twentieth.
    assert row["bytes_fraction_compressed"] < 0.05 < row["bytes_fraction_total"] < 0.5
    assert record["cache"]["csa2-8x"]["pages"]["csa2-8x"] == (CONTEXT + SCORED - 1024) // 64 - 1
    # The model copies most of what it can still read, and the text is English: neither engine is lost.
    assert row["copy_recall_full_pct"] > 60
    assert 1 < record["perplexity_full"] < 60
    assert 50 < row["top1_agreement_pct"] < 100
    assert len(record["loss_by_layer"]["csa2-8x"]) == 30


def test_questions_are_answered_from_compressed_pages(demo_model: Path, tmp_path: Path) -> None:
    out, results = tmp_path / "out.json", tmp_path / "results"
    command = [sys.executable, "-m", "sglang_csa2.check", "--model", str(demo_model), "--device", "cpu", "--dtype", "auto"]
    command += ["--tasks", "needle,multi-value", "--context", "512", "--samples", "2", "--formats", "fp4"]
    command += ["--csa2-warm-tokens", "128", "--json", str(out), "--kvpress", str(results)]
    environment = {**child_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(out.read_text())
    scores = {(row["format"], row["task"]): row["score_pct"] for row in record["results"]}
    # The demo model finds a number in 500 tokens nearly always; what it answers may differ by rounding.
    assert scores["full", "needle"] >= 50
    assert scores["fp4", "needle"] >= 50
    # 7 pages: the first plain, the last two in the hot window.
    assert record["bytes_fraction_total"]["fp4"]["512"] < 0.75
    assert sorted(path.name.split("__")[3] for path in results.iterdir()) == ["fp4", "no_press"]
    assert "512 tokens" in ended.stdout
