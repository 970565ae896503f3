"""What is a trained scorer worth, and what does it cost?

    python benchmark/scorer.py --out DIR --json scorer.json

Trains a regression and small networks on the text that the shipped calibration is made of (benchmark/calibrate_demo.py), and
merges pages of other documents, those of the report set, by each score: the error of the attention output for later queries,
everything else exact. Then the time of scoring a prompt beside the time of its prefill, on the same threads. An interrupted
training goes on; `benchmark/calibrate_demo.py --out DIR` takes it over.
"""

import hashlib
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from calibrate_demo import CHARACTERS
from common import arguments, demo_model, report
from torch import Tensor
from tqdm import tqdm

from csa2.calibrate.capture import CapturedModel
from csa2.calibrate.fingerprint import model_shape, weights_digest
from csa2.calibrate.merge_sample import PieceSplit, cut
from csa2.calibrate.scorer_run import FOLDER, Candidates, ScorerOptions, Work, train_scorers
from csa2.calibrate.scorer_training import RATIOS, importance, merging_error, oracle
from csa2.check.documents import shipped_documents
from csa2.codec.importance import observed_attention
from csa2.info import versions
from sgl_kernels.page_codec.reference import Entries

PROMPT_TOKENS = 4096
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


def scoring_time(model: CapturedModel, found: Candidates) -> dict[str, float]:
    """Median seconds for all pages of a prompt, layers and heads as the codec sees them, and for its prefill."""
    scorer = found.scorers["mlp"].map(lambda tensor: tensor.flatten(0, 1))
    layers, heads, dim = found.scorers["mlp"].weights.shape[0], scorer.weights.shape[0], model.model.config.head_dim
    keys, values = torch.randn(2, PROMPT_TOKENS // 64, heads, 64, dim)
    entries = Entries(keys, values, None)
    queries = torch.randn(PROMPT_TOKENS // 64, heads, 16 * model.model.config.num_attention_heads * layers // heads, dim)
    observed = observed_attention(entries, queries)
    prompt = model.encode(shipped_documents("report")[0].text)[:PROMPT_TOKENS]
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):  # in turn: both sides see the same load
        for name, action in (
            ("scoring_s", lambda: scorer.correction(entries, observed)),
            ("prefill_s", lambda: model.run(prompt, lambda *_: None)),
        ):
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {**medians, "scoring_share_of_prefill": medians["scoring_s"] / medians["prefill_s"]}


if __name__ == "__main__":
    main()
