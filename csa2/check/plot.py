"""The picture of a check: divergence by position, and error by layer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from csa2.check.metrics import BLOCK_TOKENS
from csa2.check.results import FormatResult

LEAST_NATS = 1e-6
"""Drawn for less: rounding, on an axis of orders of magnitude."""


def draw(path: Path, rows: Sequence[FormatResult], layers: Mapping[str, Sequence[float]], context: int) -> None:
    """Write the picture to `path`; its suffix decides the kind.

    Args:
        layers: relative error of the attention output per layer, by format; may be empty.
        context: tokens before the first scored one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_position, by_layer = figure.subplots(1, 2)
    colours = {row.name: f"C{i}" for i, row in enumerate(rows)}
    style: dict[str, Any] = {"marker": "o", "markersize": 3}
    for row in rows:
        positions = [context + BLOCK_TOKENS * (i + 0.5) for i in range(len(row.kl_nats_by_position))]
        values = [max(LEAST_NATS, value) for value in row.kl_nats_by_position]
        by_position.plot(positions, values, label=row.name, color=colours[row.name], **style)
    by_position.set(xlabel="position (tokens)", ylabel="KL (nats)", title="Divergence by position", yscale="log")
    for name, errors in layers.items():
        by_layer.plot(range(len(errors)), errors, color=colours[name], **style)
    by_layer.set(xlabel="layer", ylabel="relative error", title="Attention output by layer, exact inputs")
    if layers:
        by_layer.set_yscale("log")
    else:
        by_layer.text(0.5, 0.5, "not measured", ha="center", transform=by_layer.transAxes)
    figure.legend(loc="outside lower center", ncols=len(rows))
    figure.savefig(path, dpi=120)
