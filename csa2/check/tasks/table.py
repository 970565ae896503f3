"""The results of tasks as text: one table a context, one line a format."""

from collections.abc import Sequence

from csa2.check.tasks.outcome import FULL, TaskRecord, mean_and_error


def render_tables(record: TaskRecord) -> str:
    """Scores in per cent. `in all`: bytes of all pages of a sample against bf16. `change`: mean difference to the full
    cache over all samples, with its standard error. `same`: answers that are the full cache's letter by letter."""
    parts = [_table(record, context) for context in record.plan.contexts]
    note = (
        f"Scores: share of the wanted strings in the answers, {record.plan.samples} samples a task. change: to the full "
        f"cache, sample by sample, +- standard error. same: answers that are the same, letter by letter."
    )
    return "\n\n".join([*parts, note])


def _table(record: TaskRecord, context: int) -> str:
    head = ("format", "in all", *record.plan.tasks, "mean", "change", "same")
    cells = [head, *(_cells(record, name, context) for name in record.answers)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([f"{context} tokens", *lines])


def _cells(record: TaskRecord, name: str, context: int) -> tuple[str, ...]:
    rows = record.rows_of(name, context)
    scores = [row.score_pct for row in rows]
    same = sum(row.same_answer_pct for row in rows) / len(rows)
    change, error = mean_and_error(_changes(record, name, context))
    compared = name != FULL
    return (
        name,
        f"{record.bytes_fraction_total[name][str(context)]:.3f}",
        *(f"{score:.1f}" for score in scores),
        f"{sum(scores) / len(scores):.1f}",
        "" if not compared else f"{change:+.1f}" + ("" if error is None else f" +- {error:.1f}"),
        f"{same:.0f}" if compared else "",
    )


def _changes(record: TaskRecord, name: str, context: int) -> Sequence[float]:
    pairs = zip(record.answers[name], record.answers[FULL], strict=True)
    return [100 * (each.score - full.score) for each, full in pairs if each.context == context]
