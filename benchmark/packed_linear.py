"""How much does a packed weight save in a linear layer? torch's `F.linear` against oneDNN's product with a packed weight.

    OMP_NUM_THREADS=1 python benchmark/packed_linear.py --tokens 1 8 64 512 --json rows.json

bf16, the layers of the demo model and one of a 7B model. Both sides in alternation; each call reads another of enough
weights that together they do not fit the caches of a core. CPU time of the calling thread with one thread, else wall time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from common import arguments, environment
from torch import Tensor
from torch.nn import functional

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
    "7B": (4096, 4096),
}
WEIGHT_BYTES = 120_000_000


def medians_us(calls: dict[str, list[Callable[[], Tensor]]], seconds: float, threads: int) -> dict[str, list[float]]:
    """Microseconds of each call of each side, in rounds that take all sides in turn."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    taken: dict[str, list[float]] = {side: [] for side in calls}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken["plain"]) < 20:
        for side, each in calls.items():
            for call in each:
                start = clock()
                call()
                taken[side].append((clock() - start) * 1e6)
    return taken


def measure(name: str, tokens: int, options: argparse.Namespace) -> dict[str, object]:
    """One row."""
    rows, columns = SHAPES[name]
    count = max(2, WEIGHT_BYTES // (rows * columns * 2))
    weights = [(torch.randn(rows, columns) * 0.02).bfloat16() for _ in range(count)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    x = torch.randn(tokens, columns).bfloat16()
    product = torch.ops.mkldnn._linear_pointwise.default
    taken = medians_us(
        {
            "plain": [lambda w=w: functional.linear(x, w) for w in weights],
            "packed": [lambda w=w: product(x, w, None, "none", [], "") for w in packed],
        },
        options.seconds,
        options.threads,
    )
    plain, ours = (statistics.median(taken[side]) for side in ("plain", "packed"))
    quarters = {side: [round(q, 1) for q in statistics.quantiles(values)[::2]] for side, values in taken.items()}
    return {
        "layer": name,
        "shape": [rows, columns],
        "tokens": tokens,
        "plain_us": round(plain, 1),
        "packed_us": round(ours, 1),
        "speedup": round(plain / ours, 2),
        "quartiles_us": quarters,
        "bytes_ratio": torch.ops.mkldnn._nbytes(packed[0]) / weights[0].nbytes,
        "equal": torch.equal(functional.linear(x, weights[0]), product(x, packed[0], None, "none", [], "")),
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--layer", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 64, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rows = []
    for name in options.layer:
        for tokens in options.tokens:
            rows.append(row := measure(name, tokens, options))
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
