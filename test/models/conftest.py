"""The process that forks schedulers, shared by the tests of this folder."""

from collections.abc import Iterator

import pytest
from forked_schedulers import SchedulerForks


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerForks]:
    """Takes jobs until the tests end."""
    schedulers = SchedulerForks(tmp_path_factory.mktemp("schedulers"))
    yield schedulers
    schedulers.close()
