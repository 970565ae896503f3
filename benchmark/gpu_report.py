"""What benchmark/gpu_check.py found: lines as they come, a JSON file after every step, and a short table at the end."""

import json
from pathlib import Path
from typing import Any

from gpu_points import Point
from gpu_timing import Machine, Timing

TARGETS = {"fp8": 1.6, "fp4": 2.2, "csa2-2x": 2.8, "csa2-4x": 5.0}
"""Times the speed of FlashInfer over bf16 pages, at the first point."""
BASELINES = ("flashinfer bf16", "sdpa bf16")
"""What others are compared with: the first one that is there."""
COLUMNS = ("kind", "shape", "context", "batch", "name", "us", "low", "high", "vs_bf16", "gb_per_s", "share")


class Report:
    """What was found; written after every step."""

    def __init__(self, machine: Machine, path: Path | None) -> None:
        self._path = path
        self.record: dict[str, Any] = {
            "title": "DRY RUN on a CPU, no figure of a GPU" if machine.dry else "gpu_check",
            "environment": machine.environment(),
            "copy_gb_per_s": None,
            "checks": [],
            "rows": [],
            "splits": [],
            "steps": [],
            "skipped": [],
        }

    def add(self, section: str, /, **what: Any) -> None:
        """A row of one section, printed and written."""
        self.record[section].append(what)
        print(section, "  ".join(f"{k}={v}" for k, v in what.items()), flush=True)
        self.write()

    def write(self) -> None:
        """The JSON file."""
        if self._path:
            self._path.write_text(json.dumps(self.record, indent=2) + "\n")

    def add_step(self, point: Point, name: str, timing: Timing) -> None:
        """What a step beside attention takes."""
        shown = {"us": timing.median, "low": timing.low, "high": timing.high}
        self.add("steps", point=point.name, name=name, **{k: round(us, 1) for k, us in shown.items()}, rounds=timing.rounds)

    def add_times(self, point: Point, times: dict[str, Timing], used: dict[str, int]) -> None:
        """A line for each of the times at a point, with the bytes of pages that a call reads."""
        base = next(name for name in BASELINES if name in times)
        about = {"kind": point.kind, "shape": point.shape.name, "context": point.context, "batch": point.batch}
        for name, timing in times.items():
            rate = used[name] / timing.median / 1e3
            self.add(
                "rows", **about, new_tokens=point.new_tokens, name=name, us=round(timing.median, 1),
                low=round(timing.low, 1), high=round(timing.high, 1), rounds=timing.rounds,
                vs_bf16=round(times[base].median / timing.median, 2), base=base,
                gb_per_s=round(rate), share=round(rate / self.record["copy_gb_per_s"], 2),
            )  # fmt: skip

    def failed(self) -> list[dict[str, Any]]:
        """Checks that did not pass."""
        return [check for check in self.record["checks"] if not check["ok"]]

    def table(self) -> str:
        """The short table that comes last."""
        record = self.record
        where, copy = record["environment"].get("gpu", "no GPU"), record["copy_gb_per_s"]
        lines = [f"== {record['title']}: {where}, copy {copy:.0f} GB/s =="]
        rows = [COLUMNS, *(tuple(str(row[key]) for key in COLUMNS) for row in record["rows"])]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += self._aims()
        failed, why = self.failed(), sorted({skipped["why"].split(":")[0] for skipped in record["skipped"]})
        lines.append(f"skipped: {len(record['skipped'])} ({', '.join(why)})")
        lines.append(f"checks: {len(record['checks']) - len(failed)} passed, {len(failed)} failed")
        lines += [f"  FAILED {c['name']}: {c.get('error') or c['error_over_bound']}" for c in failed]
        return "\n".join(lines)

    def _aims(self) -> list[str]:
        """Whether what was aimed at is reached, by the last measurement of the first point."""
        rows = self.record["rows"]
        if not rows or self.record["environment"]["dry_run"]:
            return []
        at = {key: rows[0][key] for key in ("kind", "shape", "context", "batch")}
        last = {row["name"]: row for row in rows if all(row[key] == value for key, value in at.items())}
        lines = []
        for name, aim in TARGETS.items():
            if name in last:
                reached, base = last[name]["vs_bf16"], last[name]["base"]
                lines.append(f"aim {name} {aim}x: {reached}x of {base}, {'reached' if reached >= aim else 'MISSED'}")
        return lines
