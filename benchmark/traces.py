"""Token traces for `eviction.py`: requests in their order. Tokens are random; what repeats is by design."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY = 49_000
"""Below that of the demo model, which `trace_latency.py` serves."""


@dataclass(frozen=True)
class Request:
    """A prompt, and the tokens that the model will answer with."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def multi_turn(seed: int, users: int = 20, turns: int = 8) -> Iterator[Request]:
    """Conversations of users who come back in any order; each prompt is the whole conversation so far.

    A system prompt of 256 tokens, messages of 60 to 300, answers of 100 to 400: some 3000 tokens after 8 turns.
    """
    chance = random.Random(seed)
    system = _text(chance, 256)
    talks = [system] * users
    order = [user for user in range(users) for _ in range(turns)]
    chance.shuffle(order)
    for user in order:
        prompt = talks[user] + _text(chance, chance.randint(60, 300))
        answer = _text(chance, chance.randint(100, 400))
        talks[user] = prompt + answer
        yield Request(prompt, answer)


def shared_prefix(seed: int, prefixes: int = 8, prefix_tokens: int = 1024, questions: int = 64) -> Iterator[Request]:
    """Questions of 128 tokens behind one of a few long prefixes, answers of 64: as SGLang's generated-shared-prefix."""
    chance = random.Random(seed)
    texts = [_text(chance, prefix_tokens) for _ in range(prefixes)]
    asked = [text for text in texts for _ in range(questions // prefixes)]
    chance.shuffle(asked)
    for text in asked:
        yield Request(text + _text(chance, 128), _text(chance, 64))


def agents(seed: int, steps: int = 320) -> Iterator[Request]:
    """A mixed load.

    Agents that grow a history of tool calls behind one of three tool descriptions, questions to 24 documents of which few
    are popular, and one request in six that nobody will repeat.
    """
    chance = random.Random(seed)
    tools = [_text(chance, 900) for _ in range(3)]
    documents = [_text(chance, chance.randint(600, 1800)) for _ in range(24)]
    popularity = [1 / (rank + 1) for rank in range(24)]
    histories: list[tuple[int, ...]] = []
    for _ in range(steps):
        kind = chance.random()
        if kind < 1 / 6:
            yield Request(_text(chance, chance.randint(500, 3000)), _text(chance, 64))
        elif kind < 1 / 2:
            document = chance.choices(documents, popularity)[0]
            yield Request(document + _text(chance, chance.randint(20, 80)), _text(chance, 128))
        else:
            if len(histories) < 6 or chance.random() < 0.12:
                histories = [*histories[-7:], chance.choice(tools) + _text(chance, 100)]
            # The newest agents are the busiest; those older than eight are done.
            agent = -1 - min(int(chance.expovariate(0.5)), len(histories) - 1)
            call = _text(chance, chance.randint(40, 120))
            yield Request(histories[agent], call)
            histories[agent] = histories[agent] + call + _text(chance, chance.randint(50, 400))


TRACES = {"multi-turn": multi_turn, "agents": agents, "shared prefix": shared_prefix}


def _text(chance: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(chance.randrange(VOCABULARY) for _ in range(tokens))
