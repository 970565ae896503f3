"""Arguments resolved as on a machine with a CUDA device, which is pretended."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from resolving import resolve, write_model

from csa2.errors import OptionError
from csa2.impl import resolve_impl

HOPPER = SimpleNamespace(total_memory=80 << 30, major=9, minor=0, multi_processor_count=132, name="Pretended")
CUDA: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: HOPPER.name,
    "get_device_capability": lambda *_: (HOPPER.major, HOPPER.minor),
    "get_device_properties": lambda *_: HOPPER,
    "mem_get_info": lambda *_: (70 << 30, HOPPER.total_memory),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(Path(tmp_path_factory.mktemp("llama"))))


@pytest.fixture
def cuda(llama: str) -> Iterator[None]:
    resolve("--model-path", llama)  # SGLang picks what to import by the devices that it sees
    with ExitStack() as stack:
        for name, function in CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        resolve_impl.cache_clear()
        yield
    resolve_impl.cache_clear()


def on_cuda(llama: str, *argv: str) -> dict[str, Any]:
    arguments = ("--device", "cuda", "--mem-fraction-static", "0.5", "--kv-compress", "csa2", *argv)
    return dict(resolve("--model-path", llama, *arguments).resolved_dict())


@pytest.mark.usefixtures("cuda")
def test_decode_steps_are_captured_and_do_not_overlap(llama: str) -> None:
    values = on_cuda(llama, "--csa2-impl", "cuda")
    graphs = values["cuda_graph_config"]
    assert (graphs["decode"]["backend"], graphs["prefill"]["backend"]) == ("full", "disabled")
    assert values["disable_overlap_schedule"] is True
    assert (values["attention_backend"], values["page_size"]) == ("csa2", 64)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("argv", [["--disable-cuda-graph"], ["--cuda-graph-backend-decode", "disabled"]])
def test_decode_steps_need_not_be_captured(llama: str, argv: list[str]) -> None:
    assert on_cuda(llama, "--csa2-impl", "cuda", *argv)["cuda_graph_config"]["decode"]["backend"] == "disabled"


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--kv-compress csa2 on cuda is served by kernels that have been compiled"),
        (["--csa2-impl", "cpu"], "--kv-compress csa2 on cuda is served by kernels that have been compiled"),
        (["--csa2-impl", "cuda", "--cuda-graph-backend-decode", "breakable"], "--kv-compress csa2 cannot be combined with"),
        (["--csa2-impl", "cuda", "--cuda-graph-backend-prefill", "full"], "--kv-compress csa2 cannot be combined with"),
    ],
)
def test_what_is_not_served_on_cuda(llama: str, argv: list[str], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        on_cuda(llama, *argv)
    assert str(refused.value).startswith(message)


@pytest.mark.usefixtures("cuda")
def test_kernels_for_cuda_are_not_for_the_cpu(llama: str) -> None:
    """The device decides; the same option on a CPU of a machine with a GPU would serve host memory by its kernels."""
    with pytest.raises(OptionError, match="--csa2-impl cuda on --device cpu"):
        resolve("--model-path", llama, "--kv-compress", "csa2", "--device", "cpu", "--csa2-impl", "cuda")
