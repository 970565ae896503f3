"""Moves the cache of a scheduler, and what SGLang keeps of it, to the pretended device, as if a GPU served it."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from other_device import DEVICE, PretendedDevice, on_device

from csa2.cuda_attention import CudaAttention


def move_to_device(scheduler: Any) -> PretendedDevice:
    """The mode in which to run the scheduler: slots, the bytes of pages and queries are on the device, the model is not."""
    backend, allocator = scheduler.tp_worker.model_runner.attn_backend, scheduler.token_to_kv_pool_allocator
    pool, store = backend.pool, backend.store
    rows = on_device(scheduler.req_to_token_pool.req_to_token)
    scheduler.req_to_token_pool.req_to_token = backend.req_to_token = scheduler.csa2_steward.req_to_token = rows
    allocator.free_pages = on_device(allocator.free_pages)
    mode = PretendedDevice()
    with mode:
        store.arena.buffer = on_device(store.arena.buffer)
        store.codec = store.codec.to(DEVICE)
        backend._attention = CudaAttention(store, scheduler.model_config.num_attention_heads)
        pool.write_with(backend._attention.write)
    attend = backend._attend

    def attend_there(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return attend(on_device(q), on_device(k), on_device(v), *rest).cpu()

    backend._attend = attend_there
    return mode
