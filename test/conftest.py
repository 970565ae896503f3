"""Fixtures every test may use."""

import os
from pathlib import Path

import pytest

from csa2.demo_model import ensure_demo_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the real demo model; fetched when it is not in the cache yet."""
    return ensure_demo_model()


@pytest.fixture
def clean_env() -> dict[str, str]:
    """The environment for a child process, without what `make` and this project's options put there."""
    drop = ("MAKE", "MFLAGS", "VENV", "PORT", "HOST", "PYTHON", "ARGS", "CSA2_", "BASH_ENV")
    keep = ("PYTHONPATH",)
    return {name: value for name, value in os.environ.items() if name in keep or not name.startswith(drop)}
