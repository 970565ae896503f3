"""Every Triton kernel compiled ahead of time for every architecture, and what came out."""

import pytest

from sgl_kernels.triton.gate import ARCHITECTURES, PRODUCTS, REGISTER_LIMIT, SHARED_LIMIT, compile_case, main_loop
from sgl_kernels.triton.gate_cases import CASES, Case
from sgl_kernels.triton.merge import merge_partials


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing comes from an earlier run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


BETWEEN = (
    "decode k8v4", "decode csa2-4x", "decode int4", "extend csa2-2x", "seal keys fp4", "seal keys identity basis",
    "seal values fp4", "open keys fp4", "open keys identity basis", "open values fp4", "open plain",
)  # fmt: skip
"""What lies between others is compiled for one architecture here; `python -m sgl_kernels.triton.gate` compiles all."""
COMPILED = [(case, a) for case in CASES for a in ARCHITECTURES if a == 90 or case.name not in BETWEEN]


@pytest.mark.parametrize(("case", "architecture"), COMPILED, ids=lambda x: getattr(x, "name", x))
def test_what_is_compiled_fits(case: Case, architecture: int):
    compiled = compile_case(case, architecture)
    assert compiled.registers <= (case.registers if architecture >= 90 else REGISTER_LIMIT)
    assert compiled.stack_bytes <= case.stack_bytes, "registers are spilled"
    assert compiled.loop_spills <= case.loop_spills
    assert compiled.shared_bytes <= SHARED_LIMIT[architecture]
    if case.loop_limits:
        assert PRODUCTS[architecture] in compiled.products
        assert 0 < compiled.loop_instructions <= case.loop_limits[architecture]


def test_the_merge_is_not_compiled_anew_for_another_batch():
    """Triton compiles for each of "is 1", "is a multiple of 16" and the rest, of every argument that it may look at."""
    kept = {parameter.name for parameter in merge_partials.params if parameter.do_not_specialize}
    assert kept == {"num_blocks", "splits", "num_tokens"}


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
    assert main_loop("\n".join(code)) == ["HGMMA", "MUFU.EX2", "HGMMA", "BRA"]
