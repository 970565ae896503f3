"""The report of a check as text: table, advice, disagreements. The JSON is the record itself."""

from collections.abc import Mapping, Sequence

from csa2.check.disagreements import Disagreement
from csa2.check.formats import CALIBRATED
from csa2.check.results import FormatResult

_COLUMNS = ("format", "bytes", "in all", "ppl %", "+- SE", "KL nats", "top-1 %", "copy %", "of full")


def render_table(rows: Sequence[FormatResult]) -> str:
    """One line a format. `bytes`: of a page against bf16; `in all`: of the whole context with its windows."""
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    full = rows[0].copy_recall_full_pct
    notes = [f"SE: over {rows[0].ppl_se_blocks}. KL: lower bound, from the most likely tokens."]
    if full is not None:
        notes.append(f"copy: recall of repeated passages; the full cache recalls {full:.1f} %, which 'of full' sets to 100.")
    return "\n".join([*lines, *notes])


def _cells(row: FormatResult) -> tuple[str, ...]:
    error, recall, share = row.ppl_se_pct, row.copy_recall_pct, row.copy_recall_of_full_pct
    return (
        row.name,
        f"{row.bytes_fraction_compressed:.4f}",
        f"{row.bytes_fraction_total:.3f}",
        f"{row.ppl_increase_pct:+.2f}",
        "-" if error is None else f"{error:.2f}",
        f"{row.kl_nats:.5f}",
        f"{row.top1_agreement_pct:.2f}",
        "-" if recall is None else f"{recall:.1f}",
        "-" if share is None else f"{share:.1f}",
    )


def render_disagreements(found: Mapping[str, Sequence[Disagreement]]) -> str:
    """The first disagreements of each format, two lines each."""
    lines = []
    for name, rows in found.items():
        lines.append(f"{name}: first disagreements" if rows else f"{name}: no disagreement")
        for row in rows:
            full, packed = row.full, row.packed
            lines.append(
                f"  {row.document}:{row.position}  full {full.token!r} ({full.probability:.3f})  compressed "
                f"{packed.token!r} ({packed.probability:.3f})  true {row.true_token!r}  margin {row.margin_nats:.3f} nats"
            )
            lines.append(f"    after {row.context!r}")
    return "\n".join(lines)


def render_advice(rows: Sequence[FormatResult], failed: FormatResult, minimum_pct: float) -> str:
    """What to look at, in this order, when `failed` agrees less than `minimum_pct`."""
    calibrated = failed.format in CALIBRATED
    better = [row for row in rows if row.top1_agreement_pct >= minimum_pct]
    next_best = min(better, key=lambda row: row.bytes_fraction_compressed, default=None)
    half = (len(failed.loss_nats_by_position) + 1) // 2
    early, late = _mean(failed.kl_nats_by_position[:half]), _mean(failed.kl_nats_by_position[half:])
    steps = (
        "calibration data: calibrate on text like the text you serve, none of it among the documents measured here"
        if calibrated
        else f"calibration data: {failed.name} uses none",
        f"ratio: {next_best.name} reaches the agreement asked for, at {next_best.bytes_fraction_compressed:.3f} of bf16"
        if next_best
        else "ratio: no format measured here reaches it; measure one with more bytes (k8v4, fp8)",
        f"position handling: the divergence is {early:.4f} nats in the first half of the scored tokens and {late:.4f} in "
        f"the second; raise --csa2-hot-tokens or --csa2-warm-tokens, and if it grows with position look at the rotary "
        f"settings of the model",
        "scorer weights: train the scorer again if loss sits in few layers (see the picture)"
        if calibrated
        else f"scorer weights: {failed.name} merges no tokens and uses none",
    )
    head = f"{failed.name}: agreement {failed.top1_agreement_pct:.2f} % is under {minimum_pct:g} %. Look, in this order, at"
    return "\n".join([head, *(f"  {i}. {step}" for i, step in enumerate(steps, 1))])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
