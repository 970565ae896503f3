"""Table and plots of `load.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def markdown(rows: Rows, losses: Mapping[str, float]) -> str:
    """A Markdown table with a row for each run; losses of perplexity by round, where known."""
    head = "| Round | Requests | At once | tokens/s | TTFT p50, p99 | TPOT p50, p99 | Found | Cache | Perplexity |"
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    for row in rows:
        ttft, tpot = (f"{row[name]['median']:.0f}, {row[name]['p99']:.0f} ms" for name in ("ttft_ms", "tpot_ms"))
        used = "" if row["used_bytes"] is None else f"{row['used_bytes'] / 1e6:.0f} MB"
        loss = f"{100 * losses[row['round']]:+.2f} %" if row["round"] in losses else ""
        cells = (row["round"], row["class"], row["concurrency"], f"{row['output_tok_s']:.1f}", ttft, tpot)
        lines.append("| " + " | ".join(map(str, (*cells, f"{row['hit_rate']:.0%}", used, loss))) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Rows, losses: Mapping[str, float], folder: Path) -> None:
    """Write `throughput.png`, `ttft.png` and `arena.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"throughput": _throughput, "ttft": _ttft, "arena": _arena}
    for name, draw in drawings.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        draw(axes, rows, losses)
        figure.savefig(folder / f"{name}.png", dpi=120)
        pyplot.close(figure)


def _throughput(axes: Any, rows: Rows, losses: Mapping[str, float]) -> None:
    """Memory against throughput; the size of a point is the loss."""
    for row in rows:
        if row["used_bytes"] is None:
            continue
        size = 30 + 4000 * max(0.0, losses.get(row["round"], 0.0))
        axes.scatter(
            row["used_bytes"] / 1e6, row["output_tok_s"], s=size, label=row["round"], color=_color(rows, row["round"])
        )
    axes.set(xlabel="most bytes of the cache in use (MB)", ylabel="output tokens/s", title="Memory, throughput, loss (size)")
    _legend(axes)


def _ttft(axes: Any, rows: Rows, losses: Mapping[str, float]) -> None:
    """Time to the first token by concurrency, mean over the classes."""
    for name in _rounds(rows):
        points: dict[int, list[float]] = {}
        for row in rows:
            if row["round"] == name:
                points.setdefault(row["concurrency"], []).append(row["ttft_ms"]["median"] / 1000)
        concurrency = sorted(points)
        seconds = [sum(points[n]) / len(points[n]) for n in concurrency]
        axes.plot(concurrency, seconds, marker="o", label=name, color=_color(rows, name))
    axes.set(xlabel="requests at once", ylabel="time to the first token (s), median", yscale="log")
    _legend(axes)


def _arena(axes: Any, rows: Rows, losses: Mapping[str, float]) -> None:
    """Bytes in use over time, the runs of a round one after another."""
    for name in _rounds(rows):
        offset, times, used = 0.0, [], []
        for row in rows:
            if row["round"] == name and row["arena"]:
                times += [offset + second for second, _ in row["arena"]]
                used += [value / 1e6 for _, value in row["arena"]]
                offset = times[-1]
        if times:
            axes.plot(times, used, label=name, color=_color(rows, name))
    axes.set(xlabel="seconds", ylabel="cache in use (MB)")
    _legend(axes)


def _rounds(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["round"] for row in rows))


def _color(rows: Rows, name: str) -> str:
    return f"C{_rounds(rows).index(name)}"


def _legend(axes: Any) -> None:
    """Each label once."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(*zip(*{label: (handle, label) for handle, label in zip(handles, labels, strict=True)}.values(), strict=True))
