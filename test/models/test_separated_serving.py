"""Serving with `--csa2-rope separated`: what pages without rotation cost is what the codec costs, at every position.

The bounds are those of `test_model_families`, and so is the argument: the run over pages and the run whose rows were
replaced by what the letter of the layout gives back, rotated in float64, differ by rounding.
"""

from pathlib import Path

import pytest
from forked_schedulers import SchedulerForks
from jobs import Job
from tiny_models import FAMILIES, LLAMA_LIKE, Family, build
from workload import BEYOND_CODEC, CONTROLS, FP32_ROUNDING, GROUPS, HOT_TOKENS, error

pytestmark = pytest.mark.e2e

LINEAR = Family(
    "LlamaConfig", {**LLAMA_LIKE, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
)
SEPARABLE = {
    "llama": Family("LlamaConfig", {**LLAMA_LIKE}),
    "llama_linear": LINEAR,
    **{name: FAMILIES[name] for name in ("llama_llama3_one_kv_head", "phi_partial_rotary_head_dim_80", "qwen2_biased_qkv")},
    "gptj_interleaved_partial_rotary": FAMILIES["gptj_interleaved_partial_rotary"],
}


def options(ratio: str, **more: object) -> dict[str, object]:
    windows = {"hot_tokens": HOT_TOKENS, "warm_tokens": HOT_TOKENS}
    return {**windows, "ratio": ratio, "rope": "separated", **more}


@pytest.mark.parametrize("ratio", ["1", "2"])
@pytest.mark.parametrize("name", SEPARABLE)
def test_separated_pages_cost_what_the_codec_costs(forks: SchedulerForks, tmp_path: Path, name: str, ratio: str) -> None:
    build(tmp_path, SEPARABLE[name])
    # Shared pages in FP8 with ratio 1: two formats side by side.
    sealed = forks.run(Job(str(tmp_path), "float32", GROUPS, csa2=options(ratio)))
    truth = forks.run(Job(str(tmp_path), "float32", GROUPS))
    identity = tuple(sealed.stats["identity_basis_layers"])
    replaced = forks.run(
        Job(str(tmp_path), "float32", GROUPS, replay=sealed.formats, identity_layers=identity, replay_rope="separated")
    )
    assert sealed.stats["options"]["rope"] == "separated"
    assert sealed.stats["options"]["impl"] == "reference"
    assert sum(count for step, count in sealed.stats["demotions_total"].items() if step.startswith("fp32")) >= 8
    for rid in sealed.logprobs:
        assert error(sealed, replaced, rid) <= BEYOND_CODEC * error(replaced, truth, rid) + FP32_ROUNDING, rid


@pytest.mark.parametrize("ratio", ["4", "8"])
def test_merged_pages_still_tell_what_was_said(forks: SchedulerForks, tmp_path: Path, ratio: str) -> None:
    """As in `test_model_families`: a merged page changes the answer less than other tokens would. Both variants merge the
    same tokens, so they answer alike, up to the codes of their keys."""
    build(tmp_path, SEPARABLE["llama"])
    runs = {
        rope: forks.run(Job(str(tmp_path), "float32", GROUPS, csa2=options(ratio, shared_format="tail", rope=rope)))
        for rope in ("rotated", "separated")
    }
    truth = forks.run(Job(str(tmp_path), "float32", GROUPS + CONTROLS))
    assert runs["separated"].formats == runs["rotated"].formats
    for rid in ("again", "mixed"):
        signal = (truth.logprobs[f"not {rid}"] - truth.logprobs[rid]).pow(2).mean().sqrt().item()
        assert 0 < error(runs["separated"], truth, rid) < signal
        assert 0 < error(runs["separated"], runs["rotated"], rid) < signal
