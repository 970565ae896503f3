"""What one layer and one piece of text say about merging: pages, the queries that score them, and later queries that read
them.

    | first page | pages that are merged | window, exact | asks |
    0            64                                 context^   ^tokens; the query sample comes from the window
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from csa2.calibrate.offline import SampleSplit, pages
from csa2.calibrate.statistics import PAGE_TOKENS
from csa2.codec.importance import observed_attention
from csa2.codec.queries import SAMPLE_WINDOW, QuerySamples
from csa2.errors import OptionError
from sgl_kernels.page_codec.reference import Entries

ASKED_SHARE = 0.2
"""Part of a piece of text whose queries are targets."""
ASKED_QUERIES = 64
"""Queries of them that are used, spread evenly."""
SHORTEST_TOKENS = 6 * PAGE_TOKENS


def piece_split(tokens: int) -> SampleSplit:
    """The split of a piece of `tokens`: merged up to the window that the query sample comes from, which shrinks with it.

    Raises:
        OptionError: no page would be left to merge.
    """
    if tokens < SHORTEST_TOKENS:
        raise OptionError(
            f"--scorer-tokens {tokens} is too short: the first page and a window stay exact, so give at least "
            f"{SHORTEST_TOKENS}"
        )
    context = tokens - round(tokens * ASKED_SHARE)
    return SampleSplit(context, (context - min(SAMPLE_WINDOW, context // 2)) // PAGE_TOKENS)


@dataclass(frozen=True)
class MergeSample:
    """One layer of one piece. Axes: N pages, G KV heads, R query heads of a KV head, Q queries that ask; all fp32."""

    keys: Tensor
    """(N, G, S, D)"""
    values: Tensor
    """(N, G, S, D)"""
    queries: Tensor
    """(G, M, D): what a server keeps of the queries of the context, softmax scale included."""
    asked: Tensor
    """(G, R, Q, D) later queries, softmax scale included."""
    rest_mass: Tensor
    """(G, R, Q) log of the sum of exp(logit) over all tokens that are not merged."""
    rest: Tensor
    """(G, R, Q, D) attention output over those alone."""

    @cached_property
    def entries(self) -> Entries:
        """The pages, unmerged."""
        return Entries(self.keys, self.values, None)

    @cached_property
    def observed(self) -> Tensor:
        """(N, G, S) share of attention that the sample pays."""
        return observed_attention(self.entries, self.queries.expand(self.keys.shape[0], -1, -1, -1))

    @cached_property
    def exact(self) -> Tensor:
        """(G, R, Q, D) attention output of the full cache."""
        return self.output(self.entries)

    def output(self, pages: Entries) -> Tensor:
        """(G, R, Q, D) attention output over `pages` (N, G, E, D) in place of the unmerged ones, and everything else."""
        mass = torch.ones_like(pages.keys[..., 0]) if pages.bias is None else pages.bias.exp()
        return self.output_of_groups(pages.keys, pages.values * mass.unsqueeze(-1), mass)

    def output_of_groups(self, keys: Tensor, summed: Tensor, mass: Tensor) -> Tensor:
        """The same over groups with these keys (N, G, E, D), that count as `mass` (N, G, E) entries >= 0, and whose values
        sum up to `summed` (N, G, E, D).
        """
        logits = torch.einsum("grqd,nged->grqne", self.asked, keys).flatten(-2)
        top = torch.maximum(logits.amax(-1), self.rest_mass).unsqueeze(-1)
        weight, rest_weight = (logits - top).exp(), (self.rest_mass.unsqueeze(-1) - top).exp()
        values, masses = (x.transpose(0, 1).flatten(1, 2).unsqueeze(1) for x in (summed, mass.unsqueeze(-1)))
        output: Tensor = (weight @ values + self.rest * rest_weight) / (weight @ masses + rest_weight)
        return output

    def error(self, pages: Entries) -> float:
        """Norm of the change of the attention output over the norm of the output; 0 where there is no output."""
        change, size = (self.output(pages) - self.exact).norm(), self.exact.norm()
        return float(change / size.clamp(min=torch.finfo(torch.float32).tiny))

    def later_attention(self) -> Tensor:
        """(N, G, S) mean attention that the queries that ask pay to each entry, of all attention they pay."""
        logits = torch.einsum("grqd,nged->grqne", self.asked, self.keys)
        total = torch.logaddexp(torch.logsumexp(logits.flatten(-2), -1), self.rest_mass)
        return (logits - total[..., None, None]).exp().mean((1, 2)).transpose(0, 1)


def cut(queries: Tensor, keys: Tensor, values: Tensor, split: SampleSplit) -> MergeSample:
    """The sample of one layer.

    Args:
        queries: (H, T, D) scaled, rotated.
        keys: (G, T, D) rotated.
        values: (G, T, D).
    """
    groups, tokens, dim = keys.shape
    kept = QuerySamples(1, groups)
    kept.record_extend(0, 0, queries[:, : split.context].transpose(0, 1), 1.0)
    sample = kept.of(torch.zeros(1, dtype=torch.int64))
    rows = torch.linspace(split.context, tokens - 1, min(ASKED_QUERIES, tokens - split.context), device=keys.device).long()
    asked = queries[:, rows].view(groups, -1, rows.numel(), dim)
    first, last = PAGE_TOKENS, split.last_page * PAGE_TOKENS

    def outside(x: Tensor) -> Tensor:
        return torch.cat([x[:, :first], x[:, last:]], 1)

    positions = torch.arange(tokens, device=keys.device)
    positions = torch.cat([positions[:first], positions[last:]])
    logits = asked @ outside(keys).unsqueeze(1).transpose(-1, -2)
    logits = logits.masked_fill(positions > rows[:, None], float("-inf"))
    merged = pages(keys, values, 1, split.last_page, PAGE_TOKENS)
    return MergeSample(
        keys=merged.keys,
        values=merged.values,
        queries=torch.zeros(groups, 1, dim) if sample is None else sample[0].float(),
        asked=asked.clone(),
        rest_mass=torch.logsumexp(logits, -1),
        rest=logits.softmax(-1) @ outside(values).unsqueeze(1),
    )
