"""`csa2 doctor -- FLAGS`: what is said about a server before it starts. SGLang's part is played."""

import json

import pytest

from csa2.cli import main
from csa2.doctor import flags
from csa2.doctor.before_start import facts_of
from csa2.doctor.flag_rules import RULES
from csa2.doctor.flags import Resolved, gather, read_flags
from csa2.errors import OptionError

CONFIG = {
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
"""A token takes 4096 bytes."""
DEFAULTS = {"kv_compress": "csa2", "page_size": 64, "chunked_prefill_size": 1024, "mem_fraction_static": 0.5, "tp_size": 1}
MIB = 2**20


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def look(folder):
    """Names of the findings for flags, on a machine with `memory` bytes; `resolved` are changes of what SGLang resolves."""

    def names(*words, memory=1024 * MIB, **resolved):
        case = see(folder, words, memory, resolved)
        return [finding.name for rule in RULES if (finding := rule(case)) is not None]

    return names


def see(folder, words, memory=1024 * MIB, resolved=None):
    words = ("--model-path", str(folder), "--kv-compress", "csa2", "--csa2-ratio", "1", *words)
    values = DEFAULTS | read_flags(words) | (resolved or {})
    return gather(words, memory, lambda _: Resolved(values))


def test_flags_are_read_as_they_are_written():
    words = ["python", "-m", "sglang.launch_server", "--model", "DIR", "--page-size=32", "--lora-paths", "a", "b", "--trust"]
    assert read_flags(words) == {"model_path": "DIR", "page_size": "32", "lora_paths": "a b", "trust": True}
    with pytest.raises(OptionError, match="no flags after"):
        read_flags(["python"])


def test_nothing_stands_out(look):
    assert look("--csa2-arena-size", "256MiB", "--max-running-requests", "16") == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        # 16 requests of 4096 tokens take 256 MiB in bf16 and, at 4 bits behind the hot window, some 75.
        (("--csa2-arena-size", "40MiB", "--max-running-requests", "16"), ["arena-too-small"]),
        (("--csa2-arena-size", "1MB"), ["arena-too-small", "large-chunks"]),
        (("--csa2-arena-size", "2GiB"), ["memory-short"]),
        (("--disable-radix-cache",), ["radix-cache-off"]),
        (("--csa2-hot-tokens", "4096", "--csa2-warm-tokens", "4096"), ["nothing-to-compress"]),
        (("--page-size", "128"), ["large-pages"]),
        (("--csa2-ratio", "auto"), ["no-calibration"]),
        (("--csa2-impl", "reference"), ["reference-implementation"]),
        (("--csa2-arena-size", "20MiB", "--chunked-prefill-size", "-1"), ["chunked-prefill-off"]),
        (("--csa2-arena-size", "20MiB", "--chunked-prefill-size", "4096"), ["large-chunks"]),
    ],
)
def test_findings(look, words, wanted):
    assert look(*words) == wanted


def test_more_ranks_share_the_heads(look):
    words = ("--csa2-arena-size", "40MiB", "--max-running-requests", "16")
    assert look(*words, "--tp-size", "2") == []


def test_the_arena_is_estimated_from_memory(folder):
    case = see(folder, ())
    weights = case.weights_bytes
    assert case.arena_bytes == 512 * MIB - weights
    assert any("an estimate" in fact for fact in facts_of(case))
    assert "of that length fit at once" in facts_of(case)[-1]


def test_a_calibration_of_another_model(folder, look):
    other = folder / "calibration"
    other.mkdir()
    shape = {"num_layers": 9, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    (other / "config.json").write_text(json.dumps({"model_name": "other", "shape": shape}))
    assert look("--csa2-calibration", str(other)) == ["mismatched-calibration"]


def test_a_refusal_is_told_and_the_rest_is_looked_at_all_the_same(folder):
    words = ("--model-path", str(folder), "--kv-compress", "csa2", "--csa2-ratio", "1", "--disable-radix-cache")
    case = gather(words, 1024 * MIB, lambda _: Resolved(error="--pp-size 2 is refused"))
    found = {finding.name: finding for rule in RULES if (finding := rule(case)) is not None}
    assert list(found) == ["refused", "radix-cache-off"]
    assert found["refused"].seen == "--pp-size 2 is refused"


def test_without_sglang_the_options_are_checked_here(folder):
    words = ("--model-path", str(folder), "--kv-compress", "csa2", "--csa2-warm-tokens", "1")
    case = gather(words, 1024 * MIB, lambda _: Resolved(unknown="not installed"))
    assert "--csa2-warm-tokens 1 is smaller" in case.resolved.error
    assert case.unseen == ["what SGLang itself makes of the flags: not installed"]


def test_a_model_that_is_not_here():
    words = ("--model-path", "org/model", "--kv-compress", "csa2", "--csa2-ratio", "1")
    case = gather(words, 1024 * MIB, lambda _: Resolved({**DEFAULTS, "model_path": "org/model", "csa2_ratio": "1"}))
    assert case.unseen == ["the model: --model-path org/model is no folder here"]
    assert [rule(case) for rule in RULES] == [None] * len(RULES)


def test_the_command(folder, monkeypatch, capsys):
    given = ["--model-path", str(folder), "--csa2-ratio", "1", "--csa2-arena-size", "64MB"]
    seen = []

    def preflight(words):
        seen.append(list(words))
        return Resolved({**DEFAULTS, **read_flags(words), "kv_compress": None})

    monkeypatch.setattr(flags, "run_preflight", preflight)
    assert main(["doctor", "--memory", "1GiB", "--", "python", "-m", "sglang.launch_server", *given]) == 1
    said = capsys.readouterr().out
    assert said.startswith("Looked at the flags; nothing was started:\n  a token takes 4096 bytes")
    assert "1. The compressed cache is not asked for" in said
    assert main(["doctor", "--json", "--", *given, "--kv-compress", "csa2"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["flags"][0] == "--model-path"
    assert seen == [given, [*given, "--kv-compress", "csa2"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "1GiB"], "--memory belongs to flags"),
        (["--prompts", "p.txt", "--", "--model-path", "d"], "--prompts belongs"),
    ],
)
def test_options_that_do_not_go_together(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
