"""Keys and values of one layer of one sequence as pages, and attention over them: what calibration and `csa2 check` compute
beside the engines. Axes as in docs/notation.md; T tokens, N pages of S tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.codec.codec import PageCodec
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageLayout


@dataclass(frozen=True)
class SampleSplit:
    """Which tokens of a sample are compressed, pages 1 to `last_page` (exclusive), and which ask."""

    context: int
    """Tokens before those that ask."""
    last_page: int


def rows(keys: Tensor, values: Tensor, start: int, stop: int) -> Entries:
    """Tokens `start` to `stop` of keys and values (G, T, D), uncompressed: (1, G, stop - start, D) fp32."""
    return Entries(keys[None, :, start:stop].float(), values[None, :, start:stop].float(), None)


def pages(keys: Tensor, values: Tensor, first: int, last: int, size: int) -> Entries:
    """Pages `first` to `last` of keys and values (G, T, D), uncompressed: (N, G, S, D) fp32, with their positions."""

    def cut(x: Tensor) -> Tensor:
        part = x[:, first * size : last * size].float()
        return part.reshape(x.shape[0], last - first, size, x.shape[2]).transpose(0, 1).contiguous()

    positions = torch.arange(first * size, last * size, device=keys.device).view(-1, 1, size)
    return Entries(cut(keys), cut(values), None, positions.expand(-1, keys.shape[0], -1))


def sequence(of_pages: Entries) -> Entries:
    """Pages (N, G, E, D) side by side as one sequence (1, G, N x E, D)."""

    def flat(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2)[None]

    bias = None if of_pages.bias is None else flat(of_pages.bias)
    return Entries(flat(of_pages.keys), flat(of_pages.values), bias)


def stored(codec: PageCodec, layout: PageLayout, plain: Entries, sample: Tensor) -> Entries:
    """The sequence that comes back of uncompressed pages `plain` (N, G, S, D) from one coded format.

    Args:
        sample: (1, G, M, D) queries that all pages were read by.
    """
    queries = sample.expand(plain.keys.shape[0], -1, -1, -1)
    return sequence(codec.open(codec.seal(plain, layout, queries), layout))


def joined(parts: Sequence[Entries]) -> Entries:
    """Sequences (1, G, E, D) one after another."""
    bias = [part.keys.new_zeros(part.keys.shape[:3]) if part.bias is None else part.bias for part in parts]
    keys, values = torch.cat([part.keys for part in parts], 2), torch.cat([part.values for part in parts], 2)
    return Entries(keys, values, torch.cat(bias, 2))


def attend(query: Tensor, entries: Entries) -> Tensor:
    """Attention (H, T, D) of scaled queries to entries (1, G, E, D) whose last T are their own tokens, seen causally."""
    heads, t, d = query.shape
    g = entries.keys.shape[1]
    logits = query.reshape(g, heads // g, t, d) @ entries.keys[0].unsqueeze(1).transpose(-1, -2)
    if entries.bias is not None:
        logits = logits + entries.bias[0][:, None, None, :]
    hidden = torch.ones(t, t, dtype=torch.bool, device=query.device).triu(1)
    logits[..., -t:] = logits[..., -t:].masked_fill(hidden, float("-inf"))
    output: Tensor = logits.softmax(-1) @ entries.values[0].unsqueeze(1)
    return output.flatten(0, 1)
