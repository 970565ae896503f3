"""A key bias that survives the page mean, as Qwen2 models have in one layer, from the weights to the answers.

The bias of layer 1 sits in the fastest rotary pair, eighteen times as large as the content of its head; layer 2 has one as
large in slow pairs, which the page mean removes. The queries hardly look at either: what hurts is how a page stores them.
"""

from dataclasses import dataclass

import pytest
import torch
from forked_schedulers import SchedulerForks
from jobs import Job, Run
from tiny_models import FAMILIES, build, save
from workload import BEYOND_CODEC, FP4_REQUESTS, FP8_REQUESTS, FP32_ROUNDING, GROUPS, HOT_TOKENS, difference, error

pytestmark = pytest.mark.e2e

DIM, PAIRS = 64, 32
FAST, SLOW = (0,), tuple(range(24, 32))
SIZE = 18.0
"""In contents of the head. Qwen2.5-0.5B has 15.6 and 17.8 in its first layer."""


@dataclass(frozen=True)
class Runs:
    """The model served from SGLang's cache, from ours, and from ours with the flag of layer 1 forced off."""

    truth: Run
    flagged: Run
    unflagged: Run
    replaced: Run


@pytest.fixture(scope="module")
def runs(forks: SchedulerForks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("biased")
    model = build(folder, FAMILIES["qwen2_biased_qkv"])
    put_bias(model.model.layers[1], 1, FAST)
    put_bias(model.model.layers[2], 0, SLOW)
    save(model, folder)
    sealed = {"hot_tokens": HOT_TOKENS}
    flagged = forks.run(Job(str(folder), "float32", GROUPS, csa2=sealed))
    return Runs(
        truth=forks.run(Job(str(folder), "float32", GROUPS)),
        flagged=flagged,
        unflagged=forks.run(Job(str(folder), "float32", GROUPS, csa2=sealed, identity_layers=())),
        replaced=forks.run(Job(str(folder), "float32", GROUPS, replay=flagged.formats, identity_layers=(1,))),
    )


@torch.no_grad()
def put_bias(layer: torch.nn.Module, kv_head: int, pairs: tuple[int, ...]) -> None:
    """Give the keys of `kv_head` a bias of SIZE contents in rotary `pairs`, and let its queries look elsewhere."""
    attention, norm = layer.self_attn, layer.input_layernorm.weight
    rows = slice(kv_head * DIM, (kv_head + 1) * DIM)
    content = (attention.k_proj.weight[rows].double() * norm.double()).norm()
    channels = torch.tensor([half + pair for pair in pairs for half in (0, PAIRS)])
    attention.k_proj.bias[rows.start + channels] = (SIZE * content / len(channels) ** 0.5).to(norm.dtype)
    for head in (2 * kv_head, 2 * kv_head + 1):
        attention.q_proj.weight[head * DIM + channels] *= 0.05
        attention.q_proj.bias[head * DIM + channels] *= 0.05


def test_the_layer_is_flagged_at_load_and_no_other(runs: Runs) -> None:
    assert runs.flagged.stats["identity_basis_layers"] == [1]
    (line,) = [line for line in runs.flagged.log if "key bias" in line]
    assert line.startswith("csa2: layer 1 keeps a key bias of 18.0")
    assert line.endswith("its keys are stored per channel")
    assert runs.unflagged.stats["identity_basis_layers"] == []


def test_pages_are_sealed_either_way(runs: Runs) -> None:
    assert runs.flagged.formats == runs.unflagged.formats
    assert {"fp4", "fp8"} <= {name for step in runs.flagged.formats for formats in step.values() for name in formats}


@pytest.mark.parametrize(("rids", "factor"), [(FP4_REQUESTS, 3), (FP8_REQUESTS, 2)], ids=["fp4", "fp8"])
def test_the_flag_keeps_the_answers(runs: Runs, rids: tuple[str, ...], factor: float) -> None:
    """By more than that in the layer itself: the other layers cost as much with the flag as without."""
    assert factor * error(runs.flagged, runs.truth, *rids) <= error(runs.unflagged, runs.truth, *rids)


def test_the_flagged_layer_costs_what_its_codec_costs(runs: Runs) -> None:
    assert runs.flagged.batches == runs.replaced.batches
    assert difference(runs.flagged, runs.replaced).abs().max() > 0  # two different computations
    for rid in runs.flagged.logprobs:
        codec = error(runs.replaced, runs.truth, rid)
        assert error(runs.flagged, runs.replaced, rid) <= BEYOND_CODEC * codec + FP32_ROUNDING, rid
