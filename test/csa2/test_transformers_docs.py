"""The program in docs/transformers.md runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.e2e
@pytest.mark.usefixtures("demo_model")
def test_the_program_of_the_documentation(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Paris.*\{'bf16': \d+, .*'csa2-4x': \d+\} [2-9]\.\d+", ended.stdout, flags=re.DOTALL), ended.stdout
