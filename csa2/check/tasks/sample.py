"""One question with its text, and the longest that fits a number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from csa2.check.errors import CheckError

Count = Callable[[str], int]
"""Tokens of a text."""
Build = Callable[[int], "Sample"]
"""The sample with that many filler items: sentences, lines, words."""


@dataclass(frozen=True)
class Sample:
    """A question about a text.

    Attributes:
        task: its name.
        context: the text.
        question: what is asked, with the break before it.
        answer_prefix: beginning of the answer, which the model goes on from; with the space or break before it.
        answers: strings that the whole answer contains.
        new_tokens: that the model may write.
    """

    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    new_tokens: int

    @property
    def prompt(self) -> str:
        """What the model reads."""
        return self.context + self.question + self.answer_prefix


def longest(build: Build, tokens: int, count: Count) -> Sample:
    """The sample with most filler whose prompt and answer take at most `tokens`.

    Args:
        build: the same but for the amount of filler, whatever that is.

    Raises:
        CheckError: even without filler it does not fit.
    """

    def fits(sample: Sample) -> bool:
        return count(sample.prompt) + sample.new_tokens <= tokens

    best = build(0)
    if not fits(best):
        needed = count(best.prompt) + best.new_tokens
        raise CheckError(
            f"--context {tokens} is too short for the task {best.task!r}, which takes {needed} tokens without any other "
            f"text: give a longer one, or leave the task out of --tasks"
        )
    # A filler item takes a token at least.
    low, high = 0, tokens
    while low < high:
        middle = (low + high + 1) // 2
        sample = build(middle)
        if fits(sample):
            low, best = middle, sample
        else:
            high = middle - 1
    return best


def answer_score(answer: str, wanted: tuple[str, ...]) -> float:
    """Share of the wanted strings that `answer` contains, upper and lower case alike: RULER's measure for all tasks but
    question answering (Hsieh et al. 2024, arXiv 2404.06654)."""
    said = answer.lower()
    return sum(each.lower() in said for each in wanted) / len(wanted)
