"""Real schedulers of SGLang for tests, without a server around each.

A server or an engine imports SGLang three times before it answers. Here one process imports it once and forks for every
run: the child resolves the arguments, publishes them, builds `Scheduler` with everything below it, and turns SGLang's
own loop until the requests are done. Only the sockets stay silent, and the next tokens are those of the request instead
of the sampled ones, so that runs of different caches see the same tokens.

`SchedulerForks` is the side of the tests. Run as a program, this file is the process that forks.
"""

import gc
import importlib
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jobs import Job, Request, Run
from torch import Tensor

from csa2.options import PAGE_SIZE

CHUNK_TOKENS = 128
PRELOADED = (
    "cache_rewriter",
    "sglang.srt.dllm.algorithm",
    *(f"sglang_csa2.{name}" for name in ("allocator", "attention", "control", "memory", "model", "pool", "radix", "stats")),
)


class SchedulerForks:
    """The process that forks. Start once; it ends with the tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "schedulers.log"
        self._count = 0
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "0", "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )

    def run(self, job: Job) -> Run:
        """Fork, serve, and return what was recorded; RuntimeError with the end of the log if the child failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        output = self._folder / f"run{self._count}.pt"
        with suppress(BrokenPipeError):
            print(json.dumps({"job": asdict(job), "output": str(output)}), file=self._process.stdin, flush=True)
        if self._process.stdout.readline().strip() != "0":
            raise RuntimeError(f"the run of {job.model} failed; its log ends:\n{self._log.read_text()[-4000:]}")
        return Run(**torch.load(output))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _main() -> None:
    """Import once, then serve jobs from the input, one fork each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints
    from sglang.srt.plugins import load_plugins

    # As in a scheduler process: the plugin sees that the scheduler is loaded and hooks it.
    importlib.import_module("sglang.srt.managers.scheduler")
    load_plugins()
    # What every fork would import again, and ours, so that all forks run the same code whatever happens to the files.
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("sglang.srt.models.registry").ModelRegistry.get_supported_archs()
    gc.freeze()  # a fork collects before it sizes its pool; it need not walk through all of this
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=replies, flush=True)


def _child(message: dict[str, Any]) -> None:
    code = 1
    try:
        start = time.perf_counter()
        job = Job.from_json(message["job"])
        run = _Server(job).serve()
        torch.save(asdict(run), message["output"])
        print(f"{Path(job.model).name} {job.dtype} {job.csa2}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        code = 0
    except BaseException:  # noqa: BLE001 - reported by the exit code and the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # neither pytest's nor SGLang's exit handlers belong to this copy


class _Server:
    """A scheduler and its loop."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.run = Run()
        _collect_log(self.run.log)
        if job.csa2 is not None and job.identity_layers is not None:
            import sglang_csa2.model

            sglang_csa2.model.identity_layers = lambda *_: job.identity_layers
        from cache_rewriter import CacheRewriter

        self.scheduler = _make_scheduler(job)
        # Here, because the scheduler hands the next tokens on to the next batch before it returns them.
        self._forward = self.scheduler.model_worker.forward_batch_generation
        self.scheduler.model_worker.forward_batch_generation = self._forced_forward
        self.forced = {request.rid: request.forced for group in job.groups for request in group}
        self.logits: dict[str, list[Tensor]] = {rid: [] for rid in self.forced}
        self.rewriter = (
            None if job.replay is None else CacheRewriter(self.scheduler, job.identity_layers or (), job.replay_rope)
        )

    def serve(self) -> Run:
        """All groups, one after the other."""
        for group in self.job.groups:
            for request in group:
                self.scheduler.handle_generate_request(_generate_request(request))
            with torch.no_grad():
                while self._step():
                    pass
        for rid, logits in self.logits.items():
            assert len(logits) == len(self.forced[rid]), f"{rid}: {len(logits)} of {len(self.forced[rid])} tokens"
            self.run.logprobs[rid] = torch.log_softmax(torch.stack(logits), -1)
        # SGLang's idle check: free, cached and pinned tokens add up, and our own accounting with them.
        self.scheduler.on_idle()
        if self.job.csa2 is not None:
            import msgspec

            from sglang_csa2.stats import read_stats

            self.run.stats = msgspec.to_builtins(read_stats(self.scheduler))
        return self.run

    def _step(self) -> bool:
        """One turn of `Scheduler.event_loop_normal`."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = scheduler.cur_batch_for_debug = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            self._after(batch)
        scheduler.last_batch = batch
        return bool(batch)

    def _forced_forward(self, batch: Any, **kwargs: Any) -> Any:
        """Record the logits of a batch and replace what was sampled from them."""
        result = self._forward(batch, **kwargs)
        extend = batch.forward_mode.is_extend()
        self.run.batches.append([(r.rid, r.extend_len if extend else 1) for r in batch.reqs])
        for row, req in enumerate(batch.reqs):
            if extend and req.extend_batch_idx == 1:
                self.run.prefix_tokens[req.rid] = int(batch.prefix_lens[row])
            if req.inflight_middle_chunks > 0:
                continue  # the prompt goes on
            self.logits[req.rid].append(result.logits_output.next_token_logits[row].float().clone())
            result.next_token_ids[row] = self.forced[req.rid][len(req.output_ids)]
        return result

    def _after(self, batch: Any) -> None:
        pages = {req.rid: pages for req, pages in _pages(self.scheduler, batch)}
        if self.job.csa2 is not None:
            store = self.scheduler.token_to_kv_pool_allocator.get_kvcache().store
            names = store.ladder.names
            self.run.formats.append({rid: [names[f] for f in store.arena.formats[p].tolist()] for rid, p in pages.items()})
        if self.rewriter is not None:
            assert self.job.replay is not None
            step = len(self.run.batches) - 1
            for rid, formats in self.job.replay[step].items():
                self.rewriter.rewrite(pages[rid], formats)
            self.rewriter.forget_freed(self.scheduler)


def _pages(scheduler: Any, batch: Any) -> Iterator[tuple[Any, Tensor]]:
    """Requests of `batch` that go on, with their pages."""
    for req in batch.reqs:
        if not req.finished() and req.kv is not None and req.kv.req_pool_idx is not None:
            row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            yield req, row[: req.kv.kv_committed_len : PAGE_SIZE].long() // PAGE_SIZE


def _make_scheduler(job: Job) -> Any:
    from unittest import mock

    from sglang.srt import server_args as upstream
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish

    from sglang_csa2 import plugin

    argv = ["--model-path", job.model, "--dtype", job.dtype, "--device", "cpu", "--skip-tokenizer-init"]
    argv += ["--disable-overlap-schedule", "--chunked-prefill-size", str(CHUNK_TOKENS), "--random-seed", "0"]
    argv += ["--max-running-requests", "8", "--max-total-tokens", "8192", "--log-level", "warning"]
    if job.csa2 is None:
        argv += ["--page-size", str(PAGE_SIZE), "--attention-backend", "torch_native"]
    else:
        argv += ["--kv-compress", "csa2", "--csa2-arena-size", "128MiB"]
        argv += [
            word
            for name, value in {"ratio": "1", **job.csa2}.items()
            for word in (f"--csa2-{name.replace('_', '-')}", str(value))
        ]
    record = upstream.prepare_server_args(argv)
    with mock.patch.object(plugin, "wire_launcher"):  # HTTP routes: there is no launcher here
        record.resolve_once()
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return Scheduler(record, upstream.PortArgs.init_new(record))


def _generate_request(request: Request) -> Any:
    from sglang_csa2.own_requests import tokenized_request

    return tokenized_request(request.rid, request.prompt, max_new_tokens=len(request.forced), ignore_eos=True)


def _collect_log(lines: list[str]) -> None:
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sglang_csa2")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # codec_bounds
    _main()
