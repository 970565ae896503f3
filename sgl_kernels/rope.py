"""Rotary position embedding in torch: keys turned to their positions, and back.

Channel pair j of a key at position p turns by the angle p f_j (Su et al. 2021, "RoFormer"). Angles are computed in fp64 and
kept as a table of fp32 cosines and sines, so position 100000 is as exact as position 1.
"""

import torch
from torch import Tensor

TABLE_ROWS = 4096
"""Least positions in the table; it doubles when a position lies beyond it."""


class Rope:
    """Which channels rotate together, and how fast.

    Args:
        pairs: (first, second) channel of each rotary pair; other channels do not rotate.
        frequencies: (pairs,) radians per token.
    """

    def __init__(self, pairs: tuple[tuple[int, int], ...], frequencies: Tensor) -> None:
        self.pairs = pairs
        self.frequencies = frequencies.double()
        places = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(frequencies.device)
        self._first, self._second = places.unbind(-1)
        self._table = self._rows(0, 0)

    def to(self, device: torch.device | str) -> "Rope":
        """This rotation on `device`."""
        return Rope(self.pairs, self.frequencies.to(device))

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """(..., E, D) fp32: `keys` (..., E, D) turned to `positions` (..., E), int64, not negative."""
        cos, sin = self.cos_sin(positions)
        return self._turned(keys, cos, sin)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `rotate`."""
        cos, sin = self.cos_sin(positions)
        return self._turned(keys, cos, -sin)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(..., pairs) fp32 cosine and sine of each pair's angle at `positions` (...)."""
        needed = int(positions.max()) + 1 if positions.numel() else 0
        rows = self._table.shape[1]
        if needed > rows:
            more = self._rows(rows, max(TABLE_ROWS, 2 * rows, needed))
            self._table = torch.cat((self._table, more), 1)
        cos, sin = self._table[:, positions]
        return cos, sin

    def _rows(self, start: int, stop: int) -> Tensor:
        """(2, rows, pairs) fp32 cosines and sines of positions start..stop - 1."""
        positions = torch.arange(start, stop, dtype=torch.float64, device=self.frequencies.device)
        angles = positions[:, None] * self.frequencies
        return torch.stack((angles.cos(), angles.sin())).float()

    def _turned(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = keys.float().clone()
        first, second = turned[..., self._first], turned[..., self._second]
        turned[..., self._first] = first * cos - second * sin
        turned[..., self._second] = second * cos + first * sin
        return turned
