"""Flags are resolved as a start does, in a process of its own."""

from pathlib import Path

from resolving import write_model

from csa2.doctor.flags import run_preflight


def test_flags_are_resolved(tmp_path: Path) -> None:
    model = str(write_model(tmp_path))
    given = ("--model-path", model, "--skip-tokenizer-init", "--device", "cpu", "--kv-compress", "csa2", "--csa2-ratio", "2")
    resolved = run_preflight(given)
    assert resolved.error is None
    assert resolved.values is not None
    assert {name: resolved.values[name] for name in ("page_size", "csa2_ratio", "attention_backend")} == {
        "page_size": 64,
        "csa2_ratio": "2",
        "attention_backend": "csa2",
    }
    assert 0 < resolved.values["mem_fraction_static"] < 1


def test_what_is_refused_is_told_in_the_words_of_a_start(tmp_path: Path) -> None:
    model = str(write_model(tmp_path))
    resolved = run_preflight(("--model-path", model, "--device", "cpu", "--kv-compress", "csa2", "--page-size", "16"))
    assert resolved.values is None
    assert resolved.error is not None
    assert resolved.error.startswith("--page-size 16 cannot be combined with --kv-compress csa2")
    unknown = run_preflight(("--model-path", model, "--no-such-flag"))
    assert "unrecognized arguments: --no-such-flag" in str(unknown.error)
