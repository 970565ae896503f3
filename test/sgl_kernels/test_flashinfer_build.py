"""The attention variant of FlashInfer with biases, compiled for sm_90a without a device.

That takes minutes: `CSA2_SLOW_BUILDS=1` asks for it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kernels.flashinfer.variant import NAME, SOURCE

pytest.importorskip("flashinfer")

PROGRAM = """
import sys, torch
from sgl_kernels.flashinfer.variant import build_module

module = build_module(torch.bfloat16, getattr(torch, sys.argv[1]), 128, tensor_cores=sys.argv[2] == "tensor cores")
{action}
print(module.jit_library_path)
"""


def toolkit() -> Path | None:
    """Folder of a CUDA toolkit with a compiler and the library that modules are linked to."""
    named = [
        os.environ.get("CUDA_HOME"),
        shutil.which("nvcc") and Path(shutil.which("nvcc")).resolve().parents[1],
        "/usr/local/cuda",
    ]
    for home in (Path(x) for x in named if x):
        if (home / "bin" / "nvcc").exists() and list(home.glob("lib*/libcudart.so")):
            return home
    return None


def environment(folder: Path) -> dict[str, str]:
    """FlashInfer builds below `folder`, for sm_90a, as if there were a driver."""
    drivers = folder / "drivers"
    drivers.mkdir()
    stub = ["gcc", "-shared", "-o", str(drivers / "libcuda.so"), "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(stub, check=True)
    wanted = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_WORKSPACE_BASE": str(folder), "LIBRARY_PATH": str(drivers)}
    home = toolkit()
    if home is not None:
        wanted["CUDA_HOME"] = str(home)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # ninja lies beside the interpreter
    return {**os.environ, **wanted, "PATH": path}


def run(folder: Path, action: str, *arguments: str) -> Path:
    """What `PROGRAM` prints last."""
    command = [sys.executable, "-c", PROGRAM.format(action=action), *arguments]
    ended = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return Path(ended.stdout.strip().splitlines()[-1])


def test_sources_are_generated(tmp_path):
    run(tmp_path, "pass", "float8_e4m3fn", "cuda cores")
    (config,) = tmp_path.rglob("batch_decode_config.inc")
    text = config.read_text()
    assert SOURCE.strip() in text
    assert f"using AttentionVariant = {NAME};" in text
    assert "uint8_t* entry_bias;" in text


@pytest.mark.slow
@pytest.mark.skipif("CSA2_SLOW_BUILDS" not in os.environ, reason="compiles for minutes; CSA2_SLOW_BUILDS=1 asks for it")
@pytest.mark.parametrize(
    ("dtype", "cores"), [("bfloat16", "cuda cores"), ("float8_e4m3fn", "cuda cores"), ("float8_e4m3fn", "tensor cores")]
)
@pytest.mark.timeout(3600)
def test_modules_compile(dtype, cores, tmp_path):
    if toolkit() is None:
        pytest.skip("no CUDA toolkit here: neither CUDA_HOME, nor on PATH, nor in /usr/local/cuda")
    assert run(tmp_path, "module.build(verbose=False)", dtype, cores).stat().st_size > 100_000
