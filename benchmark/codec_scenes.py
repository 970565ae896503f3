"""What the codec's stages are measured on: keys and values of real text, and queries from later in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from csa2.calibrate.capture import CapturedModel
from csa2.calibrate.statistics import channel_pairs, pair_scores
from csa2.codec.queries import SAMPLE_WINDOW, QuerySamples
from csa2.options import CacheOptions
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageGeometry

CONTEXT = 2560
"""Tokens in the cache."""
CODED = (128, CONTEXT - CacheOptions().warm_tokens)
"""Tokens that are coded, whole pages of 32, 64 and 128: behind the first page, before the warm window."""
LATER, QUERIES = 256, 64
"""Tokens that follow the context, and how many of them ask. They see themselves and what is before them."""


@dataclass(frozen=True)
class Scene:
    """One document. Axes: L layers, G KV heads, H query heads, T = CONTEXT + LATER tokens, D head dim; fp32, rotated."""

    name: str
    keys: Tensor
    """(L, G, T, D)"""
    values: Tensor
    queries: Tensor
    """(L, H, QUERIES, D) of the later tokens, softmax scale included."""
    samples: QuerySamples
    """Reader 0: the sample that a server keeps of the context."""
    wide_samples: Tensor
    """(L x G, M, D) four times as many queries from the same tokens."""
    pair_scores: Tensor
    """(L, G, P), see `csa2.calibrate.statistics`; from the whole context, so as far back as queries look here. The
    calibration that ships was made on samples of 512 tokens."""

    def geometry(self, page_size: int = 64) -> PageGeometry:
        """Geometry of pages of this model."""
        layers, groups, _, dim = self.keys.shape
        return PageGeometry(layers, groups, dim, page_size, torch.bfloat16)

    def pages(self, page_size: int = 64) -> Entries:
        """The coded tokens in pages (N, L x G, S, D)."""

        def paged(x: Tensor) -> Tensor:
            return x[:, :, slice(*CODED)].flatten(0, 1).unflatten(1, (-1, page_size)).transpose(0, 1).contiguous()

        return Entries(paged(self.keys), paged(self.values), None)

    def sample(self, pages: int, *, wide: bool = False) -> Tensor:
        """(N, L x G, M, D) sample of queries to each of N pages."""
        if wide:
            return self.wide_samples.expand(pages, -1, -1, -1)
        found = self.samples.of(torch.zeros(pages, dtype=torch.int64))
        if found is None:
            raise RuntimeError("no queries were sampled")
        return found

    @property
    def asked(self) -> Tensor:
        """(L x G, R x QUERIES, D) later queries, those of one KV head together."""
        groups = self.keys.shape[1]
        return self.queries.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)

    def error(self, entries: Entries) -> float:
        """Relative error of the attention output of the later queries, mean of the layers, if the coded tokens are
        `entries` (N, L x G, E, D) and all others exact."""
        return float(((self._attend(entries) - self._exact).norm(dim=-1) / self._exact.norm(dim=-1)).mean())

    @cached_property
    def _exact(self) -> Tensor:
        return self._attend(self.pages())

    @cached_property
    def _others(self) -> tuple[Tensor, Tensor]:
        """Attention (L x G, R x QUERIES, D) of the later queries to tokens that are not coded, and its log-sum-exp."""
        tokens = self.keys.shape[2]
        seen = torch.cat((torch.arange(CODED[0]), torch.arange(CODED[1], tokens)))
        logits = self.asked @ self.keys[:, :, seen].flatten(0, 1).transpose(-1, -2)
        repeat = self.queries.shape[1] // self.keys.shape[1]
        logits.masked_fill_(seen > _asking().repeat(repeat)[:, None], float("-inf"))
        return logits.softmax(-1) @ self.values[:, :, seen].flatten(0, 1), logits.logsumexp(-1)

    def _attend(self, entries: Entries) -> Tensor:
        """(L, elements) attention of the later queries to everything they see."""
        keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (entries.keys, entries.values))
        logits = self.asked @ keys.transpose(-1, -2)
        if entries.bias is not None:
            logits += entries.bias.transpose(0, 1).flatten(1, 2).unsqueeze(-2)
        others, others_lse = self._others
        share = torch.sigmoid(logits.logsumexp(-1) - others_lse).unsqueeze(-1)
        output = share * (logits.softmax(-1) @ values) + (1 - share) * others
        return output.unflatten(0, (self.keys.shape[0], -1)).flatten(1)


def _asking() -> Tensor:
    """(QUERIES,) positions of the later queries."""
    return torch.linspace(CONTEXT, CONTEXT + LATER - 1, QUERIES).long()


def make_scene(model: CapturedModel, name: str, tokens: Sequence[int]) -> Scene:
    """One forward pass over the first `CONTEXT + LATER` of `tokens`."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    config = model.model.config.get_text_config()
    samples = QuerySamples(config.num_hidden_layers, config.num_key_value_heads)

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        groups, _, dim = keys.shape
        of_context = queries[:, :CONTEXT]
        samples.record_extend(0, layer, of_context.transpose(0, 1), 1.0)
        rows = torch.linspace(CONTEXT - SAMPLE_WINDOW, CONTEXT - 1, 64).long()
        wide = of_context[:, rows].reshape(groups, -1, dim)
        pairs = channel_pairs(model.rotation(dim), dim)
        scores = pair_scores(of_context, keys[:, :CONTEXT], pairs)
        seen.append((keys.clone(), values.clone(), queries[:, _asking()], wide, scores))

    model.run(list(tokens[: CONTEXT + LATER]), visit)
    keys, values, queries, wide, scores = (torch.stack(x) for x in zip(*seen, strict=True))
    return Scene(name, keys, values, queries, samples, wide.flatten(0, 1), scores)
