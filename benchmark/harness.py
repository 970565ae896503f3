"""lm-eval against a server of ours, format by format, without the network.

    python benchmark/harness.py --lm-eval lm_eval --formats bf16,fp4,csa2-4x

Writes the questions of `csa2 check --tasks` to benchmark/lm_eval/data, starts a server for each format, and lets lm-eval
ask it through `local-completions`. lm-eval is not ours: install "lm_eval[api]" into an environment of its own, and name its
command with `--lm-eval`. Hugging Face libraries are told not to ask the network.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common import CALIBRATION, Server, demo_model, environment

from csa2.check.formats import engine_options, parse_formats
from csa2.check.tasks.suite import TaskPlan, make_samples, parse_tasks
from csa2.plan.model_memory import read_model
from sglang_csa2.check_inputs import load_tokenizer, stay_offline

TASKS = Path("benchmark/lm_eval")
MARGIN_TOKENS = 256
"""lm-eval would cut prompts that leave less than the longest answer of all tasks."""
CHUNK_TOKENS = 256
"""A question comes in the last chunk of its prompt, and reads what is before that from sealed pages."""


def write_data(model: Path, tasks: tuple[str, ...], context: int, samples: int) -> None:
    """One file a task, one question a line."""
    tokenizer = load_tokenizer(model)
    plan = TaskPlan(tasks, (context,), samples)
    (TASKS / "data").mkdir(exist_ok=True)
    made = make_samples(plan, context, lambda text: len(tokenizer(text, verbose=False)["input_ids"]))
    for task in tasks:
        lines = [json.dumps({"prompt": each.prompt, "answers": each.answers}) for each in made if each.task == task]
        (TASKS / "data" / f"{task}.jsonl").write_text("\n".join(lines) + "\n")


def ask(program: str, url: str, model: Path, names: list[str], context: int) -> dict[str, float]:
    """Scores in per cent by task, from lm-eval."""
    # Another Python than this one.
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_DATASETS_CACHE": folder,
        }
        about = f"model=default,base_url={url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
        command = [
            program,
            "run",
            "--model",
            "local-completions",
            "--model_args",
            f"{about},max_length={context + MARGIN_TOKENS}",
        ]
        command += ["--include_path", str(TASKS), "--tasks", *names, "--output_path", folder]
        subprocess.run(command, env={**outside, **offline}, check=True)
        (result,) = Path(folder).rglob("results_*.json")
        scores = json.loads(result.read_text())["results"]
    return {
        name: 100 * next(value for key, value in scores[name].items() if key.startswith("string_match,")) for name in names
    }


def server_flags(name: str, model: Path, context: int, warm_tokens: int) -> list[str]:
    """Flags of a server whose old pages have the format `name`; its arena has room for more than is asked at once."""
    fields = engine_options(name, str(CALIBRATION)) | {"csa2_warm_tokens": warm_tokens}
    flags = ["--kv-compress", "csa2", "--chunked-prefill-size", str(CHUNK_TOKENS)]
    flags += ["--csa2-arena-size", str(8 * context * read_model(model).token_bytes)]
    for field, value in fields.items():
        flags += ["--" + field.replace("_", "-"), str(value)]
    return flags


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: the demo model)")
    parser.add_argument("--lm-eval", default="lm_eval", help="command of lm-eval (default: %(default)s)")
    parser.add_argument(
        "--formats", default="bf16,fp4,csa2-2x,csa2-4x,csa2-8x", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--tasks", default="needle,multi-needle,variables,copy", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=1024, help="tokens of prompt and answer (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=20, help="of each task (default: %(default)s)")
    parser.add_argument("--warm-tokens", type=int, default=128, help="--csa2-warm-tokens (default: %(default)s)")
    parser.add_argument("--data-only", action="store_true", help="write the questions and stop")
    parser.add_argument("--json", type=Path, help="write the scores to this file")
    options = parser.parse_args()
    model, tasks = options.model or demo_model(), parse_tasks(options.tasks)
    stay_offline()
    write_data(model, tasks, options.context, options.samples)
    if options.data_only:
        return
    names = [f"csa2_{task.replace('-', '_')}" for task in tasks]
    record: dict[str, Any] = {"environment": environment(), "context": options.context, "samples": options.samples}
    record["scores"] = {}
    for name in parse_formats(options.formats):
        server = Server(name, model, server_flags(name, model, options.context, options.warm_tokens))
        try:
            server.wait_ready()
            record["scores"][name] = ask(options.lm_eval, server.url, model, names, options.context)
        finally:
            server.stop()
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=2) + "\n")
    print("| |", " | ".join(tasks), "|\n|" + " --- |" * (len(tasks) + 1))
    for name, scores in record["scores"].items():
        print(f"| `{name}` |", " | ".join(f"{scores[each]:.1f}" for each in names), "|")


if __name__ == "__main__":
    main()
