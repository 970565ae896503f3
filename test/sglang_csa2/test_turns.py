"""Conversations in a real scheduler: what each turn finds in the cache, against SGLang's own cache and under pressure."""

from collections.abc import Iterator

import pytest
from scheduler_runs import PAGE, Ask, Result, SchedulerForks, words

pytestmark = pytest.mark.e2e

TURNS = 20
ANSWER = 10
"""Tokens of each answer."""
CROWD = 1000
"""Tokens of each request in between."""
QUESTIONS = tuple(31 + 13 * i % 61 for i in range(TURNS))
"""Tokens of each question: pages end at many places in them."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerForks]:
    schedulers = SchedulerForks(tmp_path_factory.mktemp("schedulers"))
    yield schedulers
    schedulers.close()


def conversation(name: str, seed: int) -> list[Ask]:
    """Turns that each continue the one before."""
    rids = [f"{name}{i}" for i in range(TURNS)]
    return [
        Ask(rid, words(seed + i, tokens), ANSWER, continues=rids[i - 1] if i else None)
        for i, (rid, tokens) in enumerate(zip(rids, QUESTIONS, strict=True))
    ]


def cached(result: Result, name: str) -> list[int]:
    assert result.stuck == []
    assert {ending.kind for ending in result.endings.values()} == {"length"}
    return [result.endings[f"{name}{i}"].cached_tokens for i in range(TURNS)]


def whole_pages() -> list[int]:
    """What each turn can find at most: whole pages of what was said and answered before, where the last token of an answer
    is never written."""
    found, said = [0], 0
    for tokens in QUESTIONS[:-1]:
        said += tokens + ANSWER
        found.append((said - 1) // PAGE * PAGE)
    return found


def test_turns_recompute_the_last_partial_page_and_nothing_else_as_in_sglang(forks: SchedulerForks) -> None:
    asks = conversation("turn", 0)
    ours, stock = (forks.run(asks, 64, stock=stock) for stock in (False, True))
    assert cached(ours, "turn") == cached(stock, "turn") == whole_pages()


def test_a_conversation_keeps_its_hits_under_pressure(forks: SchedulerForks) -> None:
    """Between two turns others ask for more than the arena holds. SGLang's own cache of the same bytes forgets; ours does
    not, and what it reports is what the responses say."""
    asks = []
    for i, turn in enumerate(conversation("turn", 0)):
        crowd = [Ask(f"crowd{i}.{j}", words(1000 + 10 * i + j, CROWD), 8) for j in range(2)]
        asks += [*crowd, turn]
    options = {"context_length": 2048}
    ours, stock = (forks.run(asks, 32, in_flight=2, stock=stock, **options) for stock in (False, True))
    assert cached(ours, "turn") == whole_pages()
    assert sum(cached(stock, "turn")) < sum(whole_pages()) / 2
    stats, endings = ours.stats, ours.endings.values()
    assert stats["evicted_tokens_total"] > 0
    assert stats["turns_total"] == len(asks)
    assert stats["prefix_hit_tokens_total"] == sum(ending.cached_tokens for ending in endings) == sum(whole_pages())
    prompts = sum(2 * CROWD + tokens for tokens in QUESTIONS) + sum(
        (TURNS - 1 - i) * (t + ANSWER) for i, t in enumerate(QUESTIONS)
    )
    assert stats["prompt_tokens_total"] == prompts
    by_format = stats["prefix_hit_tokens_by_format"]
    assert sum(by_format.values()) == stats["prefix_hit_tokens_total"]
    assert sum(tokens for name, tokens in by_format.items() if name != "bf16") > 0
