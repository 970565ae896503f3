"""Flags that `csa2 doctor` and the troubleshooting page name exist: in SGLang, of ours, or of `csa2` commands."""

import re
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

ROOT = Path(__file__).parents[2]
PLACES = (ROOT / "docs" / "troubleshooting.md", *sorted((ROOT / "csa2" / "doctor").glob("*_rules.py")))
OWN = "".join(
    (ROOT / name).read_text()
    for name in ("docs/options.md", "csa2/cli.py", "python/sglang_csa2/check.py", "benchmark/mixed_load.py")
)


@pytest.mark.parametrize("place", PLACES, ids=lambda path: path.stem)
def test_flags_exist(place: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", place.read_text()))
    upstream = {"--" + field.replace("_", "-") for field in ServerArgs.__struct_fields__}
    assert named
    assert [flag for flag in sorted(named - upstream) if f"`{flag}`" not in OWN and f'"{flag}"' not in OWN] == []
