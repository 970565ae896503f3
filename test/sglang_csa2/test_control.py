"""Control messages, with SGLang's own communicator, dispatcher and codec around a fake scheduler."""

import asyncio
import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers import io_struct, tokenizer_control_mixin
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.utils import TypeBasedDispatcher
from stats_samples import cache_stats

from csa2.errors import OptionError
from csa2.stats import CacheStats
from sglang_csa2 import control
from sglang_csa2.control import Csa2ControlReq, Csa2ControlReqOutput, OperationError, ReplyTimeoutError


def make_stats(**changes: Any) -> CacheStats:
    fields: dict[str, Any] = {
        "used_bytes": 1024,
        "slab_bytes": 2048,
        "pages": {"bf16": 3, "fp8": 0, "fp4": 44},
        "logical_tokens": 3008,
        "compression_ratio": 3.05,
        "metadata_fraction": 0.1,
        "demotions_total": {"bf16->fp8": 0, "bf16->fp4": 44},
        "prefix_hit_tokens_total": 12,
        "prompt_tokens_total": 100,
        "turns_total": 3,
        "prefix_hit_tokens_by_format": {"bf16": 12, "fp8": 0, "fp4": 0},
        "options": {"ratio": "1", "arena_size": None},
    }
    return cache_stats(**{**fields, **changes})


@pytest.fixture
def stats_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType("sglang_csa2.stats")
    module.read_stats = lambda scheduler: make_stats()
    monkeypatch.setitem(sys.modules, "sglang_csa2.stats", module)
    return module


class FakeScheduler:
    """Answers through a real dispatcher; replies pass the real codec, and wait while `silent`."""

    def __init__(self, dp_rank: int = 0) -> None:
        self.name = ""
        self._request_dispatcher = TypeBasedDispatcher([(int, str)])
        self.received: list[Csa2ControlReq] = []
        self.silent = False
        self.pending: list[bytes] = []
        control.attach(self, dp_rank)

    def connect(self, communicator: Any = None, **server_args: Any) -> SimpleNamespace:
        """A tokenizer manager whose communicator talks to this scheduler, or is the one given."""
        self.communicator = communicator or FanOutCommunicator(self.receive, fan_out=1)
        return SimpleNamespace(
            server_args=SimpleNamespace(**{"kv_compress": "csa2", **server_args}),
            auto_create_handle_loop=lambda: None,
            csa2_control_communicator=self.communicator,
        )

    def receive(self, req: Csa2ControlReq) -> None:
        decoded = io_struct.msgpack_decode(io_struct.msgpack_encode(req))
        self.received.append(decoded)
        self.pending.append(io_struct.msgpack_encode(self._request_dispatcher(decoded)))
        if not self.silent:
            asyncio.get_running_loop().call_soon(self.reply)

    def reply(self) -> None:
        self.communicator.handle_recv(io_struct.msgpack_decode(self.pending.pop(0)))


@pytest.fixture
def scheduler(stats_module: ModuleType) -> FakeScheduler:
    return FakeScheduler()


def test_stats_arrive_as_builtins(scheduler: FakeScheduler) -> None:
    reply = asyncio.run(control.call(scheduler.connect(), "stats"))
    assert (reply.ok, reply.status) == (True, 200)
    assert reply.data == msgspec.to_builtins(make_stats())


def test_attach_keeps_sglang_entries(scheduler: FakeScheduler) -> None:
    assert scheduler._request_dispatcher(7) == "7"


def test_concurrent_calls_all_get_their_reply(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(control.OPERATIONS, "echo", lambda _, payload: payload)
    tokenizer_manager = scheduler.connect()

    async def main() -> list[Csa2ControlReqOutput]:
        return await asyncio.gather(*(control.call(tokenizer_manager, "echo", {"n": n}) for n in range(20)))

    assert [reply.data for reply in asyncio.run(main())] == [{"n": n} for n in range(20)]


def test_replies_of_replicas_come_in_their_order_whoever_is_first(
    stats_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(control.OPERATIONS, "who", lambda scheduler, _: {"name": scheduler.name})
    schedulers = [FakeScheduler(dp_rank=rank) for rank in (0, 1)]
    for scheduler, name in zip(schedulers, "ab", strict=True):
        scheduler.name = name

    def send(req: Csa2ControlReq) -> None:
        for scheduler in reversed(schedulers):
            scheduler.receive(req)

    communicator = FanOutCommunicator(send, fan_out=2)
    tokenizer_manager = schedulers[0].connect(communicator)
    schedulers[1].communicator = communicator
    reply = asyncio.run(control.call(tokenizer_manager, "who"))
    assert reply.data == {"replicas": [{"dp_rank": 0, "name": "a"}, {"dp_rank": 1, "name": "b"}]}


def test_unknown_operation_is_refused(scheduler: FakeScheduler) -> None:
    reply = asyncio.run(control.call(scheduler.connect(), "explode"))
    assert (reply.ok, reply.status) == (False, 400)
    assert "explode" in reply.data["message"]
    assert "stats" in reply.data["message"]


def test_refusal_keeps_its_status(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(scheduler: Any, payload: dict[str, Any]) -> None:
        raise OperationError("no document 'a'", 404)

    monkeypatch.setitem(control.OPERATIONS, "refuse", refuse)
    reply = control.handle(scheduler, Csa2ControlReq(op="refuse"))
    assert (reply.ok, reply.status, reply.data) == (False, 404, {"message": "no document 'a'"})


def test_failing_operation_is_logged_and_does_not_raise(
    scheduler: FakeScheduler, stats_module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(scheduler: Any) -> None:
        raise ZeroDivisionError("division by zero")

    stats_module.read_stats = fail
    reply = control.handle(scheduler, Csa2ControlReq(op="stats"))
    assert (reply.ok, reply.status, reply.data) == (False, 500, {"message": "division by zero"})
    assert "Traceback" in caplog.text


def test_value_that_cannot_be_sent_is_an_error_reply(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(control.OPERATIONS, "bad", lambda scheduler, payload: {"x": object()})
    assert control.handle(scheduler, Csa2ControlReq(op="bad")).status == 500


def test_silent_scheduler_times_out_and_late_replies_are_not_mixed_up(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(control.OPERATIONS, "echo", lambda scheduler, payload: payload)
    tokenizer_manager = scheduler.connect()

    async def main() -> Csa2ControlReqOutput:
        scheduler.silent = True
        for n in (1, 2):  # the first is sent and given up, the second withdrawn in the queue
            with pytest.raises(ReplyTimeoutError, match=r"'echo' within 0\.05 s"):
                await control.call(tokenizer_manager, "echo", {"n": n}, timeout_s=0.05)
        gc.collect()
        third = asyncio.ensure_future(control.call(tokenizer_manager, "echo", {"n": 3}, timeout_s=5))
        await asyncio.sleep(0)
        scheduler.silent = False
        scheduler.reply()  # the late one, of the first
        return await third

    assert asyncio.run(main()).data == {"n": 3}
    assert [req.payload["n"] for req in scheduler.received] == [1, 3]


def test_call_without_csa2_sends_nothing(scheduler: FakeScheduler) -> None:
    tokenizer_manager = scheduler.connect(kv_compress=None)
    with pytest.raises(OptionError, match="--kv-compress csa2"):
        asyncio.run(control.call(tokenizer_manager, "stats"))
    assert scheduler.received == []


def test_install_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = list(tokenizer_control_mixin._COMMUNICATOR_SPECS)
    monkeypatch.setattr(tokenizer_control_mixin, "_COMMUNICATOR_SPECS", specs)
    control.install()
    control.install()
    assert specs.count(("csa2_control", Csa2ControlReqOutput)) == 1


def test_engine_stats(scheduler: FakeScheduler, stats_module: Any) -> None:
    loop = asyncio.new_event_loop()
    engine = SimpleNamespace(loop=loop, tokenizer_manager=scheduler.connect())
    try:
        assert control.engine_stats(engine)["pages"] == {"bf16": 3, "fp8": 0, "fp4": 44}
        del stats_module.read_stats
        with pytest.raises(OperationError) as caught:
            control.engine_stats(engine)
        assert caught.value.status == 500
    finally:
        loop.close()
