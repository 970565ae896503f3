"""Program: one rank of a real scheduler of SGLang, its own loop and its strict checks, requests on cue, no sockets.

Every rank gets the same requests at the same turn of its loop, as SGLang's broadcast would have it, and says at the end
what it holds. Arguments: the folder of the model, then the job as JSON.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

QUIET_TURNS = 20
"""Turns without work after which the run is over, for the idle checks of the scheduler."""


class _Done(Exception):  # noqa: N818 - leaves SGLang's loop
    pass


class _Rank:
    def __init__(self, model: str, job: dict[str, Any]) -> None:
        self.waiting = [(int(turn), list(prompt), int(length)) for turn, prompt, length in job["asks"]]
        self.texts: dict[str, list[int]] = {}
        self.formats: set[str] = set()
        self.turn = self.quiet = self.batches = 0
        self.scheduler = _make_scheduler(model, job)
        self.store = self.scheduler.token_to_kv_pool_allocator.get_kvcache().store
        run_batch = self.scheduler.run_batch

        def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.batches += 1
            counts = zip(self.store.ladder.names, self.store.arena.counts, strict=True)
            self.formats |= {name for name, count in counts if count}
            return run_batch(batch, *args, **kwargs)

        self.scheduler.run_batch = counted
        type(self.scheduler.request_receiver).recv_requests = lambda _self, local_reqs=None: self._receive()
        type(self.scheduler.ipc_channels.send_to_tokenizer).send_output = lambda _self, out, _recv=None: self._take(out)

    def serve(self) -> dict[str, Any]:
        from sglang_csa2 import ranks

        with suppress(_Done):
            self.scheduler.run_event_loop()
        faults = self.scheduler.token_to_kv_pool_allocator.verify_byte_accounting()
        guard = self.scheduler.csa2_steward.guard
        return {
            "texts": self.texts,
            "formats": sorted(self.formats),
            "batches": self.batches,
            "digests": ranks.digests_of(self.store),
            "page_bytes": self.store.arena.plan.page_bytes,
            "arena_bytes": self.store.arena.plan.arena_bytes,
            "heads": self.store.ladder.geometry.num_kv_heads,
            "demotions": sum(self.store.demotions_total.values()),
            "evicted": self.scheduler.tree_cache.evicted_tokens_total,
            "checked": self.scheduler.csa2_steward.checks_ranks,
            "guard": [guard.window.compared_total, guard.window.agreed_total, guard.skipped_total],
            "faults": faults,
        }

    def _receive(self) -> list[Any]:
        self.turn += 1
        self.quiet = self.quiet + 1 if self.scheduler.is_fully_idle() and not self.waiting else 0
        if self.quiet > QUIET_TURNS:
            raise _Done
        due = [ask for ask in self.waiting if ask[0] <= self.turn]
        self.waiting = [ask for ask in self.waiting if ask[0] > self.turn]
        from sglang_csa2.own_requests import tokenized_request

        return [
            tokenized_request(f"{turn}-{i}", prompt, max_new_tokens=length, ignore_eos=True)
            for i, (turn, prompt, length) in enumerate(due)
        ]

    def _take(self, out: Any) -> None:
        if type(out).__name__ == "BatchTokenIDOutput":
            for rid, tokens in zip(out.rids, out.decode_ids, strict=True):
                self.texts.setdefault(rid, []).extend(tokens)


def _make_scheduler(model: str, job: dict[str, Any]) -> Any:
    from sglang.srt import server_args
    from sglang.srt.managers.scheduler import Scheduler, configure_logger
    from sglang.srt.runtime_context import SpawnRanks, publish

    from sglang_csa2 import plugin

    record = server_args.ServerArgs(
        model_path=model,
        skip_tokenizer_init=True,
        device="cpu",
        kv_compress="csa2",
        mem_fraction_static=0.5,
        random_seed=1,
        log_level="warning",
        **job["options"],
    )
    with mock.patch.object(plugin, "wire_launcher"):  # HTTP routes: there is no launcher here
        record.resolve_once()
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=job["rank"], gpu_id=job["rank"]))
    configure_logger(record)
    return Scheduler(record, server_args.PortArgs.init_new(record))


def _main(model: str, job: dict[str, Any]) -> None:
    import sglang.srt.managers.scheduler  # noqa: F401 - before the plugin, which then hooks it
    from sglang.srt.plugins import load_plugins

    load_plugins()
    Path(job["output"]).write_text(json.dumps(_Rank(model, job).serve()))
    os._exit(0)  # the other rank may wait in an exit handler for this one


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
