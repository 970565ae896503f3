"""The layers of the project: operators know nothing of the cache, the cache knows nothing of SGLang."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "sgl_kernels": {"csa2", "sglang_csa2", "sglang"},
    "csa2": {"sglang_csa2", "sglang"},
}
BARE_PLATFORM = "python/sglang_csa2/platform.py"
"""Runs while SGLang is half imported, so it must not import it."""


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            yield node.lineno, (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_only_layers_below(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imported_packages(path)
        if name in FORBIDDEN[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_platform_entry_point_does_not_import_sglang():
    assert not [name for _, name in imported_packages(ROOT / BARE_PLATFORM) if name in ("sglang", "sglang_csa2")]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sgl_kernels", ("sglang", "sglang_csa2", "csa2")),
        ("csa2", ("sglang", "sglang_csa2")),
        ("csa2.store", ("sglang", "sglang_csa2")),
        ("sglang_csa2.platform", ("sglang",)),
        ("sglang_csa2.plugin", ("sglang",)),
    ],
)
def test_fresh_import_loads_no_higher_layer(module, absent):
    code = f"import sys, {module}; print(sorted({{name.split('.')[0] for name in sys.modules}} & {set(absent)!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"
