"""What is a trained scorer worth, and what does it cost?

    OMP_NUM_THREADS=1 python benchmark/scorer.py --out DIR --json scorer.json

Trains a regression and small networks on the text that the shipped calibration is made of (benchmark/calibrate_demo.py).
Then, on other documents, of other sources or other parts of them: the error of the attention output for later queries when
pages are merged by each score and everything else is exact (report set); what the scores do to predictions (development
set); and the time of scoring a prompt beside its prefill by a server. An interrupted training goes on;
`benchmark/calibrate_demo.py --scorer best --out DIR` takes it over.
"""

import hashlib
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from calibrate_demo import CHARACTERS
from common import CALIBRATION, arguments, demo_model, prompts, report, servers, summary
from sealing import SETTINGS, server_arguments
from torch import Tensor
from tqdm import tqdm

from csa2.calibrate.artefact import load
from csa2.calibrate.capture import CapturedModel
from csa2.calibrate.fingerprint import ModelShape, model_shape, weights_digest
from csa2.calibrate.merge_sample import cut, piece_split
from csa2.calibrate.scorer_run import FOLDER, Candidates, ScorerOptions, Work, train_scorers
from csa2.calibrate.scorer_training import RATIOS, importance, merging_error, oracle
from csa2.calibrate.sensitivity import LayerErrors, budget_split, head_losses
from csa2.check.documents import shipped_documents
from csa2.check.formats import cache_options
from csa2.check.layers import layer_of
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.codec.queries import QuerySamples
from csa2.codec.scorer import Scorer
from csa2.codec.sealing import CompiledSealer, ReferenceSealer, Sealer, Wave
from csa2.info import versions
from csa2.options import PAGE_SIZE
from sgl_kernels.page_layout import PageGeometry

PROMPT_TOKENS = 4096
PREDICTED_TOKENS = 3584
DRAWS = 3
"""Of labels, for each document."""
REPEATS = 5


def main() -> None:
    """Train, measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is trained")
    options = parser.parse_args()
    folder = options.model or demo_model()
    texts = [document.text for document in shipped_documents("calibration", CHARACTERS)]
    work = Work(
        shape=model_shape(folder),
        weights_digest=weights_digest(folder),
        data_digest=hashlib.sha256("".join(texts).encode()).hexdigest(),
        options=ScorerOptions(scorer="best"),
        versions={name: version for name, version in versions().items() if name != "os"},
    )
    model = CapturedModel(folder)
    start, cpu = time.perf_counter(), time.process_time()
    found = train_scorers(model, [model.encode(text) for text in texts], work, options.out / FOLDER)
    training = {"training_s": time.perf_counter() - start, "training_cpu_s": time.process_time() - cpu}
    results = {
        "parameters": {kind: scorer.parameters for kind, scorer in found.scorers.items()},
        **training,
        "ratios": RATIOS,
        "held_out": {kind: found.mean_errors(kind) for kind in found.errors},
        "report_set": report_errors(model, found, work.options.scorer_tokens),
        "predictions": predicted_losses(model, work.shape, found),
        "time": scoring_time(folder, found.scorers["mlp"]),
    }
    sides = {kind: ["--scorer", kind] for kind in found.errors}
    report(options, sides, results)


def report_errors(model: CapturedModel, found: Candidates, tokens: int) -> dict[str, Any]:
    """Error by score: mean over layers and documents, and by document."""
    documents = shipped_documents("report")
    errors: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    split = piece_split(tokens)
    for document in tqdm(documents, desc="report set", unit="document"):

        def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, name: str = document.name) -> None:
            sample = cut(queries, keys, values, split)
            scores = {"none": importance(sample, None), "oracle": oracle(sample)}
            for kind, scorer in found.scorers.items():
                scores[kind] = importance(sample, scorer.map(lambda tensor: tensor[layer]))
            for kind, score in scores.items():
                errors[kind][name].append([merging_error(sample, score, ratio) for ratio in RATIOS])

        model.run(model.encode(document.text)[:tokens], visit)
    return {
        kind: {
            "mean": torch.tensor(list(of_kind.values())).mean((0, 1)).tolist(),
            "by_document": {name: torch.tensor(layers).mean(0).tolist() for name, layers in of_kind.items()},
        }
        for kind, of_kind in errors.items()
    }


def predicted_losses(model: CapturedModel, shape: ModelShape, found: Candidates) -> dict[str, dict[str, Any]]:
    """Divergence that the predictions of the model would suffer, as calibration predicts it (csa2/calibrate/sensitivity.py),
    on the development set, on which the choice of the default is made; pages as the shipped calibration makes them.

    For each format and score: nat per token of each document, and by how many per cent of "none" their mean is larger, with
    the standard error of the differences by document.
    """
    known = load(CALIBRATION).of(range(shape.num_layers), range(shape.num_kv_heads))
    made = {
        name: codec_and_ladder(cache_options(name), geometry_of(shape), make_rotation(shape.head_dim, neox=True), known)
        for name in ("csa2-4x", "csa2-8x")
    }
    losses: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in made}
    for document in tqdm(shipped_documents("development"), desc="predictions", unit="document"):
        tokens = model.encode(document.text)[:PREDICTED_TOKENS]
        split = budget_split(len(tokens))
        layers = model.capture(tokens, split.context)
        draws = [model.output_gradients(tokens, layers, seed) for seed in range(DRAWS)]
        errors = [LayerErrors(layer, split) for layer in layers]
        for name, (codec, ladder) in made.items():
            for kind in found.errors:
                scorer = found.scorers[kind].map(lambda x: x.flatten(0, 1)) if kind in found.scorers else None
                total = 0.0
                for index in range(len(layers)):
                    part, layouts = layer_of(replace(codec, scorer=scorer), ladder, index)
                    error = errors[index].of(part, layouts[ladder.tail])
                    total += sum(float(head_losses(draw[index], error, shape.num_kv_heads).sum()) for draw in draws) / DRAWS
                losses[name][kind].append(total)
    return {name: {kind: beside(of_kind[kind], of_kind["none"]) for kind in of_kind} for name, of_kind in losses.items()}


def beside(losses: list[float], free: list[float]) -> dict[str, Any]:
    """Losses by document beside those of the score without training."""
    more = [loss - none for loss, none in zip(losses, free, strict=True)]
    unit = statistics.mean(free) / 100
    return {
        "by_document": losses,
        "mean": statistics.mean(losses),
        "more_than_none_pct": statistics.mean(more) / unit,
        "se_pct": statistics.stdev(more) / len(more) ** 0.5 / unit,
    }


def geometry_of(shape: ModelShape) -> PageGeometry:
    """Pages of a model, in bfloat16."""
    return PageGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, PAGE_SIZE, torch.bfloat16)


def scoring_time(folder: Path, scorer: Scorer) -> dict[str, Any]:
    """CPU time of scoring a prompt's pages in every layer and head, each once, beside its prefill by a server.

    Pages are random and no head is spared, as without a calibration; the server serves ratio 4 with compiled code, and its
    prefill is all that it does for one more token.
    """
    torch.set_num_threads(1)
    shape = model_shape(folder)
    free, ladder = codec_and_ladder(
        cache_options("csa2-4x"), geometry_of(shape), make_rotation(shape.head_dim, neox=True), None
    )
    scored = replace(free, scorer=scorer.map(lambda tensor: tensor.flatten(0, 1)))
    count, size = PROMPT_TOKENS // PAGE_SIZE, ladder.layouts[0].page_bytes
    arena = torch.randn(count * size // 2).bfloat16().view(torch.uint8)
    samples = QuerySamples(shape.num_layers, shape.num_kv_heads)
    for layer in range(shape.num_layers):
        queries = torch.randn(PROMPT_TOKENS, shape.num_query_heads, shape.head_dim)
        samples.record_extend(0, layer, queries, shape.head_dim**-0.5)
    nobody = torch.zeros(count, dtype=torch.int64)
    wave = Wave(nobody, torch.arange(count) * size, torch.full((count,), ladder.tail), nobody)
    sealers: dict[str, Sealer] = {
        "compiled_none": CompiledSealer(ladder.layouts, free),
        "compiled_mlp": CompiledSealer(ladder.layouts, scored),
        "reference_none": ReferenceSealer(ladder.layouts, free),
        "reference_mlp": ReferenceSealer(ladder.layouts, scored),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):  # in turn: all see the same machine
        for name, sealer in sealers.items():
            start = time.thread_time()
            sealer.seal(arena, wave, samples)
            seconds[f"seal_{name}_cpu_s"].append(time.thread_time() - start)
    with servers(folder, {"ratio 4": server_arguments(SETTINGS["ratio 4"])}) as up:
        for prompt in prompts(folder, REPEATS + 1, PROMPT_TOKENS):
            start = up["ratio 4"].cpu_s()
            up["ratio 4"].generate(prompt, 1)
            seconds["prefill_cpu_s"].append(up["ratio 4"].cpu_s() - start)
    seconds["prefill_cpu_s"].pop(0)  # whatever the first request pays
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    share = {
        kind: (middle[f"seal_{kind}_mlp_cpu_s"] - middle[f"seal_{kind}_none_cpu_s"]) / middle["prefill_cpu_s"]
        for kind in ("compiled", "reference")
    }
    return {**{name: summary(times) for name, times in seconds.items()}, "scoring_share_of_prefill": share}


if __name__ == "__main__":
    main()
