"""Lists: one to copy that is told once, and the words that are most common in a long one.

The second is RULER's common words extraction (Hsieh et al. 2024, arXiv 2404.06654) with our own words. The first is not part
of RULER: exact copying over a distance is what merging of tokens costs first.
"""

import random

from csa2.check.tasks.needles import hidden, names
from csa2.check.tasks.sample import Sample
from csa2.check.tasks.words import ADJECTIVES, PLACES, THINGS, TRADES

COPIED = 8
"""Things of a list that is copied."""
TOKENS_A_PAIR = 6
COMMON = 5
"""Words that are asked for."""
COMMON_SHARE = 0.5
"""Of a long list, that common words make up."""
TOKENS_A_WORD = 3


def copy(rng: random.Random, filler: int) -> Sample:
    """What an animal owns, told once in a chronicle: several things with their properties, in order."""
    (key,) = names(rng, 1)
    pairs = zip(rng.sample(ADJECTIVES, COPIED), rng.sample(THINGS, COPIED), strict=True)
    owned = [f"{adjective} {thing}" for adjective, thing in pairs]
    fact = f"The {key} owns {COPIED} things: one {', one '.join(owned)}."
    return Sample(
        task="copy",
        context="Remember who owns what in this chronicle. It will be asked for afterwards.\n\n"
        + hidden([fact], [rng.random()], rng, filler),
        question=f"\n\nQuestion: which {COPIED} things does the {key} own?",
        answer_prefix=f"\nAnswer: The {key} owns {COPIED} things: one",
        answers=tuple(owned),
        new_tokens=COPIED * TOKENS_A_PAIR,
    )


def common_words(rng: random.Random, filler: int) -> Sample:
    """The most common words of a list, in which half of all entries are one of them."""
    pool = rng.sample([*THINGS, *TRADES, *PLACES, *ADJECTIVES], COMMON + len(THINGS))
    common, rare = pool[:COMMON], pool[COMMON:]
    each = 2 + int(filler * COMMON_SHARE / COMMON)
    entries = common * each + [rare[i % len(rare)] for i in range(filler - min(filler, each * COMMON))]
    rng.shuffle(entries)
    listed = " ".join(entries)
    return Sample(
        task="common-words",
        context=f"In this list some words occur again and again. Remember them.\n\n{listed}",
        question=f"\n\nQuestion: which {COMMON} words occur most often in the list?",
        answer_prefix=f"\nAnswer: The {COMMON} words that occur most often are",
        answers=tuple(common),
        new_tokens=2 * COMMON * TOKENS_A_WORD,
    )
