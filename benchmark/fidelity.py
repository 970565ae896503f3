"""How far do answers from compressed pages move? Log-probabilities against the uncompressed server.

    python benchmark/fidelity.py --prompts 6 --tokens 3000 --continuation 64

The uncompressed server continues each prompt greedily. Both servers then score that same continuation on top of the
cached prompt, so the compressed side reads every prompt token from its pages. Printed: the mean absolute difference of
the log-probability of the chosen token, per prompt and over all, and what the compressed cache holds.
"""

import statistics

from common import Server, arguments, demo_model, prompts, report, servers


def continuation(server: Server, prompt: list[int], tokens: int) -> list[int]:
    """Greedy continuation of `prompt`."""
    answer = server.generate(prompt, tokens, return_logprob=True)
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


def score(server: Server, prompt: list[int], tail: list[int]) -> tuple[list[float], int]:
    """Log-probabilities of `tail` after the cached `prompt`, and how many tokens were found in the cache."""
    server.generate(prompt, 1)
    answer = server.generate(prompt + tail, 1, return_logprob=True, logprob_start_len=len(prompt) - 1)
    scored = answer["meta_info"]["input_token_logprobs"][-len(tail) :]
    if [token for _, token, _ in scored] != tail:
        raise RuntimeError("the server scored other tokens than were sent")
    return [value for value, _, _ in scored], answer["meta_info"]["cached_tokens"]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--continuation", type=int, default=64)
    parser.add_argument("--csa2-args", default="", help="more options for the compressed side, one string")
    options = parser.parse_args()
    model = options.model or demo_model()
    size = ["--max-total-tokens", "16384"]
    sides = {
        "uncompressed": ["--attention-backend", "torch_native", *size],
        "csa2": ["--kv-compress", "csa2", "--csa2-arena-size", "188MB", *options.csa2_args.split()],
    }
    rows = []
    with servers(model, sides) as up:
        for prompt in prompts(model, options.prompts, options.tokens):
            tail = continuation(up["uncompressed"], prompt, options.continuation)
            plain, _ = score(up["uncompressed"], prompt, tail)
            packed, cached = score(up["csa2"], prompt, tail)
            differences = [abs(a - b) for a, b in zip(plain, packed, strict=True)]
            rows.append(
                {
                    "mean_abs_logprob_difference": statistics.mean(differences),
                    "max_abs_logprob_difference": max(differences),
                    "mean_logprob_uncompressed": statistics.mean(plain),
                    "mean_logprob_csa2": statistics.mean(packed),
                    "cached_tokens": cached,
                }
            )
            print(rows[-1], flush=True)
        stats = up["csa2"].stats()
    overall = statistics.mean(row["mean_abs_logprob_difference"] for row in rows)
    held = {key: stats[key] for key in ("pages", "compression_ratio", "metadata_fraction")}
    report(options, sides, {"mean_abs_logprob_difference": overall, "prompts": rows, "csa2_cache": held})


if __name__ == "__main__":
    main()
