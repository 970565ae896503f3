"""Ranks of tensor parallelism agree: on sizes when the cache is built, and on its page table while it runs.

Every rank holds other heads of the same pages. What becomes of a page follows from facts that all ranks know alike, so no
messages are needed for it, as long as a page costs the same bytes everywhere. Budgets of heads and key biases would break
that: they differ by head. So the ranks exchange sizes once, before the arena is cut.

With SGLANG_ENABLE_RANK_CONSENSUS_CHECKER=1, SGLang's own switch for such tests, they compare their page tables after every
batch.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, distributed

from csa2.errors import IntegrityError
from csa2.formats import FormatLadder
from csa2.store import PageStore


@dataclass(frozen=True)
class RankSizes:
    """What one rank would build."""

    names: tuple[str, ...]
    page_bytes: tuple[int, ...]
    merges: bool
    """Whether pages of its smallest format are merged."""
    arena_bytes: int


def all_identity_layers(own: tuple[int, ...]) -> tuple[int, ...]:
    """Layers whose keys keep the identity basis on some rank; all ranks give it to them."""
    return tuple(sorted({layer for layers in gathered(own) for layer in layers}))


def agreed_sizes(ladder: FormatLadder, arena_bytes: int) -> tuple[FormatLadder, int]:
    """The ladder with pages as large as on the rank where they are largest, and the bytes that every rank has for them.

    Raises:
        IntegrityError: the ranks have different formats.
    """
    sizes = RankSizes(ladder.names, ladder.page_bytes, ladder.guard != ladder.end, arena_bytes)
    return largest(ladder, gathered(sizes))


def largest(ladder: FormatLadder, ranks: Iterable[RankSizes]) -> tuple[FormatLadder, int]:
    """See `agreed_sizes`; `ranks` are the sizes of all of them, this one among them."""
    ranks = list(ranks)
    if any(rank.names != ladder.names for rank in ranks):
        raise IntegrityError(f"csa2: ranks have different page formats: {sorted({rank.names for rank in ranks})}")
    page_bytes = [max(sizes) for sizes in zip(*(rank.page_bytes for rank in ranks), strict=True)]
    layouts = tuple(
        layout if layout.page_bytes == size else replace(layout, min_page_bytes=size)
        for layout, size in zip(ladder.layouts, page_bytes, strict=True)
    )
    merges = any(rank.merges for rank in ranks)
    return replace(ladder, layouts=layouts, merges=merges), min(rank.arena_bytes for rank in ranks)


def checks_ranks() -> bool:
    """Whether this server compares the page tables of its ranks after every batch."""
    from sglang.srt.environ import envs

    return _group().world_size > 1 and bool(envs.SGLANG_ENABLE_RANK_CONSENSUS_CHECKER.get())


def check_page_tables(store: PageStore) -> None:
    """Compare this rank's page table with that of the others. All ranks must call it at the same time.

    Raises:
        IntegrityError: they differ, and in what.
    """
    digests = gathered(digests_of(store))
    differing = [name for name in digests[0] if len({digest[name] for digest in digests}) > 1]
    if differing:
        raise IntegrityError(
            f"csa2: the ranks disagree on {', '.join(differing)} after forward pass {store.clock}: a decision depended on "
            f"something that only one of them knows. Report it with the output of `csa2 info`"
        )


def digests_of(store: PageStore) -> dict[str, str]:
    """A digest of each part of the page table and of the facts of its pages."""
    arena = store.arena
    tables = {"formats": arena.formats, "offsets": arena.offsets, "slots": arena.slot_page, "slabs": arena.slab_format}
    known = {field.name: getattr(store.facts, field.name) for field in fields(store.facts)}
    parts = {**tables, **{name: value for name, value in known.items() if isinstance(value, Tensor)}}
    digests = {name: hashlib.blake2b(value.contiguous().numpy().tobytes()).hexdigest() for name, value in parts.items()}
    return {**digests, "clock": str(store.clock)}


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, in their order."""
    group = _group()
    if group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _group() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group
