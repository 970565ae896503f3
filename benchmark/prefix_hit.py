"""How long does a cached prompt take to its first token? Compressed pages against SGLang's own CPU backend.

    python benchmark/prefix_hit.py --tokens 3008 --question 16 --rounds 5

Both servers hold a document of `tokens` tokens (whole pages, so that both find all of it) and are asked, in alternation, a
question of `question` new tokens about it; one token is generated.
"""

import time

from common import Server, arguments, demo_model, prompts, report, servers, summary


def first_token_s(server: Server, input_ids: list[int]) -> tuple[float, int]:
    """Wall time of a one-token request and how many of its tokens were cached."""
    start = time.perf_counter()
    answer = server.generate(input_ids, 1)
    return time.perf_counter() - start, answer["meta_info"]["cached_tokens"]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=3008)
    parser.add_argument("--question", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = options.model or demo_model()
    sides = {
        "sglang torch_native": ["--attention-backend", "torch_native", "--max-total-tokens", "16384"],
        "csa2": ["--kv-compress", "csa2", "--csa2-arena-size", "188MB"],
    }
    document = prompts(model, 1, options.tokens)[0]
    questions = prompts(model, options.rounds, options.tokens + options.question)
    with servers(model, sides) as up:
        miss = {name: first_token_s(server, document)[0] for name, server in up.items()}
        hit: dict[str, list[float]] = {name: [] for name in up}
        cached = {}
        for question in questions:
            for name, server in up.items():
                seconds, cached[name] = first_token_s(server, document + question[-options.question :])
                hit[name].append(seconds)
    stock, ours = summary(hit["sglang torch_native"]), summary(hit["csa2"])
    report(
        options,
        sides,
        {
            "first_token_s": {"hit": {"sglang torch_native": stock, "csa2": ours}, "miss": miss},
            "cached_tokens": cached,
            "hit_speedup": stock["median"] / ours["median"],
        },
    )


if __name__ == "__main__":
    main()
