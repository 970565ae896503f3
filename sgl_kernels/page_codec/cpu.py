"""Sealing and demoting pages on the CPU, compiled: one call for a whole wave of pages, all layers and heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_kernels.basis import is_power_of_two, orthonormal_basis
from sgl_kernels.cpu import build
from sgl_kernels.cpu.tables import DTYPES, piece_table
from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.page_layout import PageLayout


@dataclass(frozen=True)
class MergeRule:
    """Constants of scoring and merging, which the caller chooses.

    Entries of a head are worth w_e = i_e / mean(i) + `weight_floor`, with i_e the share of attention that entry e draws
    times the size of its value. The share is the mean softmax of the page's sample of queries or, without one, a softmax
    over (mean size - size) / deviation of the keys. The entries worth most stay; each other joins the one that is nearest,
    by squared distance of keys and of values in units of their variance in the page. A group has the key of the one that
    stayed, the mean value by w, and a bias that is log(sum of w / w of the one that stayed) larger.
    """

    weight_floor: float
    equal_sizes: float
    """Deviation of the sizes of keys, over their mean, below which they count as equal."""
    rounding: float
    """Variance over mean square below which keys or values count as equal."""


@dataclass(frozen=True)
class ScoreCorrection:
    """Networks that correct what entries are worth, one for each of the L x G heads: i_e is multiplied by exp(f) in heads
    that have no entry with a bias, where there is a sample.

    f = h_0 + sum over u of outer_u silu(h_u), clamped to +- `limit`, with h = offsets + weights . x. Features x are the key
    less the mean of the keys, the value, log(max(share, `share_floor`) E), the size of the key, log(max(size of the value,
    `size_floor`)), and the place in the page from -1 to 1.
    """

    weights: Tensor
    """(L x G, 2 D + 4, 1 + U) fp32, U at most `MOST_HIDDEN_UNITS`"""
    offsets: Tensor
    """(L x G, 1 + U) fp32"""
    outer: Tensor
    """(L x G, U) fp32"""
    share_floor: float
    size_floor: float
    limit: float


MOST_HIDDEN_UNITS = 64
NO_CORRECTION = ScoreCorrection(torch.zeros(0, 0, 0), torch.zeros(0, 0), torch.zeros(0, 0), 1.0, 1.0, 0.0)


class CpuSealer:
    """The kernel, bound to the layouts of one model."""

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        bases: CodecBases,
        rule: MergeRule,
        isa: str | None = None,
        correction: ScoreCorrection = NO_CORRECTION,
    ) -> None:
        """Compile what is not compiled yet.

        Args:
            layouts: the formats that pages have or get, the plain one first.
            isa: an instruction set, or None for the best of this CPU.

        Raises:
            KernelBuildError, InstructionSetError: see `build.load`.
            ValueError: a correction with too many hidden units.
        """
        self._module: Any = build.load(isa)
        geometry = layouts[0].geometry
        self._pieces = piece_table(layouts, bases).transpose(0, 1).flatten(1, 2).contiguous()
        self._entries = self._pieces[:, :, 1]
        self._page_bytes = torch.tensor([layout.page_bytes for layout in layouts])
        self._dtype = DTYPES[geometry.dtype]
        self._flat = bases.flat.float().contiguous()
        dim = geometry.head_dim
        self._is_hadamard = is_power_of_two(dim) and torch.equal(self._flat, orthonormal_basis(dim))
        self._reduced = torch.empty(0, 0, 0) if bases.reduced is None else bases.reduced.float().contiguous()
        self._reduced_t = self._reduced.transpose(1, 2).contiguous()
        self._rule = rule
        if correction.outer.shape[-1] > MOST_HIDDEN_UNITS:
            raise ValueError(f"{correction.outer.shape[-1]} hidden units of a scorer are more than {MOST_HIDDEN_UNITS}")
        self._scorer = [x.float().contiguous() for x in (correction.weights.mT, correction.offsets, correction.outer)]
        self._scorer_limits = correction.share_floor, correction.size_floor, correction.limit

    def seal(
        self, arena: Tensor, source: Tensor, offsets: Tensor, target: Tensor, queries: Tensor | None, sample: Tensor
    ) -> dict[int, Tensor]:
        """Encode N full pages, each from its format to another.

        Args:
            arena: (bytes,) uint8.
            source, target: (N,) int64 index into the layouts. Targets are coded, and no head has more entries than before.
            offsets: (N,) int64 byte offset of each page in the arena.
            queries: (U, L x G, M, D) bf16, fp16 or fp32 samples of queries, softmax scale included; or None.
            sample: (N,) int64 row of `queries` that weights the entries of each page, -1 for none.

        Returns:
            For each target format (n, page_bytes) uint8, its pages in their order in `target`.

        Raises:
            ValueError: a target is the plain format, or would need more entries than there are.
        """
        self._check(source, target)
        sizes = self._page_bytes[target]
        order = torch.argsort(target, stable=True)
        out_offsets = torch.empty_like(offsets)
        out_offsets[order] = sizes[order].cumsum(0) - sizes[order]
        moves = torch.stack((source, offsets, target, out_offsets, sample), -1).contiguous()
        out = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        self._module.seal(
            out,
            arena,
            moves,
            self._pieces,
            self._dtype,
            self._flat,
            self._is_hadamard,
            self._reduced,
            self._reduced_t,
            None if queries is None else queries.contiguous(),
            self._rule.weight_floor,
            self._rule.equal_sizes,
            self._rule.rounding,
            *self._scorer,
            *self._scorer_limits,
            torch.get_num_threads(),
        )
        packed, start = {}, 0
        for index, count in enumerate(torch.bincount(target, minlength=len(self._page_bytes)).tolist()):
            if count:
                end = start + count * int(self._page_bytes[index])
                packed[index] = out[start:end].view(count, -1)
                start = end
        return packed

    def _check(self, source: Tensor, target: Tensor) -> None:
        if bool((target == 0).any()):
            raise ValueError("a page cannot be sealed to the plain format")
        if bool((self._entries[target] > self._entries[source]).any()):
            raise ValueError("a page cannot be sealed to a format in which a head has more entries than it has now")
