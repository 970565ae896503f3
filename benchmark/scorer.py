"""What is a trained scorer worth, and what does it cost?

    python benchmark/scorer.py --out DIR --json scorer.json

Trains a regression and small networks on the text that the shipped calibration is made of (benchmark/calibrate_demo.py), and
merges pages of other documents, those of the report set, by each score: the error of the attention output for later queries,
everything else exact. Then the time of sealing a prompt with the scorer and without, beside the time of its prefill. An
interrupted training goes on; `benchmark/calibrate_demo.py --out DIR` takes it over.
"""

import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from calibrate_demo import CHARACTERS
from common import arguments, demo_model, report
from torch import Tensor
from tqdm import tqdm

import csa2
from csa2.calibrate.artefact import load
from csa2.calibrate.capture import CapturedLayer, CapturedModel
from csa2.calibrate.fingerprint import model_shape, weights_digest
from csa2.calibrate.merge_sample import PieceSplit, cut
from csa2.calibrate.offline import attend, joined, pages, rows, sequence
from csa2.calibrate.scorer_run import FOLDER, Candidates, ScorerOptions, Work, train_scorers
from csa2.calibrate.scorer_training import RATIOS, importance, merging_error, oracle
from csa2.calibrate.sensitivity import SampleSplit
from csa2.check.documents import shipped_documents
from csa2.check.formats import cache_options
from csa2.check.layers import layer_of
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.codec import PageCodec
from csa2.codec.queries import QuerySamples
from csa2.codec.sealing import CompiledSealer, ReferenceSealer, Wave
from csa2.info import versions
from csa2.options import PAGE_SIZE
from sgl_kernels.page_layout import PageGeometry, PageLayout

PROMPT_TOKENS = 4096
PREDICTED_TOKENS = 3584
REPEATS = 5
SHIPPED = Path(csa2.__file__).parent / "calibrations" / "smollm2-135m-instruct"


def main() -> None:
    """Train, measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is trained")
    parser.add_argument("--predictions", action="store_true", help="also what the scores mean for predictions (minutes)")
    options = parser.parse_args()
    folder = options.model or demo_model()
    texts = [document.text for document in shipped_documents("calibration", CHARACTERS)]
    work = Work(
        shape=model_shape(folder),
        weights_digest=weights_digest(folder),
        data_digest=hashlib.sha256("".join(texts).encode()).hexdigest(),
        options=ScorerOptions(),
        versions={name: version for name, version in versions().items() if name != "os"},
    )
    model = CapturedModel(folder)
    start, cpu = time.perf_counter(), time.process_time()
    found = train_scorers(model, [model.encode(text) for text in texts], work, options.out / FOLDER)
    training = {"training_s": time.perf_counter() - start, "training_cpu_s": time.process_time() - cpu}
    results = {
        "held_out": {kind: found.mean_errors(kind) for kind in found.errors},
        "report_set": report_errors(model, found, work.options.scorer_tokens),
        "ratios": RATIOS,
        "parameters": {kind: scorer.parameters for kind, scorer in found.scorers.items()},
        **training,
        **scoring_time(model, found),
    }
    if options.predictions:
        results["predicted_divergence"] = predicted_losses(model, found)
    sides = {kind: ["--scorer", kind] for kind in found.errors}
    report(options, sides, results)


def report_errors(model: CapturedModel, found: Candidates, tokens: int) -> dict[str, Any]:
    """Error by score: mean over layers and documents, and by document."""
    documents = shipped_documents("report")
    errors: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    split = PieceSplit.of(tokens)
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


def predicted_losses(model: CapturedModel, found: Candidates) -> dict[str, dict[str, list[float]]]:
    """Divergence that the predictions of the model would suffer, as calibration predicts it (csa2/calibrate/sensitivity.py):
    nat per token of each report document, pages as the shipped calibration makes them.
    """
    shape = model_shape(Path(model.model.config._name_or_path))
    geometry = PageGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, PAGE_SIZE, torch.bfloat16)
    known = load(SHIPPED).of(range(shape.num_layers), range(shape.num_kv_heads))
    losses: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("csa2-4x", "csa2-8x")}
    for seed, document in enumerate(tqdm(shipped_documents("report"), desc="predictions", unit="document")):
        tokens = model.encode(document.text)[:PREDICTED_TOKENS]
        split = SampleSplit.of(len(tokens))
        layers = model.capture(tokens, split.context)
        gradients = model.output_gradients(tokens, layers, seed)
        for name, of_format in losses.items():
            codec, ladder = codec_and_ladder(cache_options(name), geometry, model.rotation(shape.head_dim), known)
            for kind in found.errors:
                scorer = found.scorers[kind].map(lambda x: x.flatten(0, 1)) if kind in found.scorers else None
                total = 0.0
                for index, layer in enumerate(layers):
                    part, layouts = layer_of(replace(codec, scorer=scorer), ladder, index)
                    total += layer_loss(layer, gradients[index], split, part, layouts[ladder.tail])
                of_format[kind].append(total)
    return losses


def layer_loss(layer: CapturedLayer, gradient: Tensor, split: SampleSplit, codec: PageCodec, layout: PageLayout) -> float:
    """Predicted loss of one layer, nat per token, sum over heads."""
    tokens = layer.keys.shape[1]
    plain = pages(layer.keys, layer.values, 1, split.last_page, PAGE_SIZE)
    opened = codec.open(codec.seal(plain, layout, layer.sample.expand(len(plain.keys), -1, -1, -1)), layout)
    before, after = (
        rows(layer.keys, layer.values, *ends) for ends in ((0, PAGE_SIZE), (split.last_page * PAGE_SIZE, tokens))
    )
    exact = attend(layer.asked, rows(layer.keys, layer.values, 0, tokens))
    error = attend(layer.asked, joined((before, sequence(opened), after))) - exact
    by_query = (gradient * error).view(layer.keys.shape[0], -1, *error.shape[1:]).sum((1, 3))
    return float((by_query.square().mean(-1) / 2).sum())


def scoring_time(model: CapturedModel, found: Candidates) -> dict[str, float]:
    """Median CPU seconds for all pages of a prompt, all layers and heads merged, and for its prefill by transformers."""
    shape = model_shape(Path(model.model.config._name_or_path))
    geometry = PageGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, PAGE_SIZE, torch.bfloat16)
    free, ladder = codec_and_ladder(cache_options("csa2-4x"), geometry, model.rotation(shape.head_dim), None)
    scored = replace(free, scorer=found.scorers["mlp"].map(lambda tensor: tensor.flatten(0, 1)))
    count, size = PROMPT_TOKENS // PAGE_SIZE, ladder.layouts[0].page_bytes
    arena = torch.randn(count * size // 2).bfloat16().view(torch.uint8)
    samples = QuerySamples(shape.num_layers, shape.num_kv_heads)
    for layer in range(shape.num_layers):
        queries = torch.randn(PROMPT_TOKENS, shape.num_query_heads, shape.head_dim)
        samples.record_extend(0, layer, queries, shape.head_dim**-0.5)
    nobody = torch.zeros(count, dtype=torch.int64)
    wave = Wave(nobody, torch.arange(count) * size, torch.full((count,), ladder.tail), nobody)
    prompt = model.encode(shipped_documents("report")[0].text)[:PROMPT_TOKENS]
    actions: dict[str, Callable[[], object]] = {"prefill": lambda: model.run(prompt, lambda *_: None)}
    for name, codec in (("none", free), ("mlp", scored)):
        compiled, reference = CompiledSealer(ladder.layouts, codec), ReferenceSealer(ladder.layouts, codec)
        actions[f"seal_compiled_{name}"] = partial(compiled.seal, arena, wave, samples)
        actions[f"seal_reference_{name}"] = partial(reference.seal, arena, wave, samples)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):  # in turn: all see the same machine
        for name, action in actions.items():
            start = time.process_time()
            action()
            seconds[name].append(time.process_time() - start)
    medians = {f"{name}_cpu_s": statistics.median(times) for name, times in seconds.items()}
    scoring = {
        f"scoring_share_of_prefill_{kind}": (medians[f"seal_{kind}_mlp_cpu_s"] - medians[f"seal_{kind}_none_cpu_s"])
        / medians["prefill_cpu_s"]
        for kind in ("compiled", "reference")
    }
    return {**medians, **scoring}


if __name__ == "__main__":
    main()
