"""Budgets of heads: how many bytes each KV head gets in a format, so that a page costs the same and loses least.

Heads differ by orders of magnitude in what compressing them costs. In SmolLM2-135M ten of 90 make most
of the loss, whatever the choice (the calibration that ships has the losses): heads that look up single tokens far back and
copy what followed. Giving those most of the bytes, and the others very few, is worth more than any other step of
the codec.

What a head loses is measured by calibration for each choice of a menu (`csa2/calibrate/sensitivity.py`). Minimising the sum
of losses under a sum of bytes separates by head for each price of a byte (Everett 1963, "Generalized Lagrange multiplier
method"); the price is found by bisection.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from csa2.codec.channels import BLOCK, COARSE, FINE
from sgl_kernels.page_layout import HeadLayout, KeyClass, PageGeometry

PRICE_STEPS = 60
"""Bisections of the price: more than the 53 bits of a double."""


class HeadBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One choice for a head."""

    merge: int
    """Tokens to an entry."""
    keys: tuple[tuple[str, int], ...]
    """Kind of code and number of channels of each class, the most important channels first; what is left out is left to the
    page mean."""
    values: str
    """Kind of code of values."""

    def is_whole(self, head_dim: int) -> bool:
        """Whether every token and every channel of a head of `head_dim` channels is kept, in one class."""
        return self.merge == 1 and [channels for _, channels in self.keys] == [head_dim]

    def layout(self, geometry: PageGeometry) -> HeadLayout:
        """The piece of a page."""
        classes = tuple(KeyClass(kind, channels) for kind, channels in self.keys)
        entries = geometry.page_size // self.merge
        return HeadLayout("reduced", entries, geometry.head_dim, classes, self.values, merged=self.merge > 1)


def menu(head_dim: int) -> tuple[HeadBudget, ...]:
    """The choices for heads of `head_dim` channels, the costly ones first."""

    def of(merge: int, fine: float, coarse: float, values: str) -> HeadBudget:
        shares = ((FINE, fine / 32), (COARSE, coarse / 32))
        keys = [(kind, max(BLOCK, round(head_dim * share / BLOCK) * BLOCK)) for kind, share in shares if share]
        return HeadBudget(merge, tuple(keys), values)

    def whole(merge: int, keys: str, values: str) -> HeadBudget:
        return HeadBudget(merge, ((keys, head_dim),), values)

    choices = [whole(1, keys, values) for keys, values in (("e4m3", "e4m3"), ("e4m3", FINE), (FINE, "e4m3"))]
    choices += [whole(1, keys, values) for keys, values in (("e4m3", COARSE), (FINE, FINE), (FINE, COARSE))]
    choices += [of(1, fine, coarse, COARSE) for fine, coarse in ((12, 12), (8, 8), (0, 16))]
    for merge in (2, 4):
        choices += [whole(merge, FINE, FINE), whole(merge, FINE, COARSE)]
        choices += [of(merge, fine, coarse, COARSE) for fine, coarse in ((12, 8), (8, 8), (4, 4), (0, 16), (0, 8))]
    return tuple(dict.fromkeys(choices))


class HeadLosses(msgspec.Struct, frozen=True):
    """What each choice costs each head of one rank."""

    menu: tuple[HeadBudget, ...]
    losses: Tensor
    """(M, L x G) fp32 >= 0: increase of the divergence, nat per token."""

    def heads(self, even: Sequence[HeadLayout], geometry: PageGeometry) -> tuple[HeadLayout, ...]:
        """Pieces that together are no larger than those of `even`, where all heads get the same. Those with the flat basis
        keep it, and with it all channels and tokens; those with a scale per channel are left as they are."""
        heads = list(even)
        for basis in ("flat", "reduced"):
            free = [index for index, head in enumerate(even) if head.basis == basis and not head.channel_scales]
            if not free:
                continue
            rows = [row for row, choice in enumerate(self.menu) if basis == "reduced" or choice.is_whole(geometry.head_dim)]
            layouts = [self.menu[row].layout(geometry) for row in rows]
            if basis == "flat":
                layouts = [_flat(layout, even[free[0]].value_kind) for layout in layouts]
            sizes = torch.tensor([layout.piece_bytes for layout in layouts])
            chosen = cheapest(self.losses[rows][:, free], sizes, sum(even[index].piece_bytes for index in free))
            for index, row in zip(free, chosen, strict=True):
                heads[index] = layouts[row]
        return tuple(heads)


def _flat(head: HeadLayout, four_bit: str) -> HeadLayout:
    """The piece of a choice with all channels in the flat basis, which is the reduced basis of all channels; `four_bit` in
    place of the code it was measured with, which errs by about as much."""
    kinds = [four_bit if kind == FINE else kind for kind in (head.key_classes[0].kind, head.value_kind)]
    return replace(head, basis="flat", key_classes=(KeyClass(kinds[0], head.head_dim),), value_kind=kinds[1])


def cheapest(losses: Tensor, sizes: Tensor, budget: int) -> list[int]:
    """Row of the choice of each head with the least sum of losses whose bytes do not exceed `budget`.

    Args:
        losses: (M, heads).
        sizes: (M,) bytes of each choice.

    Raises:
        ValueError: not even the smallest choices fit.
    """
    if float(sizes.min()) * losses.shape[1] > budget:
        raise ValueError(f"{losses.shape[1]} heads of at least {int(sizes.min())} bytes do not fit in {budget}")
    losses, sizes = losses.double(), sizes.double()

    def at(price: float) -> Tensor:
        return (losses + price * sizes[:, None]).argmin(0)

    low, high = 0.0, float(losses.max() / sizes.min()) + torch.finfo(torch.float64).tiny
    while float(sizes[at(high)].sum()) > budget:
        high *= 2
    for _ in range(PRICE_STEPS):
        price = (low + high) / 2
        low, high = (price, high) if float(sizes[at(price)].sum()) > budget else (low, price)
    return [int(row) for row in at(high)]
