"""Which eviction policy keeps what is asked for again? Token traces through the real radix cache, allocator and arena.

    python benchmark/eviction.py
    python benchmark/eviction.py --arena-tokens 16384 --seeds 5 --json eviction.json

No model runs: pages are mapped, re-encoded, moved and evicted as in a server, but codes are not computed. All policies get
the same bytes: as much as `--arena-tokens` tokens take in bf16. Prints, for each trace, policy and kind of pages: the share
of prompt tokens that were found in the cache, and the tokens that had to be computed for one request in a hundred, which is
what its first token waits for. Means of the seeds, and the least and the most.
"""

import argparse
import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, quantiles
from types import SimpleNamespace
from typing import Any

import common
import torch
from torch import Tensor
from traces import TRACES, Request

from csa2.capacity import plan_arena
from csa2.codec.channels import default_classes, make_rotation
from csa2.codec.codec import make_codec
from csa2.codec.queries import QuerySamples
from csa2.codec.sealing import Wave
from csa2.facts import Usage
from csa2.formats import PLAIN, FormatLadder, even_heads, make_ladder
from csa2.store import PageStore
from sgl_kernels.page_layout import PageGeometry

PAGE, HOT_TOKENS, WARM_TOKENS = 64, 128, 1024
GEOMETRY = PageGeometry(1, 1, 64, PAGE, torch.bfloat16)
POLICIES: dict[str, dict[str, int] | None] = {
    "csa2": None,
    "lru": None,
    "slru": None,
    "tlru": {"threshold": 1024, "next_prompt_estimate": 256},
}
CHUNK_TOKENS = 512
MAX_CONTEXT = 16384


class NoCodec:
    """Pages of the right size, with nothing in them."""

    def __init__(self, ladder: FormatLadder) -> None:
        self._sizes = ladder.page_bytes

    def seal(self, arena: Tensor, wave: Wave, samples: QuerySamples) -> dict[int, Tensor]:
        """See `Sealer.seal`."""
        counts = torch.bincount(wave.target, minlength=len(self._sizes)).tolist()
        return {i: torch.zeros(n, self._sizes[i], dtype=torch.uint8) for i, n in enumerate(counts) if n}


def make_store(arena_tokens: int, pages: str) -> PageStore:
    """An arena of as many bytes as `arena_tokens` tokens take in bf16, for pages "bf16" or "csa2" (down to 8x)."""
    classes = default_classes(GEOMETRY, merged=True)
    ladder = make_ladder(GEOMETRY, "fp4", "csa2-8x", "fp8", {"csa2-8x": even_heads("csa2-8x", classes, GEOMETRY)})
    ladder = replace(ladder, tail=ladder.warm)
    if pages == "bf16":
        ladder = replace(ladder, layouts=ladder.layouts[:1], warm=PLAIN, tail=PLAIN, shared=PLAIN)
    plan = plan_arena(arena_tokens // PAGE * ladder.page_bytes[PLAIN], ladder.page_bytes, ladder.guard)
    codec = make_codec(GEOMETRY, make_rotation(64, neox=True), classes)
    store = PageStore(ladder, plan, plan.max_pages + 1, codec)
    store.seal_with(NoCodec(ladder))
    return store


class Replay:
    """One cache, and the requests that it serves one after the other."""

    def __init__(self, store: PageStore, policy: str) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sglang_csa2.allocator import Csa2Allocator
        from sglang_csa2.radix import Csa2RadixCache

        self.store = store
        tokens = (store.facts.hits.numel() - 1) * PAGE
        self.allocator = Csa2Allocator(tokens, PAGE, torch.bfloat16, "cpu", SimpleNamespace(store=store), False)
        rows = ReqToTokenPool(size=2, max_context_len=MAX_CONTEXT, device="cpu", enable_memory_saver=False)
        self.cache = Csa2RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                eviction_policy=policy,
                eviction_policy_config=POLICIES[policy],
                tree_components=(ComponentType.FULL,),
            )
        )
        self.allocator.tree_cache = self.cache
        self.allocator.usage = lambda: self.usage
        self.usage = Usage.nobody(store.facts.hits.numel())
        self.hits: list[int] = []
        """Tokens of each prompt that were found in the cache."""
        self.misses: list[int] = []
        """Tokens of each prompt that had to be computed."""

    def serve(self, request: Request) -> None:
        """Match, prefill, decode, insert: what a server does to its cache for one request."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        prompt, whole = request.prompt, (*request.prompt, *request.answer)
        # The last token of a prompt is always computed.
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt[:-1]))))
        prefix = self.cache.path_device_indices(match.last_device_node)[::PAGE] // PAGE
        lock = self.cache.lock(match.last_device_node)
        self.hits.append(prefix.numel() * PAGE)
        self.misses.append(len(prompt) - prefix.numel() * PAGE)
        self.store.share(prefix)
        pages = prefix
        for start in range(prefix.numel() * PAGE, len(prompt), CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, len(prompt))
            pages = self._grow(pages, start, end)
            self._seal(pages, end, len(prompt), decode=False)
        start = len(prompt)
        while start < len(whole):
            end = min(start // PAGE * PAGE + PAGE, len(whole))
            pages = self._grow(pages, start, end)
            self._seal(pages, end, len(prompt), decode=True)
            start = end
        kept = len(whole) // PAGE
        slots = (pages[:kept, None] * PAGE + torch.arange(PAGE)).flatten()
        self.cache.unlock(lock)
        # The prompt is a node of its own, as in a server.
        known = prefix.numel()
        for count in sorted({len(prompt) // PAGE, kept}):
            key = RadixKey(array("q", whole[: count * PAGE]))
            self.cache.insert(InsertParams(key=key, value=slots[: count * PAGE], prev_prefix_len=known * PAGE))
            known = count
        if pages.numel() > kept:
            self.allocator.free(pages[kept:] * PAGE)
        self.usage = Usage.nobody(self.store.facts.hits.numel())

    def _grow(self, pages: Tensor, start: int, end: int) -> Tensor:
        """The `pages` of a request and those that its tokens `start` to `end` need besides, with them written."""
        self._use(pages)
        missing = -(-end // PAGE) - pages.numel()
        if missing > 0:
            slots = self.allocator.alloc(missing * PAGE)
            if slots is None:
                raise RuntimeError("the arena is too small for one request")
            pages = torch.cat((pages, slots[::PAGE] // PAGE))
        self.store.clock += 1
        tokens = torch.arange(start, end)
        self.store.record_writes(pages[tokens // PAGE] * PAGE + tokens % PAGE)
        self.store.facts.first[pages[:1]] = True
        self._use(pages)
        self.store.touch(pages, torch.zeros_like(pages), torch.arange(pages.numel()))
        return pages

    def _use(self, pages: Tensor) -> None:
        behind = (pages.numel() - 1 - torch.arange(pages.numel())) * PAGE
        self.usage = Usage.of(pages, behind < HOT_TOKENS, behind < WARM_TOKENS, self.store.facts.hits.numel())

    def _seal(self, pages: Tensor, tokens: int, prompt_tokens: int, *, decode: bool) -> None:
        self.store.facts.prompt[pages[: prompt_tokens // PAGE]] = True
        behind = [pages[: max(0, tokens - window) // PAGE] for window in (HOT_TOKENS, WARM_TOKENS)]
        roomy = self.store.live_bytes(self.usage) <= 0.8 * self.store.arena.plan.arena_bytes
        self.store.seal(*((x[-2:] for x in behind) if decode else behind), roomy=roomy)


def replayed(trace: str, seed: int, arena_tokens: int, pages: str, policy: str) -> Replay:
    """A cache after all requests of a trace."""
    replay = Replay(make_store(arena_tokens, pages), policy)
    for request in TRACES[trace](seed):
        replay.serve(request)
    faults = replay.allocator.verify_byte_accounting()
    if faults:
        raise RuntimeError(f"{trace}, {pages}, {policy}: {faults}")
    return replay


def table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each trace, kind of pages and policy."""
    rows = []
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for trace in options.traces:
        for pages in options.pages:
            for policy in POLICIES:
                replays = [replayed(trace, seed, options.arena_tokens, pages, policy) for seed in seeds]
                rates = [sum(replay.hits) / sum(replay.hits + replay.misses) for replay in replays]
                computed = [quantiles(replay.misses, n=100)[-1] for replay in replays]
                row = {"trace": trace, "pages": pages, "policy": policy, "hit_rate": fmean(rates), "rates": rates}
                rows.append({**row, "p99_computed_tokens": fmean(computed), "p99s": computed})
                spread = f"{100 * min(rates):.1f} to {100 * max(rates):.1f}"
                slowest = f"{fmean(computed):5.0f} ({min(computed):.0f} to {max(computed):.0f})"
                print(f"{trace:14} {pages:5} {policy:5} {100 * fmean(rates):5.1f} % ({spread})  {slowest}", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arena-tokens", type=int, default=8192, help="size of the arena in bf16 tokens (default: 8192)")
    parser.add_argument("--seeds", type=int, default=3, help="traces of each kind (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first of them (default: 0)")
    parser.add_argument("--pages", nargs="+", choices=("bf16", "csa2"), default=("bf16", "csa2"))
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--json", type=Path, help="write results to this file")
    options = parser.parse_args(arguments)
    _publish()
    settings = {
        "arena_tokens": options.arena_tokens,
        "seeds": options.seeds,
        "first_seed": options.first_seed,
        "policies": POLICIES,
        "page_tokens": PAGE,
    }
    print(json.dumps({"environment": common.environment(), "settings": settings}))
    rows = table(options)
    if options.json:
        record = {"environment": common.environment(), "settings": settings, "results": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


def _publish() -> None:
    """SGLang's pieces read its published arguments."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")


if __name__ == "__main__":
    main()
