"""Sizing: how many virtual tokens SGLang may hand out, and which pool and allocator it builds.

UPSTREAM(sglang 0.5.23): hooks of `KVCacheConfigurator.config_from_budget`, `SRTPlatform.get_kv_pool_cls`,
`SRTPlatform.get_paged_allocator_cls` and `models.utils.enable_fused_set_kv_buffer`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from csa2.capacity import ArenaPlan, plan_arena
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.codec import PageCodec
from csa2.errors import IntegrityError, OptionError
from csa2.formats import MODEL_DTYPES, FormatLadder
from csa2.units import format_bytes
from sgl_kernels.page_layout import PageGeometry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolPlan:
    """What the pool is built from; made when SGLang sizes the cache, taken when it builds the pool."""

    ladder: FormatLadder
    arena: ArenaPlan
    codec: PageCodec


_planned: PoolPlan | None = None


def planned_pool() -> PoolPlan:
    """The plan of this process's pool.

    Raises:
        IntegrityError: SGLang builds the pool without having asked for its size.
    """
    if _planned is None:
        raise IntegrityError("csa2: the KV pool is built before its size was planned; the budget hook did not run")
    return _planned


def around_config_from_budget(
    orig: Callable[..., Any], self: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Size the cache in bytes: the arena takes the budget, and the token count is what it holds at its smallest."""
    from sglang_csa2.args import enabled_here, options_here

    if not enabled_here():
        return orig(self, budget_bytes, cap_tokens=cap_tokens)
    from sglang.srt.runtime_context import get_schedule

    from sglang_csa2.calibration import head_calibration
    from sglang_csa2.model import identity_layers, rotation_of
    from sglang_csa2.ranks import agreed_sizes, all_identity_layers
    from sglang_csa2.rope import separable_rope

    check_cache_dtype(self.kv_cache_dtype)
    options = options_here()
    layers = self.layer_info
    page_size = get_schedule().page_size
    marked = identity_layers(self.model, layers.start_layer, layers.num_effective_layers, page_size)
    geometry = _geometry(self, all_identity_layers(marked))
    rotation = rotation_of(self.model, geometry.head_dim)
    known = head_calibration(options, geometry, layers.start_layer, rotation)
    rope = separable_rope(options, self.model, rotation)
    codec, ladder = codec_and_ladder(options, geometry, rotation, known, rope)
    ladder, arena_bytes = agreed_sizes(ladder, _arena_bytes(options.arena_bytes, budget_bytes, _sharers(self)))
    plan = plan_arena(arena_bytes, ladder.page_bytes, ladder.guard)
    global _planned
    _planned = PoolPlan(ladder, plan, codec)
    tokens = plan.max_pages * geometry.page_size
    if cap_tokens is not None:
        tokens = min(tokens, cap_tokens)
    # A budget that yields at least `tokens` at SGLang's own bf16 price; the cap makes it exact. Rounding up by a page
    # keeps the division inside from losing one.
    price = ladder.page_bytes[0] // geometry.page_size
    return orig(self, (tokens + geometry.page_size) * price, cap_tokens=tokens)


def check_cache_dtype(dtype: torch.dtype) -> None:
    """Refuse a checkpoint that asks for a quantised cache, which SGLang follows unless an option says otherwise.

    Raises:
        OptionError: with the option that decides.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in MODEL_DTYPES:
        raise OptionError(
            f"--kv-compress csa2 compresses the entries that the model writes, but this checkpoint asks for a KV cache of "
            f"{name}: give --kv-cache-dtype bfloat16"
        )


def around_get_kv_pool_cls(orig: Callable[..., Any], self: Any, *, kind: str) -> Any:
    """Our pool for plain multi-head caches."""
    from sglang_csa2.args import enabled_here

    if enabled_here() and kind == "mha":
        from sglang_csa2.pool import Csa2KVPool

        return Csa2KVPool
    return orig(self, kind=kind)


def around_get_paged_allocator_cls(orig: Callable[..., Any], self: Any) -> Any:
    """Our allocator for paged pools."""
    from sglang_csa2.args import enabled_here

    if enabled_here():
        from sglang_csa2.allocator import Csa2Allocator

        return Csa2Allocator
    return orig(self)


def around_enable_fused_set_kv_buffer(orig: Callable[..., Any], forward_batch: Any) -> Any:
    """No fused write: it would store by virtual slot into a buffer that is addressed through the page table."""
    from sglang_csa2.args import enabled_here

    return False if enabled_here() else orig(forward_batch)


def _geometry(configurator: Any, identity: tuple[int, ...]) -> PageGeometry:
    from sglang.srt.runtime_context import get_parallel, get_schedule

    model_config = configurator.model_config
    parallel = get_parallel()
    return PageGeometry(
        num_layers=configurator.layer_info.num_effective_layers,
        num_kv_heads=model_config.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size),
        head_dim=model_config.head_dim,
        page_size=get_schedule().page_size,
        dtype=configurator.kv_cache_dtype,
        identity_layers=identity,
    )


def _sharers(configurator: Any) -> int:
    """Processes of this server that SGLang gives the same memory: on a CPU all of a NUMA node."""
    if configurator.device != "cpu":
        return 1
    from sglang.srt.runtime_context import get_parallel

    from sglang_csa2.splitting import ranks_of_a_node

    parallel = get_parallel()
    return ranks_of_a_node(parallel.tp_size * parallel.num_dp_ranks)


def _arena_bytes(asked: int | None, budget: int, sharers: int) -> int:
    share = budget // sharers
    if asked is None:
        return share
    if asked > share:
        among = f", a share of {format_bytes(share)} for each of {sharers} processes" if sharers > 1 else ""
        raise OptionError(
            f"--csa2-arena-size of {asked} bytes ({format_bytes(asked)}) does not fit: {format_bytes(budget)} are left for "
            f"the KV cache after the weights{among}. Give a smaller size, or raise --mem-fraction-static"
        )
    return asked
