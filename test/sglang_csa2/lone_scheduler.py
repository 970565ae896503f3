"""Program: a real scheduler of SGLang, its own loop and its strict checks, requests on cue, no sockets.

Takes jobs of `scheduler_runs` as lines of JSON and forks for each. The argument is the folder with the model's
configuration; its weights are random.
"""

import json
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from typing import Any

from scheduler_runs import PAGE, Ask, Command, Ending, Result

STUCK_TURNS = 300
"""Turns of the loop without a forward pass or an ending after which waiting requests count as stuck."""
QUIET_TURNS = 20
"""Turns after the last ending, for the idle checks of the scheduler."""
WRONG_PAGE = 0.8
"""Relative error of an entry above which it is not the one asked for. E2M1 stays below 0.2, two bits near 0.35 and what came
down three rungs of two bits near 0.35 times the root of 3; a stranger is near 1.4, the nearest of the strangers in a page
near 1."""


class _Done(Exception):  # noqa: N818 - leaves SGLang's loop
    pass


class _Run:
    """One scheduler and its requests."""

    def __init__(self, model: str, job: dict[str, Any]) -> None:
        self.result = Result()
        self.waiting = [Ask(**ask) for ask in job["asks"]]
        self.asks = {ask.rid: ask for ask in self.waiting}
        self.in_flight: int = job["in_flight"]
        self.commands = [Command(**command) for command in job["commands"]]
        self.encoding: dict[str, str] = {}
        """Commands that wait for a document: name -> id."""
        self.sent: list[str] = []
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.answers = self.result.answers
        self.due_since: int | None = None
        """Turn at which the next command became due."""
        self.aborted: set[str] = set()
        self.turn = self.changed = 0
        self.seen: Any = None
        if job["window"] is not None:
            from csa2 import agreement

            agreement.WINDOW_SAMPLES = job["window"]
        self.scheduler = _make_scheduler(model, job["options"])
        self.result.max_prompt_tokens = self.scheduler.max_req_input_len
        self.allocator = self.scheduler.token_to_kv_pool_allocator
        self.is_stock = "kv_compress" not in job["options"]
        self.check = (lambda batch: None) if self.is_stock else _PageCheck(self.scheduler, self.result)
        if job["attention"] is not None:
            _let_attention_decide(self.scheduler, job["attention"])
        self.device: AbstractContextManager[Any] = nullcontext()
        if job["on_device"]:
            from moved_cache import move_to_device

            self.device = move_to_device(self.scheduler)
        self.graph: Any = None
        if job["captured"]:
            from captured_decode import CapturedDecode

            self.graph = CapturedDecode(self.scheduler)
        self._connect()

    def serve(self) -> Result:
        with suppress(_Done), self.device:
            self.scheduler.run_event_loop()
        self.result.replays = 0 if self.graph is None else self.graph.replays
        if not self.result.stuck and not self.is_stock:
            self._look_at_idle()
        return self.result

    def _connect(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler, retract, run_batch = self.scheduler, ScheduleBatch.retract_decode, self.scheduler.run_batch

        def counted(batch: Any) -> Any:
            answer = retract(batch)
            self.result.retracted += len(answer[0])
            return answer

        def checked(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.result.most_running = max(self.result.most_running, len(batch.reqs))
            self.check(batch)
            return run_batch(batch, *args, **kwargs)

        ScheduleBatch.retract_decode = counted
        scheduler.run_batch = checked
        type(scheduler.request_receiver).recv_requests = lambda _self, local_reqs=None: self._receive()
        type(scheduler.ipc_channels.send_to_tokenizer).send_output = lambda _self, out, _recv=None: self._take(out)

    def _receive(self) -> list[Any]:
        """What comes in at this turn of the loop."""
        self.turn += 1
        out = [rid for rid in self.sent if rid not in self.result.endings]
        self._command()
        progress = (self.scheduler.forward_ct, len(self.result.endings), len(self.sent), len(self.result.replies))
        if progress != self.seen:
            self.seen, self.changed = progress, self.turn
        if out and self.turn - self.changed > STUCK_TURNS:
            self.result.stuck = out
            raise _Done
        if self.encoding and self.turn - self.changed > STUCK_TURNS:
            self.result.stuck = list(self.encoding)
            raise _Done
        waits = self.waiting or self.commands or self.encoding
        if not out and not waits and self.turn - self.changed > QUIET_TURNS and self.scheduler.is_fully_idle():
            raise _Done
        arriving = self._aborts(out)
        while self.waiting and len(out) < self.in_flight and self._is_due(self.waiting[0]):
            ask = self.waiting.pop(0)
            self.sent.append(ask.rid)
            out.append(ask.rid)
            self.prompts[ask.rid] = (*self._said_before(ask), *ask.prompt)
            arriving.append(_request(ask, self.prompts[ask.rid]))
        return arriving

    def _said_before(self, ask: Ask) -> tuple[int, ...]:
        before = ask.continues
        return () if before is None else (*self.prompts[before], *self.answers[before])

    def _is_due(self, ask: Ask | Command) -> bool:
        if isinstance(ask, Ask) and ask.continues is not None and ask.continues not in self.result.endings:
            return False
        if ask.after is None:
            return True
        name, tokens = ask.after
        return name in self.result.endings or name in self.result.replies or 0 < tokens <= self._tokens_of(name)

    def _command(self) -> None:
        """The next command that is due, and what came of documents."""
        for name, document_id in list(self.encoding.items()):
            status, data = self._control("document", {"document_id": document_id})
            if data.get("state") != "waiting":
                self.result.replies[name] = (status, data)
                del self.encoding[name]
        if not self.commands or not self._is_due(self.commands[0]):
            return
        self.due_since = self.turn if self.due_since is None else self.due_since
        if self.turn - self.due_since < self.commands[0].turns:
            return
        if self.commands[0].op in ("flush", "new weights") and not self.scheduler.is_fully_idle():
            return
        command, self.due_since = self.commands.pop(0), None
        if command.op == "corrupt":
            self.check = lambda batch: None
            reply: Any = (200, _corrupt(self.allocator.store.arena))
        elif command.op in ("flush", "flush now"):
            reply = (200, self.scheduler.flush_cache())
        elif command.op == "abort all":
            from sglang.srt.managers.io_struct import AbortReq

            reply = (200, self.scheduler.abort_request(AbortReq(rid="", abort_all=True)))
        elif command.op == "new weights":
            from types import SimpleNamespace

            asked = SimpleNamespace(flush_cache=True, torch_empty_cache=False)
            reply = (200, self.scheduler.weight_updater.flush_cache_after_weight_update(asked, True, "done"))
        else:
            reply = self._control(command.op, command.payload)
        if command.op == "document_add" and reply[0] == 200:
            self.encoding[command.name] = command.payload["document_id"]
        else:
            self.result.replies[command.name] = reply

    def _control(self, op: str, payload: dict[str, Any]) -> tuple[int, Any]:
        from sglang_csa2.control import Csa2ControlReq, handle

        reply = handle(self.scheduler, Csa2ControlReq(op=op, payload=payload))
        return reply.status, reply.data

    def _aborts(self, out: list[str]) -> list[Any]:
        from sglang.srt.managers.io_struct import AbortReq

        due = [
            rid
            for rid in out
            if rid not in self.aborted
            and (limit := self.asks[rid].abort_after) is not None
            and self._tokens_of(rid) >= limit
        ]
        self.aborted.update(due)
        return [AbortReq(rid=rid) for rid in due]

    def _tokens_of(self, rid: str) -> int:
        running = {req.rid: req for req in self.scheduler.running_batch.reqs}
        return len(running[rid].output_ids) if rid in running else 0

    def _take(self, out: Any) -> None:
        if type(out).__name__ == "BatchTokenIDOutput":
            for i, rid in enumerate(out.rids):
                self.answers.setdefault(rid, []).extend(out.output_ids[i])
                if out.finished_reasons[i] is not None:
                    self._end(rid, out.finished_reasons[i], out.completion_tokens[i], out.cached_tokens[i])
        elif type(out).__name__ == "AbortReq":
            self._end(out.rid, {"type": "abort", **(out.finished_reason or {})}, 0, 0)

    def _end(self, rid: str, reason: dict[str, Any], tokens: int, cached: int) -> None:
        assert rid not in self.result.endings, f"{rid} ended twice"
        status = reason.get("status_code")
        self.result.endings[rid] = Ending(
            reason["type"], None if status is None else int(status), reason.get("message") or "", tokens, cached
        )

    def _look_at_idle(self) -> None:
        """Nothing is lost: what is mapped is in the tree, and a flush frees all of it."""
        import msgspec

        from sglang_csa2.stats import read_stats

        store, tree = self.allocator.store, self.scheduler.tree_cache
        faults = self.allocator.verify_byte_accounting()
        assert not faults, faults
        self.result.stats = msgspec.to_builtins(read_stats(self.scheduler))
        self.result.tree_tokens = tree.evictable_size()
        self.result.hits, self.result.mapped_total = int(store.facts.hits.sum()), store.mapped_total
        pinned = store.pinned.total
        assert (tree.protected_size(), store.open_pages) == (pinned * PAGE, 0)
        assert store.mapped_pages * PAGE == self.result.tree_tokens + pinned * PAGE
        if pinned:
            assert self.scheduler.flush_cache()
            assert (store.mapped_pages, tree.evictable_size()) == (pinned, 0)
            status, _ = self._control("documents_remove", {})
            assert (status, store.pinned.total, tree.protected_size()) == (200, 0, 0)
        assert self.scheduler.flush_cache()
        assert store.mapped_pages == 0


class _PageCheck:
    """Compares the pages of one request a batch with the keys and values of its tokens, which in one layer depend on
    token and position alone."""

    def __init__(self, scheduler: Any, result: Result) -> None:
        import torch

        self.scheduler, self.result = scheduler, result
        model = scheduler.tp_worker.model_runner.model.model
        self.embed, self.norm, self.attn = model.embed_tokens, model.layers[0].input_layernorm, model.layers[0].self_attn
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.norm.weight.fill_(1)
            for weight, scale in ((self.attn.qkv_proj.weight, 0.125), (self.embed.weight, 1.0)):
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def __call__(self, batch: Any) -> None:
        import torch

        from sglang_csa2.pool import host_pages

        pick = self.result.checked % max(1, len(batch.reqs))
        req = batch.reqs[pick]
        tokens = [*req.origin_input_ids, *req.output_ids]
        before = batch.prefix_lens[pick] if batch.forward_mode.is_extend() else int(batch.seq_lens_cpu[pick]) - 1
        length = min(before, len(tokens))
        self.result.checked += 1
        if length == 0:
            return
        store = self.scheduler.token_to_kv_pool_allocator.store
        row = host_pages(self.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length:PAGE], PAGE)
        assert row.unique().numel() == row.numel(), f"{req.rid} has a page twice: {row}"
        with torch.no_grad():
            hidden = self.norm(self.embed(torch.tensor(tokens[:length])))
            query, keys, values = self.attn.qkv_proj(hidden)[0].chunk(3, -1)
            _, keys = self.attn.rotary_emb(torch.arange(length), query, keys)
        whole = torch.nn.functional.pad(torch.cat((keys, values), 1).float(), (0, 0, 0, -length % PAGE))
        wanted = whole.view(-1, PAGE, 2, 64).movedim(2, 0)
        for index in torch.unique(formats := store.arena.formats[row]).tolist():
            chosen = formats == index
            error = self._error(store, row[chosen], wanted[:, chosen], length - PAGE * torch.nonzero(chosen).squeeze(-1))
            assert float(error.max()) < WRONG_PAGE, (
                f"{req.rid} reads another entry in {row[chosen][error.argmax()]} of {row}, in {store.ladder.names[index]}: "
                f"{error}"
            )

    @staticmethod
    def _error(store: Any, pages: Any, wanted: Any, tokens: Any) -> Any:
        """(n,) largest relative error of what `pages`, all of one format, hold of `wanted` (2, n, PAGE, D) keys and values,
        of which the first `tokens` (n,) of each page count."""
        import torch

        layout = store.ladder.layouts[int(store.arena.formats[pages[0]])]
        entries = store.read(pages)
        got = torch.stack((entries.keys[:, 0], entries.values[:, 0])).cpu()
        if not layout.is_plain and layout.heads[0].basis == "reduced":
            # The other channels hold the mean of the page.
            columns = store.codec.bases.reduced[layout.first_basis, :, : layout.heads[0].key_channels].cpu()
            got[0], wanted = got[0] @ columns @ columns.T, torch.stack((wanted[0] @ columns @ columns.T, wanted[1]))
        if layout.is_merged:
            # The keys are those of some of the tokens; values are means.
            return (torch.cdist(got[0], wanted[0]) / wanted[0].norm(dim=-1)[:, None]).amin(-1).amax(-1)
        error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-9)
        return error.amax(0).masked_fill(torch.arange(PAGE) >= tokens[:, None], 0).amax(-1)


def _let_attention_decide(scheduler: Any, scale: float) -> None:
    """Give the output of attention a weight beside the token itself, so that predictions depend on what pages hold."""
    import torch

    weight = scheduler.tp_worker.model_runner.model.model.layers[0].self_attn.o_proj.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * scale)


def _corrupt(arena: Any) -> int:
    """Give the compressed pages of each format the bytes of one another; how many."""
    import torch

    count = 0
    for index in range(1, len(arena.counts)):
        pages = torch.nonzero(arena.formats == index).squeeze(-1)
        if pages.numel() > 1:
            arena.write_pages(index, pages, arena.read_pages(index, pages).roll(pages.numel() // 2, 0).clone())
            count += pages.numel()
    return count


def _make_scheduler(model: str, options: dict[str, Any]) -> Any:
    from unittest import mock

    from sglang.srt import server_args
    from sglang.srt.managers.scheduler import Scheduler, configure_logger
    from sglang.srt.runtime_context import SpawnRanks, publish

    from sglang_csa2 import plugin

    record = server_args.ServerArgs(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        mem_fraction_static=0.5,
        random_seed=1,
        log_level="warning",
        _radix_eviction_policy_explicitly_set="radix_eviction_policy" in options,
        **options,
    )
    with mock.patch.object(plugin, "wire_launcher"):  # HTTP routes: there is no launcher here
        record.resolve_once()
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    configure_logger(record)
    return Scheduler(record, server_args.PortArgs.init_new(record))


def _request(ask: Ask, prompt: tuple[int, ...]) -> Any:
    from sglang_csa2.own_requests import tokenized_request

    sampling = {name: getattr(ask, name) for name in ("max_new_tokens", "ignore_eos", "custom_params")}
    return tokenized_request(ask.rid, prompt, ask.extra_key, **sampling)


def _main(model: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints
    import sglang.srt.managers.scheduler  # noqa: F401 - before the plugin, which then hooks it
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ModelRegistry.get_supported_archs()  # imports all models: seconds that every fork would spend again
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(asdict(_Run(model, _with_environment(json.loads(line))).serve())), file=replies, flush=True)
            except BaseException as error:  # noqa: BLE001 - reported to the test
                traceback.print_exc()
                print(json.dumps(repr(error)), file=replies, flush=True)
            os._exit(0)  # neither pytest's nor SGLang's exit handlers belong to this copy
        os.waitpid(child, 0)


def _with_environment(job: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(job["env"])
    return job


if __name__ == "__main__":
    _main(sys.argv[1])
