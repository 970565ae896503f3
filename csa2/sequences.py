"""A batch of sequences that grow together in a page store: what a server does for its requests, without a server."""

from typing import Any

import torch
from torch import Tensor

from csa2.attention import Attention
from csa2.codec.queries import DECODE_INTERVAL
from csa2.errors import ArenaFullError, IntegrityError
from csa2.facts import Usage
from csa2.formats import PLAIN
from csa2.options import CacheOptions
from csa2.store import PageStore
from csa2.tail_ratio import TailRatio
from csa2.units import format_bytes
from sgl_kernels.paged_attention.reference import plain_rows


class Sequences:
    """Sequences of equal length. A forward pass is `begin`, then `write` and `attend` for every layer, then `end`."""

    def __init__(self, store: PageStore, attention: Attention, options: CacheOptions, batch_size: int) -> None:
        self.store = store
        self.batch_size = batch_size
        self.length = 0
        """Tokens of each sequence, those of the forward pass under way included."""
        self._attention = attention
        self._windows = (options.hot_tokens, options.warm_tokens)
        self._ratio = TailRatio(store, options, self.usage)
        self._pages = torch.empty(batch_size, 0, dtype=torch.int64)
        self._free = list(range(store.facts.hits.numel() - 1, 0, -1))
        self._readers = store.samples.readers(torch.arange(batch_size), ["0"] * batch_size)
        self._new = 0
        self._rows = torch.empty(0, dtype=torch.int64)
        self._plan: Any = None

    def usage(self) -> Usage:
        """All pages are read; the newest lie in the windows."""
        column = torch.arange(self._pages.shape[1]).expand_as(self._pages).flatten()
        hot, warm = (column >= max(0, self.length - window) // self.store.page_size for window in self._windows)
        return Usage.of(self._pages.flatten(), hot, warm, self.store.facts.hits.numel())

    def begin(self, new: int) -> None:
        """Announce `new` tokens of every sequence.

        Raises:
            ArenaFullError: they do not fit, even with all other pages as small as they get.
            IntegrityError: the forward pass before did not end.
        """
        if self._new:
            raise IntegrityError("csa2: a forward pass did not reach its last layer: call reset() and start again")
        store, size = self.store, self.store.page_size
        self._map(-(-(self.length + new) // size) - self._pages.shape[1], new)
        tokens = torch.arange(self.length, self.length + new)
        self.length += new
        self._new = new
        store.clock += 1
        slots = (self._pages[:, tokens // size] * size + tokens % size).flatten()
        store.record_writes(slots, tokens.repeat(self.batch_size))
        rows = plain_rows(store.arena.offsets[slots // size], slots % size, store.ladder.layouts[PLAIN])
        self._rows = rows.to(store.arena.buffer.device)
        depth = torch.arange(self._pages.shape[1]).expand_as(self._pages)
        store.touch(self._pages.flatten(), self._readers[:, None].expand_as(depth).flatten(), depth.flatten())
        store.facts.first[self._pages[:, : store.protected_pages]] = True
        lengths = torch.full((self.batch_size,), self.length)
        self._plan = self._attention.plan(self._pages, lengths, torch.full_like(lengths, new))

    def write(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """Store `keys` and `values` (B x new, G, D) of one layer, sequence after sequence."""
        store = self.store
        self._attention.write(store.arena.buffer, self._rows, store.ladder.layouts[PLAIN], layer, keys, values)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, layer: int, scale: float) -> Tensor:
        """(B x new, H, D): attention of the new tokens, from `query` (B x new, H, D) and what `write` was given."""
        samples, new = self.store.samples, self._new
        for row, reader in enumerate(self._readers.tolist()):
            if new > 1:
                samples.record_extend(reader, layer, query[row * new : (row + 1) * new], scale)
            elif self.length % DECODE_INTERVAL == 0:
                samples.record_decode(reader, layer, query[row], scale, self.length)
        return self._attention.attend(query, keys, values, self._plan, layer, scale)

    def end(self) -> None:
        """Compress what left the windows."""
        behind = [max(0, self.length - window) // self.store.page_size for window in self._windows]
        hot, warm = (self._pages[:, :columns].flatten() for columns in behind)
        self.store.facts.prompt[hot] = True
        self.store.seal(hot, warm)
        self._ratio.after_tokens(self._new * self.batch_size)
        self._new = 0

    def clear(self) -> None:
        """Forget everything."""
        self.store.clear()
        self._pages = self._pages[:, :0]
        self._free = list(range(self.store.facts.hits.numel() - 1, 0, -1))
        self.length = self._new = 0

    def _map(self, columns: int, new: int) -> None:
        """Give every sequence `columns` pages more."""
        count = self.batch_size * max(0, columns)
        if count == 0:
            return
        if count > len(self._free) or not self.store.make_room(count, self.usage):
            arena = format_bytes(self.store.arena.plan.arena_bytes)
            raise ArenaFullError(
                f"{new} tokens more of {self.batch_size} sequences of {self.length} do not fit into an arena of {arena}, "
                f"where they are written uncompressed first: give a larger one, or fewer tokens at once"
            )
        pages = torch.tensor([self._free.pop() for _ in range(count)])
        self.store.map_pages(pages)
        self._pages = torch.cat((self._pages, pages.view(self.batch_size, columns)), dim=1)
