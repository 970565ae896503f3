"""Compressed pages under models of different families, against SGLang's own cache and torch attention.

Every family serves the same requests in six runs of real schedulers: SGLang's cache in fp32 (the truth) and in bf16 (what
rounding costs), compressed pages kept plain, sealed, and sealed in fp32, and SGLang's cache in fp32 again with the pages
replaced by what the codec makes of them. Errors are root mean squares over the log probabilities of the whole vocabulary.

*Plain pages* cost rounding only. A layer of ours rounds as often as one of SGLang's, and at most as often again where it
merges parts of the attention: twice the variance, so at most sqrt(2) times the error that SGLang's own bf16 has.

*Sealed pages* cost what the codec costs and nothing else: the run over pages and the run over replaced rows differ by
rounding. That can carry a code over to its neighbour. Values off by d cross a border between codes of distance s with
probability d / s and are then off by s; the codec itself is off by s / sqrt(12). So the error beyond the codec's is its
sqrt(12 d / s): with d = 2^-20 of a value (sixteen fp32 roundings) and s = 1/8 (E4M3, the finer of both) one hundredth.

*What the codec costs* is held against the signal, what other tokens in those pages would change. Codes are off by at most
1/5 (E2M1) or 1/17 (E4M3) of a value. Values enter the result once. A key's error enters a logit in proportion to the
logits, which deviate by about 2 here. Other tokens are off by sqrt(2): r sqrt(1 + 2^2) / sqrt(2) of the signal.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_schedulers import SchedulerForks
from jobs import Job, Run
from tiny_models import FAMILIES, LAYERS, VOCABULARY, Family, build
from workload import (
    BEYOND_CODEC,
    CONTROLS,
    FP4_REQUESTS,
    FP8_REQUESTS,
    FP32_ROUNDING,
    GROUPS,
    HOT_TOKENS,
    SHARED,
    difference,
    error,
)

from csa2.options import PAGE_SIZE

pytestmark = pytest.mark.e2e

U32_OVER_U16 = 2.0**-16
LONGEST_SUM = 640
"""Terms of the longest sum: the intermediate size of a model, or the keys of a request."""
SIGNAL_SHARE = {"fp4": 1 / 5 * math.sqrt(5 / 2), "fp8": 1 / 17 * math.sqrt(5 / 2)}


@dataclass(frozen=True)
class Runs:
    """The six runs of a family."""

    family: Family
    truth: Run
    bf16: Run
    plain: Run
    sealed: Run
    sealed_fp32: Run
    replaced: Run


@pytest.fixture(scope="module", params=list(FAMILIES))
def runs(request: pytest.FixtureRequest, forks: SchedulerForks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    build(folder, family)

    def run(dtype: str, **more: object) -> Run:
        return forks.run(Job(str(folder), dtype, **{"groups": GROUPS, **more}))

    whole = {"hot_tokens": 4096, "warm_tokens": 4096}
    sealed_fp32 = run("float32", csa2={"hot_tokens": HOT_TOKENS})
    return Runs(
        family,
        truth=run("float32", groups=GROUPS + CONTROLS),
        bf16=run("bfloat16"),
        plain=run(family.dtype, csa2=whole),
        sealed=sealed_fp32 if family.dtype == "float32" else run(family.dtype, csa2={"hot_tokens": HOT_TOKENS}),
        sealed_fp32=sealed_fp32,
        replaced=run(
            "float32",
            replay=sealed_fp32.formats,
            identity_layers=tuple(sealed_fp32.stats["identity_basis_layers"]),
        ),
    )


def test_pages_have_the_geometry_of_the_model(runs: Runs) -> None:
    name, itemsize = ("fp32", 4) if runs.family.dtype == "float32" else ("bf16", 2)
    values = 2 * LAYERS * runs.family.kv_heads * PAGE_SIZE * runs.family.head_dim
    assert list(runs.plain.stats["page_bytes"]) == [name, "fp8", "fp4"]
    assert runs.plain.stats["page_bytes"][name] == values * itemsize


def test_the_models_are_neither_flat_nor_certain(runs: Runs) -> None:
    """Else reading the wrong keys would not show."""
    logprobs = runs.truth.logprobs["long"]
    assert 1.0 < -(logprobs.exp() * logprobs).sum(-1).mean() < 0.9 * math.log(VOCABULARY)


def test_plain_pages_cost_rounding_only(runs: Runs) -> None:
    assert runs.plain.stats["pages"]["fp8"] == runs.plain.stats["pages"]["fp4"] == 0
    assert all(len(set(formats)) == 1 for step in runs.plain.formats for formats in step.values())
    rounding = error(runs.bf16, runs.truth)
    if runs.family.dtype == "float32":
        # Here sums round too, which bf16 models add up in fp32.
        assert error(runs.plain, runs.truth) <= math.sqrt(2 * LONGEST_SUM) * rounding * U32_OVER_U16
    else:
        assert error(runs.plain, runs.truth) <= math.sqrt(2) * rounding
        # No single token either: extremes of two such samples.
        assert difference(runs.plain, runs.truth).abs().max() <= 2 * difference(runs.bf16, runs.truth).abs().max()


def test_pages_are_sealed_by_role(runs: Runs) -> None:
    for run, plain in ((runs.sealed, "fp32" if runs.family.dtype == "float32" else "bf16"), (runs.sealed_fp32, "fp32")):
        # Prompts come in chunks; what is cached is found.
        assert [pass_[0] for pass_ in run.batches[:3]] == [("long", 128), ("long", 128), ("long", 120)]
        assert run.prefix_tokens["again"] == run.prefix_tokens["beside"] == len(SHARED)
        assert [run.prefix_tokens[f"turn{i}"] for i in range(5)] == [0, 128, 192, 256, 320]
        assert run.prefix_tokens["mixed"] == 6 * PAGE_SIZE
        seen = {rid: [step[rid] for step in run.formats if rid in step] for rid in run.prefix_tokens}
        # Page 4 leaves the window while tokens are generated.
        assert seen["long"][2] == [plain, "fp4", "fp4", "fp4", plain, plain]
        assert seen["long"][-1] == [plain, "fp4", "fp4", "fp4", "fp4", plain, plain]
        assert seen["again"][0][:5] == [plain, "fp4", "fp4", "fp4", "fp4"]
        # Pages of the conversation were found before they were sealed.
        assert seen["turn4"][-1] == [plain, "fp8", "fp8", "fp8", "fp8", plain, plain]
        assert seen["mixed"][0][:5] == [plain, "fp8", "fp8", "fp8", "fp8"]
        assert run.stats["pages"]["fp4"] == run.stats["demotions_total"][f"{plain}->fp4"] >= 4
        assert run.stats["pages"]["fp8"] == run.stats["demotions_total"][f"{plain}->fp8"] >= 5


def test_sealed_pages_cost_what_the_codec_costs(runs: Runs) -> None:
    assert runs.sealed_fp32.batches == runs.replaced.batches
    rounding = math.sqrt(2 * LONGEST_SUM) * error(runs.bf16, runs.truth) * U32_OVER_U16
    for rid in runs.replaced.logprobs:
        codec = error(runs.replaced, runs.truth, rid)
        assert error(runs.sealed_fp32, runs.replaced, rid) <= BEYOND_CODEC * codec + rounding, rid


@pytest.mark.parametrize(("name", "rid"), [("fp4", "again"), ("fp8", "mixed")])
def test_the_codec_costs_a_small_share_of_the_signal(runs: Runs, name: str, rid: str) -> None:
    signal = (runs.truth.logprobs[f"not {rid}"] - runs.truth.logprobs[rid]).pow(2).mean().sqrt().item()
    assert 0 < error(runs.sealed_fp32, runs.truth, rid) <= SIGNAL_SHARE[name] * signal


@pytest.mark.parametrize("rids", [FP4_REQUESTS, FP8_REQUESTS], ids=["fp4", "fp8"])
def test_rounding_and_codec_add_up_in_the_model_dtype(runs: Runs, rids: tuple[str, ...]) -> None:
    # Independent errors, so squares add. Entries are rounded once more when they are opened: again the sqrt(2) of above.
    codec, rounding = error(runs.replaced, runs.truth, *rids), error(runs.bf16, runs.truth, *rids)
    assert error(runs.sealed, runs.truth, *rids) <= math.sqrt(2) * math.hypot(codec, rounding)


def test_without_a_hot_window(forks: SchedulerForks, tmp_path: Path) -> None:
    """Pages are sealed as soon as they are full, and read in the next forward pass."""
    build(tmp_path, FAMILIES["llama_llama3_one_kv_head"])
    sealed = forks.run(Job(str(tmp_path), "float32", GROUPS, csa2={"hot_tokens": 0}))
    truth = forks.run(Job(str(tmp_path), "float32", GROUPS))
    replaced = forks.run(Job(str(tmp_path), "float32", GROUPS, replay=sealed.formats))
    first = [step["long"] for step in sealed.formats if "long" in step]
    assert first[0] == ["fp32", "fp4"]
    assert first[-1] == ["fp32", "fp4", "fp4", "fp4", "fp4", "fp4", "fp32"]
    for rid in sealed.logprobs:
        assert error(sealed, replaced, rid) <= BEYOND_CODEC * error(replaced, truth, rid) + FP32_ROUNDING, rid


REDUCED = [
    "gpt2_learned_positions",
    "gptj_interleaved_partial_rotary",
    "phi3_longrope_head_dim_96",
    "qwen3_qk_norm_head_dim_128",
]
"""No rotation, interleaved and partial, other head dimensions."""


@pytest.mark.parametrize("name", REDUCED)
def test_reduced_pages_cost_what_the_codec_costs(forks: SchedulerForks, tmp_path: Path, name: str) -> None:
    build(tmp_path, FAMILIES[name])
    options = {"hot_tokens": HOT_TOKENS, "warm_tokens": HOT_TOKENS, "ratio": "2", "shared_format": "tail"}
    sealed = forks.run(Job(str(tmp_path), "float32", GROUPS, csa2=options))
    truth = forks.run(Job(str(tmp_path), "float32", GROUPS))
    identity = tuple(sealed.stats["identity_basis_layers"])
    replaced = forks.run(Job(str(tmp_path), "float32", GROUPS, replay=sealed.formats, identity_layers=identity))
    assert [step["long"] for step in sealed.formats if "long" in step][-1] == ["fp32", *["csa2-2x"] * 4, "fp32", "fp32"]
    assert sealed.batches == replaced.batches
    for rid in sealed.logprobs:
        assert error(sealed, replaced, rid) <= BEYOND_CODEC * error(replaced, truth, rid) + FP32_ROUNDING, rid


@pytest.mark.parametrize("ratio", ["4", "8"])
def test_merged_pages_keep_part_of_the_signal(forks: SchedulerForks, tmp_path: Path, ratio: str) -> None:
    """Random models, random tokens: nothing repeats, and a group of tokens keeps one key. It still tells more than other
    tokens would."""
    build(tmp_path, FAMILIES["llama_float32"])
    options = {"hot_tokens": HOT_TOKENS, "warm_tokens": HOT_TOKENS, "ratio": ratio, "shared_format": "tail"}
    merged = forks.run(Job(str(tmp_path), "float32", GROUPS, csa2=options))
    truth = forks.run(Job(str(tmp_path), "float32", GROUPS + CONTROLS))
    name = f"csa2-{ratio}x"
    assert [step["long"] for step in merged.formats if "long" in step][-1] == ["fp32", *[name] * 4, "fp32", "fp32"]
    for rid in ("again", "mixed"):
        signal = (truth.logprobs[f"not {rid}"] - truth.logprobs[rid]).pow(2).mean().sqrt().item()
        assert 0 < error(merged, truth, rid) < signal
