"""What fits: tokens and requests in the memory that a model leaves, for each format."""

import math

import msgspec
import torch

from csa2.capacity import ArenaPlan, plan_arena
from csa2.codec.assembly import format_ladder
from csa2.errors import OptionError
from csa2.formats import PLAIN, FormatLadder
from csa2.options import PAGE_SIZE, RATIOS, CacheOptions
from csa2.plan.model_memory import ModelMemory, PlanError
from sgl_kernels.page_layout import PageGeometry

CHUNK_TOKENS = 2048
"""Tokens of a forward pass whose activations are reserved; --chunked-prefill-size of the recommended flags."""
RUNTIME_BYTES = 512 * 2**20
"""Reserved for the runtime itself: libraries, buffers of the server."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for."""

    memory_bytes: int
    """Of one device."""
    context: int
    """Tokens of a request, answer included."""
    concurrency: int
    ranks: int = 1
    weights_bytes: int
    """Of all ranks together."""
    reserve_bytes: int | None = None
    """Besides weights and cache, of one device; None: estimated."""


class FormatFit(msgspec.Struct, frozen=True, kw_only=True):
    """What fits of one format."""

    name: str
    flags: str
    """How to ask for it."""
    bytes_per_token: float
    """Of one rank, for tokens of old pages."""
    tokens: int
    """That fit when all pages that can be have the format, which is what the server reports as its capacity."""
    requests: int
    """Of the context asked for that fit at once, windows and first pages counted at their own format."""
    planned: bool = False
    """Whether the server refuses the model still."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one rank."""

    model: ModelMemory
    workload: Workload
    bf16_bytes_per_token: int
    """Uncompressed, in the dtype of the model, all ranks together."""
    request_bytes: int
    """Of one request, uncompressed, all ranks together."""
    weights_bytes: int
    """Of one rank."""
    reserve_bytes: int
    kv_bytes: int
    """What is left for the cache, of one rank."""
    formats: list[FormatFit]

    @property
    def chosen(self) -> FormatFit | None:
        """The first, which is the least compressed one, that takes what is asked for."""
        return next((fit for fit in self.formats if fit.requests >= self.workload.concurrency), None)


def make_plan(model: ModelMemory, workload: Workload) -> Plan:
    """What fits.

    Raises:
        PlanError: nothing, or heads that ranks cannot share.
    """
    ranks = workload.ranks
    if model.num_query_heads % ranks or (not model.latent_channels and model.num_kv_heads % ranks):
        raise PlanError(
            f"--tp {ranks} cannot split {model.num_query_heads} query and {model.num_kv_heads} KV heads: give a number that "
            f"divides both"
        )
    weights = workload.weights_bytes // ranks
    estimated = activation_bytes(model, workload)
    reserve = estimated if workload.reserve_bytes is None else workload.reserve_bytes
    left = workload.memory_bytes - weights - reserve
    if left <= 0:
        raise PlanError(
            f"--memory {workload.memory_bytes} bytes do not take the weights ({weights} bytes a rank) and {reserve} bytes "
            f"for activations: give more, or more ranks (--tp)"
        )
    return Plan(
        model=model,
        workload=workload,
        bf16_bytes_per_token=model.token_bytes,
        request_bytes=model.sequence_bytes(workload.context),
        weights_bytes=weights,
        reserve_bytes=reserve,
        kv_bytes=left,
        formats=[*_uncompressed(model, workload, left), *_compressed(model, workload, left)],
    )


def activation_bytes(model: ModelMemory, workload: Workload) -> int:
    """Estimate of what a forward pass takes besides weights and cache, of one rank: activations of a chunk of a prompt in
    the widest layer, logits of the running requests in fp32, and the runtime."""
    heads = (model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
    width = 4 * model.hidden_size + (2 * model.intermediate_size + heads) // workload.ranks
    return CHUNK_TOKENS * width * model.item_bytes + 2 * workload.concurrency * model.vocab_size * 4 + RUNTIME_BYTES


def server_ladder(model: ModelMemory, ranks: int, options: CacheOptions) -> FormatLadder:
    """The formats of one rank of a server with `options`, without a calibration."""
    geometry = PageGeometry(
        num_layers=model.num_layers,
        num_kv_heads=max(1, model.num_kv_heads // ranks),
        head_dim=model.head_dim,
        page_size=PAGE_SIZE,
        dtype=getattr(torch, model.dtype),
    )
    return format_ladder(options, geometry, model.rotation, None)


def _uncompressed(model: ModelMemory, workload: Workload, kv_bytes: int) -> list[FormatFit]:
    """SGLang itself: the dtype of the model, and FP8."""
    fits = []
    shared = 1 if model.latent_channels else workload.ranks
    rows = (("bf16", "(SGLang alone)", 1.0), ("fp8", "--kv-cache-dtype fp8_e4m3 (SGLang alone)", 1 / model.item_bytes))
    for name, flags, share in rows:
        token = model.token_bytes * share / shared
        pages = math.ceil(workload.context / PAGE_SIZE) * PAGE_SIZE
        request = model.sequence_bytes(pages) * share / shared
        tokens = int(kv_bytes / token) if not model.window_layers else int(kv_bytes / request) * workload.context
        requests = int(kv_bytes / request)
        fits.append(FormatFit(name=name, flags=flags, bytes_per_token=token, tokens=tokens, requests=requests))
    return fits


def _compressed(model: ModelMemory, workload: Workload, kv_bytes: int) -> list[FormatFit]:
    fits = []
    for ratio in RATIOS:
        if ratio == "auto":
            continue
        options = CacheOptions(ratio=ratio)  # type: ignore[arg-type]
        ladder = server_ladder(model, workload.ranks, options)
        try:
            arena = plan_arena(kv_bytes, ladder.page_bytes, ladder.guard)
        except OptionError:
            arena = None
        fits.append(
            FormatFit(
                name=ladder.names[-1],
                flags=f"--kv-compress csa2 --csa2-ratio {ratio}",
                bytes_per_token=ladder.page_bytes[-1] / PAGE_SIZE,
                tokens=arena.max_pages * PAGE_SIZE if arena else 0,
                requests=requests_that_fit(arena, ladder, options, workload.context) if arena else 0,
                planned=model.unserved is not None,
            )
        )
    return fits


def requests_that_fit(arena: ArenaPlan, ladder: FormatLadder, options: CacheOptions, context: int) -> int:
    """Requests of `context` tokens whose pages fit together, each in the format of its place."""
    pages = math.ceil(context / PAGE_SIZE)
    counts = [0] * len(ladder.layouts)
    for page in range(pages):
        behind = context - (page + 1) * PAGE_SIZE
        if behind < options.hot_tokens:
            index = PLAIN
        elif page < math.ceil(options.protect_tokens / PAGE_SIZE):
            index = ladder.guard
        else:
            index = ladder.warm if behind < options.warm_tokens else ladder.tail
        counts[index] += 1
    low, high = 0, arena.max_pages // pages
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if arena.fits([middle * count for count in counts]) else (low, middle - 1)
    return low
