"""Results in the layout of kvpress, so that its plots and tables can show them beside its own.

Layout of a results folder: evaluation/evaluate.py of NVIDIA/kvpress, commit 7f5d6b87d3c0 (get_results_dir, _save_results,
_calculate_and_save_metrics, save_config). The folder is named dataset__data_dir__model__press__ratio; `ratio` is the share
of the cache that is taken away. It holds predictions.csv, metrics.json and config.yaml. Where it is there already, numbered
folders inside it are used. The data set is ours: scores are no RULER scores, whatever its name may suggest.
"""

import csv
import json
from pathlib import Path
from typing import Any

from csa2.check.tasks.outcome import FULL, Answer, TaskRecord

DATASET = "csa2_tasks"
NO_PRESS = "no_press"
"""kvpress's name for the uncompressed cache."""
COLUMNS = ("task", "question", "answer_prefix", "answer", "max_new_tokens", "predicted_answer", "compression_ratio")


def export(record: TaskRecord, folder: Path) -> list[Path]:
    """Write one results folder for each row and context into `folder`, which is made; their paths."""
    made = []
    for name, answers in record.answers.items():
        for context in record.plan.contexts:
            here = [answer for answer in answers if answer.context == context]
            ratio = 0.0 if name == FULL else max(0.0, 1 - record.bytes_fraction_total[name][str(context)])
            config = _config(record, name, context, ratio)
            path = _new_folder(folder, config)
            _write_predictions(path / "predictions.csv", here, ratio)
            scores = {row.task: {"string_match": round(row.score_pct, 2)} for row in record.rows_of(name, context)}
            (path / "metrics.json").write_text(json.dumps(scores, indent=4))
            # JSON values are YAML.
            (path / "config.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
            made.append(path)
    return made


def _config(record: TaskRecord, name: str, context: int, ratio: float) -> dict[str, Any]:
    """Fields of kvpress's configuration, as far as they mean something here."""
    return {
        "dataset": DATASET,
        "data_dir": str(context),
        "model": Path(record.model).name,
        "device": None,
        "press_name": NO_PRESS if name == FULL else name,
        "compression_ratio": round(ratio, 4),
        "key_channel_compression_ratio": None,
        "fraction": 1.0,
        "max_new_tokens": None,
        "max_context_length": None,
        "compress_questions": False,
        "needle_depth": None,
        "model_kwargs": {"dtype": record.dtype},
        "press_init_command": json.dumps(record.engines.get(name, {}), sort_keys=True),
        "seed": record.plan.seed,
    }


def _new_folder(parent: Path, config: dict[str, Any]) -> Path:
    parts = (
        config["dataset"],
        config["data_dir"],
        config["model"],
        config["press_name"],
        f"{config['compression_ratio']:.2f}",
    )
    path = parent / "__".join(parts).replace("/", "--")
    if path.exists():
        number = 1
        while (path / str(number)).exists():
            number += 1
        path = path / str(number)
    path.mkdir(parents=True)
    return path


def _write_predictions(path: Path, answers: list[Answer], ratio: float) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for each in answers:
            wanted = str(list(each.wanted))
            row = (each.task, each.question, each.answer_prefix, wanted, each.new_tokens, each.said, ratio)
            writer.writerow(row)
