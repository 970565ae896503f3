"""What engines answered, and the figures: one row a format, task and context."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from csa2 import __version__
from csa2.check.formats import row_name, split_name
from csa2.check.tasks.sample import Sample, answer_score
from csa2.check.tasks.suite import TaskPlan

FULL = "full"
"""Name of the rows of the uncompressed cache."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One sample, answered."""

    task: str
    context: int
    """Tokens that prompt and answer may take together."""
    question: str
    answer_prefix: str
    wanted: tuple[str, ...]
    new_tokens: int
    """That the engine might write."""
    said: str
    score: float
    """Share of `wanted` in `said`, from 0 to 1."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Per cent are of 100."""

    format: str
    variant: str
    task: str
    context: int
    samples: int
    score_pct: float
    score_se_pct: float | None
    """Standard error over the samples; None of a single one."""
    full_score_pct: float
    change_pct: float
    """`score_pct` less `full_score_pct`."""
    change_se_pct: float | None
    """Of the difference sample by sample, which varies less than either side."""
    same_answer_pct: float
    """Samples that got the same answer, letter by letter, as with the full cache."""

    @property
    def name(self) -> str:
        """Format and variant."""
        return self.format if self.format == FULL else row_name(self.format, self.variant)


class TaskRecord(msgspec.Struct, kw_only=True):
    """The JSON of a check by tasks."""

    version: str
    model: str
    dtype: str
    plan: TaskPlan
    environment: dict[str, Any]
    bytes_fraction_total: dict[str, dict[str, float]] = {}
    """Bytes of all pages of a sample over bf16, mean, by row and context."""
    results: list[TaskResult] = []
    answers: dict[str, list[Answer]] = {}
    """By name of the row."""
    engines: dict[str, dict[str, Any]] = {}
    """Server arguments, by name of the row."""

    def add(self, name: str, answers: Sequence[Answer], fractions: dict[int, float]) -> list[TaskResult]:
        """Keep what the row called `name` answered; the full cache's must come first.

        Args:
            fractions: bytes over bf16, by context.
        """
        self.answers[name] = list(answers)
        self.bytes_fraction_total[name] = {str(context): value for context, value in fractions.items()}
        rows = [
            _row(name, task, context, self._of(name, task, context), self._of(FULL, task, context))
            for context in self.plan.contexts
            for task in self.plan.tasks
        ]
        self.results += rows
        return rows

    def rows_of(self, name: str, context: int) -> list[TaskResult]:
        """Results of one row name and context, in the order of the tasks."""
        return [row for row in self.results if row.name == name and row.context == context]

    def _of(self, name: str, task: str, context: int) -> list[Answer]:
        return [each for each in self.answers[name] if (each.task, each.context) == (task, context)]


def start_record(plan: TaskPlan, model: str, dtype: str) -> TaskRecord:
    """A record of this machine and installation without results."""
    from csa2.info import machine, versions

    environment = {"versions": versions(), "machine": machine()}
    return TaskRecord(version=__version__, model=model, dtype=dtype, plan=plan, environment=environment)


def write_json(record: TaskRecord, path: Path | None) -> None:
    """Write the record to `path`, if there is one."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def answered(sample: Sample, context: int, said: str) -> Answer:
    """`sample` with what an engine said, scored."""
    return Answer(
        task=sample.task,
        context=context,
        question=sample.question,
        answer_prefix=sample.answer_prefix,
        wanted=sample.answers,
        new_tokens=sample.new_tokens,
        said=said,
        score=answer_score(said, sample.answers),
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and its standard error when the values are independent; None of a single one."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _row(name: str, task: str, context: int, answers: Sequence[Answer], full: Sequence[Answer]) -> TaskResult:
    page_format, variant = split_name(name)
    pairs = list(zip(answers, full, strict=True))
    score, error = mean_and_error([100 * each.score for each in answers])
    change, change_error = mean_and_error([100 * (each.score - other.score) for each, other in pairs])
    return TaskResult(
        format=page_format,
        variant=variant,
        task=task,
        context=context,
        samples=len(pairs),
        score_pct=score,
        score_se_pct=error,
        full_score_pct=score - change,
        change_pct=change,
        change_se_pct=change_error,
        same_answer_pct=100 * sum(each.said == other.said for each, other in pairs) / len(pairs),
    )
