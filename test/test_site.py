"""The documentation site builds strictly, names every page, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="mkdocs-material is not here: pip install -e .[dev]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site):
    built = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")} - {"404"}
    assert built == {page.stem for page in DOCS.glob("*.md")} | {"contributing", "changelog"}


def test_nothing_is_loaded_from_elsewhere(site):
    loads = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]*)"')
    for page in site.rglob("*.html"):
        assert loads.findall(page.read_text()) == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", sheet.read_text()) == [], sheet


@pytest.mark.parametrize("picture", sorted(DOCS.glob("pictures/*.svg")), ids=lambda path: path.stem)
def test_pictures_are_small_and_hold_their_text(picture):
    root = ET.parse(picture).getroot()
    assert picture.stat().st_size < 10_000
    assert len(root.findall(".//{*}text")) > 5
    assert root.get("aria-label")


def test_links_to_documentation_from_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    missing = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if not (ROOT / link).exists()]
    assert missing == []
