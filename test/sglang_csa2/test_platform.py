"""SGLang runs on a CPU without an accelerator, with and without the flag, and a missing piece is one clear line."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from resolving import write_model
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_csa2 import platform
from sglang_csa2.cpu_platform import Csa2CpuPlatform


@pytest.fixture
def bare_host(monkeypatch):
    """A machine on which torch sees no accelerator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(platform, "UNSEEN_ACCELERATORS", ())
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


def launch(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m sglang.launch_server` as a user starts it."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_activates_on_a_bare_host(bare_host):
    assert platform.activate() == f"{Csa2CpuPlatform.__module__}.{Csa2CpuPlatform.__qualname__}"


@pytest.mark.parametrize("where", ["cuda", "accelerator"])
def test_steps_aside_for_an_accelerator(bare_host, monkeypatch, where):
    monkeypatch.setattr(getattr(torch, where), "is_available", lambda: True)
    assert platform.activate() is None


def test_steps_aside_for_a_device_torch_cannot_see_yet(bare_host, monkeypatch):
    monkeypatch.setattr(platform, "UNSEEN_ACCELERATORS", ("habana_frameworks_of_a_test", "json"))
    assert platform.activate() is None


def test_steps_aside_for_the_cpu_engine_of_sglang(bare_host, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


def test_entry_point_names():
    names = {point.name: point.value for point in entry_points(group="sglang.srt.platforms")}
    assert names["csa2_cpu"] == "sglang_csa2.platform:activate"


def test_cpu_platform_answers_what_sglang_asks():
    cpu = Csa2CpuPlatform()
    assert isinstance(cpu, SRTPlatform)
    assert cpu._enum is PlatformEnum.OOT
    assert cpu.get_device(None) == "cpu"  # SGLang splits it as a string
    assert cpu.get_default_attention_backend() == "torch_native"
    assert cpu.get_dispatch_key_name() == "native"
    assert cpu.get_torch_profiler_activity() is torch.profiler.ProfilerActivity.CPU
    assert cpu.get_device_total_memory() > cpu.get_current_memory_usage() > 0
    assert not cpu.capabilities.graph_capture


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_rotary_embedding_is_built_without_vllm():
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.platforms import current_platform

    assert isinstance(current_platform, Csa2CpuPlatform)
    rope = get_rope(64, rotary_dim=64, max_position=128, base=10000, is_neox_style=True)
    query, key = torch.randn(3, 64), torch.randn(3, 64)
    rotated, _ = rope(torch.tensor([0, 1, 2]), query.clone(), key.clone())
    torch.testing.assert_close(rotated[0], query[0])
    assert not torch.equal(rotated[1], query[1])


def test_refusal_is_the_last_line_of_the_launch(tmp_path):
    model = write_model(tmp_path / "llama")
    ended = launch("--model-path", str(model), "--kv-compress", "csa2", "--pp-size", "2")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(
        "csa2.errors.OptionError: --kv-compress csa2 cannot be combined with --pp-size 2: "
    )


def test_plugin_filtered_out_makes_the_flag_unknown(tmp_path):
    ended = launch("--model-path", str(tmp_path), "--kv-compress", "csa2", SGLANG_PLUGINS="some_other_plugin")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith("error: unrecognized arguments: --kv-compress csa2")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_cpu_platform_filtered_out_is_named(tmp_path):
    model = write_model(tmp_path / "llama")
    ended = launch("--model-path", str(model), "--kv-compress", "csa2", SGLANG_PLUGINS="csa2")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("csa2.errors.OptionError: --kv-compress csa2 on the CPU needs a CPU platform, but SGLang has")
    assert "list both csa2 and csa2_cpu" in last
