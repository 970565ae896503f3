"""What does each stage of the codec cost, and each choice in it? The tables of docs/codec.md.

    python benchmark/codec_stages.py --markdown

Relative error of the attention output, mean of the layers, every other token being exact: documents of the development
set, 2560 tokens of context, tokens 128 to 1536 coded, 64 queries from the 256 tokens that follow, which the sample of
queries has not seen. Printed are mean and standard deviation over the documents; the errors of each are in the JSON. Layers
are taken one by one, so errors do not add up from layer to layer: what a format costs in the end quality.py says. All layers
are coded in the flat basis, those with a surviving key bias too. OMP_NUM_THREADS=1 where other programs are running.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from codec_scenes import CODED, CONTEXT, LATER, QUERIES, Scene, make_scene
from codec_tables import STAGES, Study, Table
from common import CALIBRATION, arguments, demo_model, environment

from csa2.calibrate.artefact import check_model, load
from csa2.calibrate.capture import CapturedModel
from csa2.check.documents import KINDS, shipped_documents

Found = dict[str, dict[str, list[float]]]
"""Row, column, error of each document."""


def parse() -> argparse.Namespace:
    """The options."""
    parser = arguments(__doc__)
    parser.add_argument("--calibration", type=Path, help="folder from `csa2 calibrate` (default: the demo model's own)")
    parser.add_argument("--documents", type=int, default=3, help=f"of {len(KINDS)}, in their order (default: 3)")
    parser.add_argument("--stage", default=",".join(STAGES), help="tables, comma-separated (default: all)")
    parser.add_argument("--markdown", action="store_true", help="print tables as in docs/codec.md")
    options = parser.parse_args()
    options.stage = options.stage.split(",")
    if unknown := [name for name in options.stage if name not in STAGES]:
        parser.error(f"--stage {unknown[0]!r} is unknown: choose from {', '.join(STAGES)}")
    if not 2 <= options.documents <= len(KINDS):
        # At least two: pairs of channels are ordered by what the others show.
        parser.error(f"--documents {options.documents} is out of range: give 2 to {len(KINDS)}")
    if options.model is None and options.calibration is None:
        options.calibration = CALIBRATION
    return options


def make_scenes(folder: Path, count: int) -> tuple[list[Scene], CapturedModel]:
    """The first `count` documents, through the model."""
    model = CapturedModel(folder)
    documents = shipped_documents("development")[:count]
    return [make_scene(model, document.name, model.encode(document.text)) for document in documents], model


def orders_of(calibration: Path | None, folder: Path) -> list[list[int]] | None:
    """Channel order of each head of the whole model."""
    if calibration is None:
        return None
    known = load(calibration)
    check_model(known, folder, source=str(calibration))
    layers, heads = known.channel_order.shape[:2]
    return known.of(range(layers), range(heads)).orders


def measure(
    stages: list[str], scenes: list[Scene], model: CapturedModel, orders: list[list[int]] | None
) -> dict[str, Found]:
    """Every table, over all documents."""
    results: dict[str, Found] = {name: {} for name in stages}
    for scene in scenes:
        scores = torch.stack([other.pair_scores for other in scenes if other is not scene]).mean(0)
        study = Study(scene, model.rotation(scene.keys.shape[-1]), orders, scores)
        for name in stages:
            start = time.monotonic()
            add(results[name], STAGES[name][1](study))
            print(f"{scene.name}, {name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return results


def add(found: Found, table: Table) -> None:
    """Append the errors of one document."""
    for row, columns in table.items():
        for column, error in columns.items():
            found.setdefault(row, {}).setdefault(column, []).append(error)


def summarised(found: Found) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean and standard deviation over the documents."""
    return {
        row: {
            column: {"mean": statistics.mean(errors), "sd": statistics.stdev(errors), "documents": errors}
            for column, errors in columns.items()
        }
        for row, columns in found.items()
    }


def markdown(title: str, found: Found) -> str:
    """One table: mean, and standard deviation over the documents."""
    columns = list(dict.fromkeys(column for of_row in found.values() for column in of_row))
    lines = [f"{title}:", "", "| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for row, of_row in found.items():
        cells = [
            f"{statistics.mean(of_row[column]):.4f} ± {statistics.stdev(of_row[column]):.4f}" if column in of_row else ""
            for column in columns
        ]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    options = parse()
    folder = options.model or demo_model()
    scenes, model = make_scenes(folder, options.documents)
    with torch.inference_mode():
        results = measure(options.stage, scenes, model, orders_of(options.calibration, folder))
    settings = {
        "model": str(folder),
        "calibration": None if options.calibration is None else str(options.calibration),
        "documents": [scene.name for scene in scenes],
        "context_tokens": CONTEXT,
        "coded_tokens": CODED,
        "later_tokens": LATER,
        "queries": QUERIES,
    }
    record = {"environment": environment(), "settings": settings}
    print(json.dumps(record, indent=2))
    for name, found in results.items():
        if options.markdown:
            print("\n" + markdown(STAGES[name][0], found))
        else:
            print(json.dumps({name: summarised(found)}, indent=2))
    if options.json:
        record["results"] = {name: summarised(found) for name, found in results.items()}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
