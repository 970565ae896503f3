"""The memory planner: worked examples, kinds of models, what it refuses. That it agrees with a server: test_pressure.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros

from csa2.capacity import plan_arena
from csa2.cli import main
from csa2.options import CacheOptions
from csa2.plan.fit import Workload, make_plan, server_ladder
from csa2.plan.model_memory import PlanError, read_model

GB = 10**9
LLAMA3_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def config(**values: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return path

    return config


def planned(path: Path, memory: int, context: int, concurrency: int = 1, ranks: int = 1, weights: int = GB) -> Any:
    work = Workload(memory_bytes=memory, context=context, concurrency=concurrency, ranks=ranks, weights_bytes=weights)
    return make_plan(read_model(path), work)


def test_sixty_layers_of_64_heads_take_64_gb_a_request(write: Any) -> None:
    """60 layers x 64 heads x 128, 32K tokens, FP16: 64 GB a request, 512 GB for eight."""
    path = write(num_hidden_layers=60, num_attention_heads=64, head_dim=128, hidden_size=8192, dtype="float16")
    plan = planned(path, 1000 * GB, 32768, 8)
    assert plan.bf16_bytes_per_token == 2 * 60 * 64 * 128 * 2
    assert round(plan.request_bytes / GB) == 64
    # 64 GB times eight, where one request is 64.4.
    assert plan.request_bytes * 8 / GB == pytest.approx(512, rel=0.01)


def test_sixty_one_layers_of_7168_take_1_75_mb_a_token(write: Any) -> None:
    """61 layers x 7168, FP16: 1.75 MB a token, about 7.2 GB for 4096 tokens, about 58 GB for eight requests."""
    path = write(num_hidden_layers=61, num_attention_heads=56, head_dim=128, hidden_size=7168, dtype="float16")
    plan = planned(path, 1000 * GB, 4096, 8)
    assert plan.bf16_bytes_per_token / 1e6 == pytest.approx(1.75, abs=0.005)
    assert plan.request_bytes / GB == pytest.approx(7.2, abs=0.05)
    assert plan.request_bytes * 8 / GB == pytest.approx(58, rel=0.015)


def test_llama_3_8b(write: Any) -> None:
    path = write(**LLAMA3_8B)
    model = read_model(path)
    assert model.token_bytes == 131072
    # 8.03 billion, as its card says.
    assert model.parameters / 1e9 == pytest.approx(8.03, abs=0.01)
    plan = planned(path, 24 * 2**30, 32768, 8, weights=model.weights_bytes())
    by_name = {fit.name: fit for fit in plan.formats}
    assert list(by_name) == ["bf16", "fp8", "fp4", "csa2-2x", "csa2-4x", "csa2-8x"]
    assert plan.kv_bytes == 24 * 2**30 - model.weights_bytes() - plan.reserve_bytes
    assert by_name["bf16"].tokens == plan.kv_bytes // 131072
    assert by_name["bf16"].requests == by_name["bf16"].tokens // 32768
    requests = [fit.requests for fit in plan.formats]
    assert requests == sorted(requests)
    assert plan.chosen.name == "csa2-2x"


def test_two_ranks_hold_half_of_everything(write: Any) -> None:
    path = write(**LLAMA3_8B)
    one = planned(path, 24 * 2**30, 8192, weights=0)
    two = planned(path, 24 * 2**30, 8192, ranks=2, weights=0)
    for whole, half in zip(one.formats, two.formats, strict=True):
        assert half.tokens == pytest.approx(2 * whole.tokens, rel=0.05), half.name
    with pytest.raises(PlanError, match="--tp 3 cannot split 32 query and 8 KV heads"):
        planned(path, 24 * 2**30, 8192, ranks=3)


def test_latents_and_windows_are_counted_and_marked(write: Any) -> None:
    latent = planned(write(**LLAMA3_8B, kv_lora_rank=512, qk_rope_head_dim=64), 24 * 2**30, 8192)
    assert latent.bf16_bytes_per_token == 32 * (512 + 64) * 2
    assert [fit.planned for fit in latent.formats] == [False, False, True, True, True, True]
    kinds = ["sliding_attention", "full_attention"] * 16
    window = planned(write(**LLAMA3_8B, sliding_window=1024, layer_types=kinds), 24 * 2**30, 8192)
    assert window.request_bytes == (16 * 8192 + 16 * 1024) * 4096
    assert "sliding window" in str(window.model.unserved)
    unused = read_model(write(**LLAMA3_8B, sliding_window=1024, use_sliding_window=False))
    assert unused.unserved is None


def test_tokens_are_those_of_the_arena(write: Any) -> None:
    """The planner cuts the arena as a server does."""
    path = write(**LLAMA3_8B)
    plan = planned(path, 24 * 2**30, 8192)
    for fit, ratio in zip(plan.formats[2:], ("1", "2", "4", "8"), strict=True):
        ladder = server_ladder(plan.model, 1, CacheOptions(ratio=ratio))
        arena = plan_arena(plan.kv_bytes, ladder.page_bytes, ladder.guard)
        assert fit.tokens == arena.max_pages * 64


def test_the_command(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(**LLAMA3_8B)
    save_file({"x": zeros(250)}, path.parent / "model.safetensors")
    arguments = ["plan", "--model", str(path.parent), "--memory", "24GiB", "--context", "32768", "--concurrency", "8"]
    weights = (path.parent / "model.safetensors").stat().st_size
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bf16_bytes_per_token"] == 131072
    assert record["weights_bytes"] == weights
    assert set(record["formats"]["fp4"]) >= {"tokens", "requests"}
    assert "--max-running-requests 8" in record["recommended"]
    assert main([*arguments, "--weights-bytes", "16GB", "--tp", "2", "--reserve", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert "7.45 GiB (8 GB) (given)" in text
    assert "--tp-size 2" in text
    assert main([*arguments, "--weights-bytes", "20GB", "--concurrency", "1000"]) == 1
    assert "do not fit in any format" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--memory", "24 apples"], "--memory '24 apples' is not a size"),
        (["--context", "0"], "--context 0"),
        (["--context", "200000"], "beyond the 131072 tokens"),
        (["--concurrency", "-1"], "--concurrency -1"),
        (["--memory", "1GiB"], "do not take the weights"),
        (["--model", "/nowhere"], "no config.json"),
    ],
)
def test_mistakes_are_named(write: Any, capsys: pytest.CaptureFixture[str], change: list[str], named: str) -> None:
    path = write(**LLAMA3_8B)
    assert main(["plan", "--model", str(path), "--memory", "24GiB", "--context", "4096", *change]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "values", [{}, {"num_hidden_layers": 0}, {**LLAMA3_8B, "torch_dtype": "int3"}, {**LLAMA3_8B, "hidden_size": "big"}]
)
def test_a_config_that_says_too_little(write: Any, values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="--model"):
        read_model(write(**values))
