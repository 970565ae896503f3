"""How many long prompts run at once in a small memory?

    python benchmark/concurrency.py --arena-tokens 2048 --prompts 3 --tokens 1500

Both servers get the memory of `arena-tokens` bf16 tokens and the same prompts at the same moment; the most requests that
ran together and the time until the last one is answered are printed.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import Server, arguments, demo_model, prompts, report, servers
from transformers import AutoConfig

BF16_BYTES = 2


def most_running(server: Server) -> int:
    """Largest number of running requests in the server's log."""
    return max((int(n) for n in re.findall(r"#running-req: (\d+)", server.log.read_text())), default=0)


def burst(server: Server, batch: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Send all prompts at once."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(batch)) as pool:
        answers = list(pool.map(lambda prompt: server.generate(prompt, new_tokens), batch))
    return {
        "seconds": time.perf_counter() - start,
        "most_running": most_running(server),
        "output_tokens": [answer["meta_info"]["completion_tokens"] for answer in answers],
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--arena-tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    model = options.model or demo_model()
    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * BF16_BYTES
    log = ["--decode-log-interval", "1"]
    sides = {
        "sglang torch_native": [
            "--attention-backend",
            "torch_native",
            "--max-total-tokens",
            str(options.arena_tokens),
            *log,
        ],
        "csa2": ["--kv-compress", "csa2", "--csa2-arena-size", str(options.arena_tokens * token_bytes), *log],
    }
    batch = prompts(model, options.prompts, options.tokens)
    results = {}
    with servers(model, sides) as up:
        for name, server in up.items():
            results[name] = burst(server, batch, options.new_tokens)
        stats = up["csa2"].stats()
    results["csa2"]["cache"] = {
        key: stats[key] for key in ("arena_bytes", "pages", "demotions_total", "evicted_tokens_total")
    }
    report(options, sides, results)


if __name__ == "__main__":
    main()
