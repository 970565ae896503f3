"""Every measurement in the documentation has a recipe, and recipes are sound."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "benchmark" / "recipes").glob("*.sh"))
PAGES = ("docs/performance.md", "docs/troubleshooting.md")


def flat(text: str) -> str:
    """Lines that go on are joined; spaces are one."""
    return re.sub(r"[ \t]+", " ", text.replace("\\\n", " "))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_table_is_in_a_recipe(page: str) -> None:
    recipes = "\n".join(flat(path.read_text()) for path in RECIPES)
    commands = re.findall(
        r"^ (?:OMP_NUM_THREADS=1 )?((?:taskset -c 1 )?python benchmark/.*)$", flat((ROOT / page).read_text()), re.M
    )
    assert commands
    missing = [command for command in commands if command.strip() not in recipes]
    assert missing == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_sound_and_runs_what_is_there(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for script in re.findall(r"python (\S+\.py)", path.read_text()):
        assert (ROOT / script).is_file(), script


def test_pages_name_recipes_that_are_there() -> None:
    named = set(
        re.findall(
            r"benchmark/recipes/(\w+)\.sh", "".join(p.read_text() for p in (*ROOT.glob("docs/*.md"), ROOT / "README.md"))
        )
    )
    assert named <= {path.stem for path in RECIPES}
