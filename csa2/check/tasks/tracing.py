"""Variable tracking: which names hold a value, when most got it from each other.

After RULER (Hsieh et al. 2024, arXiv 2404.06654), with our own text. As there, an example that is solved comes first.
"""

import random
from itertools import pairwise

from csa2.check.tasks.needles import hidden, numbers
from csa2.check.tasks.sample import Sample

NAMES = 5
"""That hold the value: one gets it as a number, each of the others from the one before."""
LETTERS = 5
CONSONANTS, VOWELS = "BDFGKLMNPRSTVZ", "AEIOU"
TOKENS_A_NAME = 6
MORE_TOKENS = 10
QUESTION = "Question: which variables hold the value {value}? Name all {count}."
ANSWER = "Answer: The {count} variables that hold the value {value} are"


def variables(rng: random.Random, filler: int) -> Sample:
    """All variables of a chain of assignments that is spread over the text."""
    first, second = numbers(rng, 2)
    known, asked = _chain_names(rng, 2 * NAMES)
    example = " ".join(_chain(known, first))
    depths = sorted(rng.random() for _ in range(NAMES))
    text = hidden(_chain(asked, second), depths, rng, filler)
    solved = f"{example}\n{QUESTION.format(value=first, count=NAMES)}\n{ANSWER.format(value=first, count=NAMES)}"
    return Sample(
        task="variables",
        context=f"Here is an example.\n\n{solved} {', '.join(known)}.\n\nHere is another text.\n\n{text}",
        question=f"\n{QUESTION.format(value=second, count=NAMES)}",
        answer_prefix=f"\n{ANSWER.format(value=second, count=NAMES)}",
        answers=tuple(asked),
        new_tokens=MORE_TOKENS + NAMES * TOKENS_A_NAME,
    )


def _chain_names(rng: random.Random, count: int) -> tuple[list[str], list[str]]:
    """Two lists of names that can be spoken; all differ."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(VOWELS if i % 2 else CONSONANTS) for i in range(LETTERS))] = None
    every = list(found)
    return every[: count // 2], every[count // 2 :]


def _chain(holders: list[str], value: str) -> list[str]:
    links = [f"VAR {holders[0]} = {value}."]
    return links + [f"VAR {new} = VAR {old}." for old, new in pairwise(holders)]
