"""Wheel and source distribution hold what is needed, and the papers around them agree."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import csa2

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"csa2": ROOT / "csa2", "sgl_kernels": ROOT / "sgl_kernels", "sglang_csa2": ROOT / "python" / "sglang_csa2"}


def build(source, out, kind):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The source distribution, unpacked, and the wheel built from it."""
    pytest.importorskip("hatchling", reason="hatchling is not here: pip install -e .[dev]")
    work = tmp_path_factory.mktemp("dist")
    with tarfile.open(build(ROOT, work / "sdist", "sdist")) as archive:
        # Python 3.11.2, which Debian 12 has, knows no filters yet; the archive is our own.
        archive.extractall(work / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (work / "unpacked").iterdir()
    return source, build(source, work / "wheel", "wheel")


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == wanted
    assert any(name.endswith(".safetensors") for name in names)
    assert any(name.endswith((".h", ".cpp")) for name in names)


def test_the_wheel_says_what_it_is(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        metadata, entry_points = (
            wheel.read(next(name for name in wheel.namelist() if name.endswith(f".dist-info/{file}"))).decode()
            for file in ("METADATA", "entry_points.txt")
        )
    assert f"\nVersion: {csa2.__version__}\n" in metadata
    assert "\nRequires-Dist: sglang==0.5.23\n" in metadata
    for group in ("console_scripts", "csa2.commands", "sglang.srt.plugins", "sglang.srt.platforms"):
        assert f"[{group}]" in entry_points


def test_the_wheel_works_without_the_checkout(distributions, tmp_path, clean_env):
    with zipfile.ZipFile(distributions[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    code = "import csa2.cli, sgl_kernels.cpu, sys; print(csa2.__file__); sys.exit(csa2.cli.main(['doctor', '--url', 'x']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=clean_env | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.startswith(str(tmp_path / "site")), done.stderr
    assert (done.returncode, done.stderr) == (
        2,
        "csa2 doctor failed: --url 'x' is not an address: write it like http://127.0.0.1:30000\n",
    )


def test_the_source_distribution_can_be_tested_and_read(distributions):
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "requirements.lock", "Makefile", "mkdocs.yml", "test/conftest.py"):
        assert (distributions[0] / name).is_file(), name


def test_the_changelog_begins_with_this_version():
    first = re.search(r"^## \[(.+?)\] - (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first is not None
    assert first[1] == csa2.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d{2}-\d{2}", first[2])


@pytest.mark.parametrize("template", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_templates_ask_for_the_report(template):
    import yaml

    form = yaml.safe_load(template.read_text())
    fields = {part["id"]: part for part in form["body"] if "id" in part}
    assert {"name", "description", "body"} <= set(form)
    assert "csa2 info" in fields["info"]["attributes"]["label"]
    assert fields["info"]["validations"] == {"required": True}


def test_the_dockerfile_copies_what_the_package_needs():
    text = (ROOT / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE))
    sources = {name for line in copied for name in line.split()}
    assert sources == {"pyproject.toml", "requirements.lock", "README.md", "LICENSE", "csa2", "sgl_kernels", "python"}
    assert [name for name in sources if not (ROOT / name).exists()] == []
    assert "not built" in text.lower()
