"""`csa2 check` from end to end: two engines, one document, both verdicts."""

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
