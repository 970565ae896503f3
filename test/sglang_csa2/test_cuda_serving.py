"""A real scheduler over the Triton kernels, in the interpreter: as over the reference, wherever the cache lies."""

from collections.abc import Iterator

import pytest
from scheduler_runs import PAGE, Ask, Result, SchedulerForks, words

pytestmark = pytest.mark.e2e

SHARED = words(0, 2 * PAGE)
ASKS = (
    Ask("a", (*SHARED, *words(1, 20)), 3),
    Ask("b", words(2, 3 * PAGE + 10), 3),
    Ask("hit", (*SHARED, *words(3, 10)), 3, after=("a", 3)),
    Ask("gone", words(4, PAGE), 9, after=("b", 2), abort_after=1),
)
SMALL = {"csa2_hot_tokens": 32, "csa2_warm_tokens": 32, "csa2_ratio": "8", "disable_overlap_schedule": True}
ARENA_PAGES = 9
"""Too few for all that the requests write: pages are demoted."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerForks]:
    schedulers = SchedulerForks(tmp_path_factory.mktemp("schedulers"), interpret=True)
    yield schedulers
    schedulers.close()


@pytest.fixture(scope="module")
def by_the_reference(forks: SchedulerForks) -> Result:
    return forks.run(ASKS, ARENA_PAGES, attention=4.0, csa2_impl="reference", **SMALL)


@pytest.mark.parametrize("how", ["on_device", "captured"])
def test_kernels_serve_what_the_reference_serves(forks: SchedulerForks, by_the_reference: Result, how: str) -> None:
    """Prefix hits, chunks, an abort and demoted pages. On the device a tensor that meets one of the host ends the run;
    captured, decode steps replay what was recorded before any page was written, in a batch that is padded."""
    found = forks.run(
        ASKS, ARENA_PAGES, attention=4.0, csa2_impl="cuda", on_device=how == "on_device", captured=how == "captured", **SMALL
    )
    assert (found.replays > 0) == (how == "captured")
    assert found.stuck == []
    assert found.answers == by_the_reference.answers
    assert found.endings["hit"].cached_tokens == 2 * PAGE
    assert found.endings["gone"].kind == "abort"
    assert found.stats["pages"]["csa2-8x"] > 0
    assert found.stats["pages"] == by_the_reference.stats["pages"]
    assert found.checked > 0
