"""The tasks by name, and all samples of a run."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from csa2.check.errors import CheckError
from csa2.check.prompts import STEP_TOKENS
from csa2.check.tasks import lists, needles, tracing
from csa2.check.tasks.sample import Count, Sample, longest

TASKS: dict[str, Callable[[random.Random, int], Sample]] = {
    "needle": needles.needle,
    "multi-key": needles.multi_key,
    "multi-value": needles.multi_value,
    "multi-query": needles.multi_query,
    "variables": tracing.variables,
    "copy": lists.copy,
    "common-words": lists.common_words,
}
GROUPS = {"multi-needle": ("multi-key", "multi-value", "multi-query"), "all": tuple(TASKS)}
"""Names for several tasks."""
SAMPLES = 20


@dataclass(frozen=True)
class TaskPlan:
    """What is asked.

    Attributes:
        tasks: names.
        contexts: tokens of prompt and answer together, one row of samples each.
        samples: of each task and context.
        seed: decides all of them.
    """

    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    samples: int = SAMPLES
    seed: int = 0

    def validate(self) -> None:
        """Raises CheckError: names the option, the value and what is allowed."""
        for context in self.contexts:
            if context < 2 * STEP_TOKENS:
                raise CheckError(f"--context {context} leaves nothing to compress: give {2 * STEP_TOKENS} tokens or more")
        if self.samples < 1:
            raise CheckError(f"--samples {self.samples} asks nothing: give a number from 1")


def parse_tasks(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list, groups replaced by their tasks, each once and in order.

    Raises:
        CheckError: one of them does not exist, or there is none.
    """
    given = [name.strip() for name in text.split(",") if name.strip()]
    choices = f"choose from {', '.join([*TASKS, *GROUPS])}"
    if not given:
        raise CheckError(f"--tasks {text!r} names no task: {choices}")
    for name in given:
        if name not in TASKS and name not in GROUPS:
            raise CheckError(f"--tasks {name!r} is unknown: {choices}")
    return tuple(dict.fromkeys(task for name in given for task in GROUPS.get(name, (name,))))


def make_samples(plan: TaskPlan, context: int, count: Count) -> list[Sample]:
    """All samples of one context, task by task; the same for the same seed and tokenizer.

    Raises:
        CheckError: a task does not fit.
    """
    found = []
    for task in plan.tasks:
        for number in range(plan.samples):
            key = f"{plan.seed}/{task}/{context}/{number}"

            def build(filler: int, task: str = task, key: str = key) -> Sample:
                return TASKS[task](random.Random(key), filler)  # noqa: S311 - texts, no secrets

            found.append(longest(build, context, count))
    return found
