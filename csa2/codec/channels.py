"""Key channels that the reduced formats keep.

A choice of rotary pairs does not depend on positions, so it can be made once per model. Slow pairs carry most of what
queries look for; without calibration they come first. Channels that do not rotate are slower than any pair.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.formats import HeadClasses
from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_layout import KeyClass, PageGeometry

BLOCK = 8
"""Channels that one Hadamard block mixes."""
FINE, COARSE = "int4", "lloyd2"
"""Codes of the most important channels and of the next ones."""
FINE_SHARE, COARSE_SHARE, MERGED_COARSE_SHARE = 12 / 32, 12 / 32, 8 / 32
"""Part of the channels in each of the two classes, 12 + 12 of 32 rotary pairs; the other 8 live on in the page mean. In
merged pages the means weigh more against fewer entries, which 12 + 8 pairs make up for."""


@dataclass(frozen=True)
class Rotation:
    """Which channels of a head rotate together."""

    pairs: tuple[tuple[int, int], ...]
    """Rotary pairs from the fastest to the slowest."""

    @property
    def is_none(self) -> bool:
        """Whether no channel rotates: positions are not in the keys, and no prior says which channels matter."""
        return not self.pairs

    def keeps_pairs(self, order: list[int]) -> bool:
        """Whether the two channels of every rotary pair are neighbours in `order`, at an even place and the one after."""
        partner = dict(zip(order[0::2], order[1::2], strict=True))
        return all(partner.get(a) == b or partner.get(b) == a for a, b in self.pairs)

    def prior_order(self, head_dim: int) -> list[int]:
        """All channels, the slowest first."""
        rotating = {channel for pair in self.pairs for channel in pair}
        order = [channel for channel in range(head_dim) if channel not in rotating]
        return order + [channel for pair in reversed(self.pairs) for channel in pair]


def make_rotation(rotary_dim: int, *, neox: bool) -> Rotation:
    """Rotation of the first `rotary_dim` channels: pair j is (j, j + rotary_dim / 2) if `neox`, else (2 j, 2 j + 1)."""
    half = rotary_dim // 2
    return Rotation(tuple((j, j + half) if neox else (2 * j, 2 * j + 1) for j in range(half)))


def default_classes(geometry: PageGeometry, *, merged: bool, all_alike: bool = False) -> HeadClasses:
    """Key classes of every head, the same for all.

    Args:
        merged: for the formats that merge tokens.
        all_alike: nothing is known that makes one channel more important than another.
    """
    if all_alike:
        # Any channel may matter: all of them at two bits, which takes no more bytes.
        classes: tuple[KeyClass, ...] = (KeyClass(COARSE, geometry.head_dim),)
    else:
        fine, coarse = (_blocks(geometry, s) for s in (FINE_SHARE, MERGED_COARSE_SHARE if merged else COARSE_SHARE))
        classes = (KeyClass(FINE, fine), KeyClass(COARSE, coarse))
    marked = set(geometry.identity_layers)
    heads = range(geometry.num_kv_heads)
    return tuple(() if layer in marked else classes for layer in range(geometry.num_layers) for _ in heads)


def _blocks(geometry: PageGeometry, share: float) -> int:
    """Channels of a class: whole blocks, at least one."""
    return max(BLOCK, round(geometry.head_dim * share / BLOCK) * BLOCK)


def reduced_bases(classes: HeadClasses, orders: list[list[int]], head_dim: int) -> Tensor:
    """(L x G, D, C) fp32: columns that select channels in order and mix them in Hadamard blocks inside each class. A class
    of all channels is mixed as a whole.

    Args:
        orders: for each head all its channels, the most important first; the two of a rotary pair together.
    """
    width = max((sum(c.channels for c in of_head) for of_head in classes), default=0)
    bases = torch.zeros(len(classes), head_dim, width)
    for head, (of_head, order) in enumerate(zip(classes, orders, strict=True)):
        if len(of_head) == 1 and of_head[0].channels == head_dim:
            bases[head][:, :head_dim] = orthonormal_basis(head_dim)
            continue
        start = 0
        for key_class in of_head:
            stop = start + key_class.channels
            # Every block gets important and less important pairs, so that one scale suits all blocks of the class.
            blocks = -(-key_class.channels // BLOCK)
            pairs = [order[c : c + 2] for c in range(start, stop, 2)]
            first = start
            for block in range(blocks):
                channels = [channel for pair in pairs[block::blocks] for channel in pair]
                bases[head][channels, first : first + len(channels)] = orthonormal_basis(len(channels))
                first += len(channels)
            start = stop
    return bases
