"""Every Triton kernel compiled ahead of time for every architecture, and what came out."""

import pytest

from sgl_kernels.triton.gate import ARCHITECTURES, PRODUCTS, REGISTER_LIMIT, SHARED_LIMIT, compile_case, loop_instructions
from sgl_kernels.triton.gate_cases import CASES, Case


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing comes from an earlier run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=ARCHITECTURES.get)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_compiled_fits(case: Case, architecture: int):
    compiled = compile_case(case, architecture)
    assert compiled.registers <= (case.registers if architecture >= 90 else REGISTER_LIMIT)
    assert compiled.stack_bytes == 0, "registers are spilled"
    assert compiled.shared_bytes <= SHARED_LIMIT[architecture]
    if case.loop_limits:
        assert PRODUCTS[architecture] in compiled.products
        assert 0 < compiled.loop_instructions <= case.loop_limits[architecture]


def test_the_loop_is_found_in_machine_code():
    lines = [
        ".L_outer:",
        "LDG.E R1",
        ".L_inner:",
        "HGMMA R1",
        "MUFU.EX2 R1",
        "HGMMA R2",
        "@P0 BRA `(.L_inner)",
        "BRA `(.L_outer)",
    ]
    lines += ["EXIT", ".L_wait:", "BRA `(.L_inner)"]
    code = [line if line.startswith(".") else f"        /*{i:04x}*/  {line} ;" for i, line in enumerate(lines)]
    assert loop_instructions("\n".join(code)) == 4
