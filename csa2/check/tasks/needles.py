"""Needles: a few facts in a long chronicle of unimportant ones, one of which is asked for, or several.

Retrieval in four kinds, after RULER (Hsieh et al. 2024, arXiv 2404.06654): one fact; one of several that differ in their
key; all values of one key; the values of several keys. The text is our own.
"""

import random
from collections.abc import Iterator, Sequence

from csa2.check.tasks.sample import Sample
from csa2.check.tasks.words import ADJECTIVES, ANIMALS, DAYS, DEEDS, PLACES, THINGS, TRADES

DIGITS = 5
"""Of a number that is asked for; models write one or more tokens a digit."""
SEVERAL = 4
"""Facts of the tasks with more than one."""
TOKENS_A_VALUE = 12
"""That an answer may take: the digits, and what stands between numbers."""
MORE_TOKENS = 16


def chronicle(rng: random.Random) -> Iterator[str]:
    """Sentences without end, none of which says a number."""
    while True:
        trade, other = rng.sample(TRADES, 2)
        deed = rng.choice(DEEDS).format(
            thing=rng.choice(THINGS),
            other=other,
            place=rng.choice(PLACES),
            adjective=rng.choice(ADJECTIVES),
            animal=rng.choice(ANIMALS),
        )
        yield f"On {rng.choice(DAYS)} the {trade} {deed}."


def hidden(facts: Sequence[str], depths: Sequence[float], rng: random.Random, sentences: int) -> str:
    """A chronicle of so many sentences with `facts` among them, each at its depth from 0 (first) to 1 (last)."""
    story = chronicle(rng)
    lines = [next(story) for _ in range(sentences)]
    # From the end, so that places before stay what they are.
    for depth, fact in sorted(zip(depths, facts, strict=True), reverse=True):
        lines.insert(round(depth * sentences), fact)
    return " ".join(lines)


def names(rng: random.Random, count: int) -> list[str]:
    """Names such as "amber falcon", no word in two of them."""
    pairs = zip(rng.sample(ADJECTIVES, count), rng.sample(ANIMALS, count), strict=True)
    return [f"{adjective} {animal}" for adjective, animal in pairs]


def numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of `DIGITS` digits."""
    return [str(value) for value in rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), count)]


def needle(rng: random.Random, filler: int) -> Sample:
    """One number, asked for by its name."""
    return _one_of("needle", rng, filler, 1)


def multi_key(rng: random.Random, filler: int) -> Sample:
    """One of several numbers, asked for by its name."""
    return _one_of("multi-key", rng, filler, SEVERAL)


def multi_value(rng: random.Random, filler: int) -> Sample:
    """All numbers of one name."""
    (key,), values = names(rng, 1), numbers(rng, SEVERAL)
    facts = [_fact(key, value) for value in values]
    return Sample(
        task="multi-value",
        context=_text(facts, rng, filler),
        question=f"\n\nQuestion: which {SEVERAL} gate codes does the {key} have?",
        answer_prefix=f"\nAnswer: The {SEVERAL} gate codes of the {key} are",
        answers=tuple(values),
        new_tokens=MORE_TOKENS + SEVERAL * TOKENS_A_VALUE,
    )


def multi_query(rng: random.Random, filler: int) -> Sample:
    """The numbers of several names, in one answer."""
    keys, values = names(rng, SEVERAL), numbers(rng, SEVERAL)
    facts = [_fact(key, value) for key, value in zip(keys, values, strict=True)]
    listed = "the " + ", the ".join(keys[:-1]) + f" and the {keys[-1]}"
    return Sample(
        task="multi-query",
        context=_text(facts, rng, filler),
        question=f"\n\nQuestion: which gate codes do {listed} have?",
        answer_prefix=f"\nAnswer: The gate code of the {keys[0]} is",
        answers=tuple(values),
        # Names are repeated between the numbers.
        new_tokens=MORE_TOKENS + 2 * SEVERAL * TOKENS_A_VALUE,
    )


def _one_of(task: str, rng: random.Random, filler: int, count: int) -> Sample:
    keys, values = names(rng, count), numbers(rng, count)
    asked = rng.randrange(count)
    facts = [_fact(key, value) for key, value in zip(keys, values, strict=True)]
    return Sample(
        task=task,
        context=_text(facts, rng, filler),
        question=f"\n\nQuestion: which gate code does the {keys[asked]} have?",
        answer_prefix=f"\nAnswer: The gate code of the {keys[asked]} is",
        answers=(values[asked],),
        new_tokens=MORE_TOKENS,
    )


def _text(facts: Sequence[str], rng: random.Random, filler: int) -> str:
    depths = [rng.random() for _ in facts]
    start = "Remember the gate codes in this chronicle. They will be asked for afterwards.\n\n"
    return start + hidden(facts, depths, rng, filler)


def _fact(key: str, value: str) -> str:
    return f"The gate code of the {key} is {value}."
