"""Fitting the scorer of one layer.

Two ways to the same features and the same formula (`csa2/codec/scorer.py`):

* ridge: linear, in closed form, towards the log of the attention that later queries pay;
* mlp: with hidden units, from the identity, so that the attention output over merged pages comes close to that of the full
  cache. The ratio of merging tightens as it trains.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from csa2.calibrate.fingerprint import ModelShape
from csa2.calibrate.merge_sample import MergeSample
from csa2.calibrate.relaxed_merging import pairwise_distance, relaxed_merge
from csa2.codec.merging import merge_entries
from csa2.codec.scorer import LIMIT, SCALARS, Scorer, scalar_features

RATIOS = (2, 4)
"""Tokens an entry, in the order of the curriculum; those of the formats that merge."""
HIDDEN_UNITS = 16
MOST_PARAMETERS = 4_000_000
"""Of a whole model; the hidden units are halved until it holds."""
RIDGE = 0.01
"""Penalty of the regression, in units of the variance of a feature."""
ATTENTION_FLOOR = 1e-7
"""Attention below which targets of the regression count as equal."""
EPOCHS = 8
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-2
DROPOUT = 0.2
"""Of features. Without it the network learns pages by heart: a tenth less error on text it has seen, none on other text."""
SPREAD_FLOOR = 1e-6
LOSS_FLOOR = 1e-12


def hidden_units(shape: ModelShape) -> int:
    """Hidden units of a head's network with which the model's networks stay below `MOST_PARAMETERS`."""
    units = HIDDEN_UNITS
    while units > 1 and parameters(shape, units) > MOST_PARAMETERS:
        units //= 2
    return units


def parameters(shape: ModelShape, units: int) -> int:
    """Weights of all networks of a model, with `units` hidden units for each KV head."""
    of_head = (2 * shape.head_dim + SCALARS + 1) * (1 + units) + units
    return shape.num_layers * shape.num_kv_heads * of_head


def importance(sample: MergeSample, scorer: Scorer | None) -> Tensor:
    """(N, G, S) score of each entry of a sample, as `PageCodec.seal` computes it."""
    free: Tensor = sample.observed * sample.values.norm(dim=-1)
    return free if scorer is None else free * scorer.correction(sample.entries, sample.observed)


def merging_error(sample: MergeSample, scores: Tensor, ratio: int) -> float:
    """Error of the attention output (`MergeSample.error`) with pages merged by `scores` (N, G, S)."""
    return sample.error(merge_entries(sample.entries, scores, scores.shape[-1] // ratio))


def oracle(sample: MergeSample) -> Tensor:
    """(N, G, S) the score that knows the attention of the queries that ask."""
    scores: Tensor = sample.later_attention() * sample.values.norm(dim=-1)
    return scores


class Standardised:
    """Features of a layer's samples, each head's with mean 0 and variance 1 over the samples it was made from."""

    def __init__(self, samples: Sequence[MergeSample]) -> None:
        total = torch.cat([features(sample) for sample in samples])
        self.mean = total.mean((0, 2), keepdim=True)
        self.spread = total.std((0, 2), keepdim=True, correction=0).clamp(min=SPREAD_FLOOR)

    def of(self, sample: MergeSample) -> Tensor:
        """(N, G, S, F) features of `sample`."""
        return (features(sample) - self.mean) / self.spread

    def scorer(self, weights: Tensor, offsets: Tensor, outer: Tensor) -> Scorer:
        """The scorer of plain features that does what these weights do with standardised ones; rounded to bfloat16, in
        which scorers are stored.

        Args:
            weights: (G, F, 1 + U)
            offsets: (G, 1 + U)
            outer: (G, U)
        """
        weights = weights.detach() / self.spread[0].transpose(-1, -2)
        shift = (self.mean[0] @ weights).squeeze(-2)
        return Scorer(weights, offsets.detach() - shift, outer.detach()).map(lambda x: x.bfloat16().float())


def features(sample: MergeSample) -> Tensor:
    """(N, G, S, F) what `Scorer.correction` knows of each entry: key over the page mean, value, scalars."""
    keys = sample.keys - sample.keys.mean(-2, keepdim=True)
    return torch.cat([keys, sample.values, scalar_features(sample.entries, sample.observed)], -1)


def fit_ridge(samples: Sequence[MergeSample]) -> Scorer:
    """Linear regression of how many times more attention an entry will get than the sample of queries says."""
    known = Standardised(samples)
    rows, targets = [], []
    for sample in samples:
        later = sample.later_attention() + ATTENTION_FLOOR
        seen = sample.observed + ATTENTION_FLOOR
        target = (later / later.mean(-1, keepdim=True)).log() - (seen / seen.mean(-1, keepdim=True)).log()
        rows.append(known.of(sample).transpose(0, 1).flatten(1, 2))
        targets.append(target.transpose(0, 1).flatten(1))
    x, y = torch.cat(rows, 1).double(), torch.cat(targets, 1).double().unsqueeze(-1)
    offset = y.mean(1, keepdim=True)
    gram = x.transpose(-1, -2) @ x
    penalty = RIDGE * x.shape[1] * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(gram + penalty, x.transpose(-1, -2) @ (y - offset)).float()
    groups = weights.shape[0]
    return known.scorer(weights, offset.view(groups, 1).float(), weights.new_zeros(groups, 0))


class Network(torch.nn.Module):
    """The networks of a layer's heads over standardised features; with its initial weights the output is 0 everywhere."""

    def __init__(self, groups: int, width: int, units: int, random: torch.Generator) -> None:
        super().__init__()
        inner = torch.randn(groups, width, units, generator=random) / width**0.5
        self.weights = torch.nn.Parameter(torch.cat([torch.zeros(groups, width, 1), inner], -1))
        self.offsets = torch.nn.Parameter(torch.zeros(groups, 1 + units))
        self.outer = torch.nn.Parameter(torch.zeros(groups, units))

    def forward(self, x: Tensor) -> Tensor:
        """(N, G, S) log of the correction for features (N, G, S, F)."""
        hidden = x @ self.weights + self.offsets.unsqueeze(-2)
        return hidden[..., 0] + (F.silu(hidden[..., 1:]) @ self.outer.unsqueeze(-1)).squeeze(-1)


def curriculum(step: int, steps: int) -> int:
    """Ratio of merging in a step: each in turn for a share of the steps, then all of them alternating."""
    stage = step * (len(RATIOS) + 1) // steps
    return RATIOS[stage] if stage < len(RATIOS) - 1 else RATIOS[step % len(RATIOS)]


def distillation_loss(output: Tensor, exact: Tensor) -> Tensor:
    """Error of the attention output of each head over its size, mean over heads: no head may drown the others.

    Args:
        output: (G, R, Q, D) of merged pages.
        exact: (G, R, Q, D) of the full cache.
    """
    change, size = (output - exact).square().sum((1, 2, 3)), exact.square().sum((1, 2, 3))
    # The root has no gradient at 0.
    return (change / size.clamp(min=LOSS_FLOOR) + LOSS_FLOOR).sqrt().mean()


def train_mlp(samples: Sequence[MergeSample], units: int, seed: int) -> Scorer:
    """Distil the full cache into the scorer of one layer; the same for the same samples and seed.

    Args:
        units: hidden units of each head's network.
    """
    known = Standardised(samples)
    random = torch.Generator().manual_seed(seed)
    groups, width = known.mean.shape[1], known.mean.shape[3]
    network = Network(groups, width, units, random).to(known.mean.device)
    optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * len(samples)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    inputs = [known.of(sample) for sample in samples]
    free = [importance(sample, None) for sample in samples]
    distances = [pairwise_distance(sample.entries) for sample in samples]
    for step in range(steps):
        if step % len(samples) == 0:
            order = torch.randperm(len(samples), generator=random).tolist()
        index = order[step % len(samples)]
        sample = samples[index]
        kept = torch.bernoulli(torch.full((width,), 1 - DROPOUT), generator=random).to(known.mean.device)
        f = network(inputs[index] * kept / (1 - DROPOUT))
        scores = free[index] * f.clamp(-LIMIT, LIMIT).exp()
        summed, mass = relaxed_merge(sample.entries, scores, scores.shape[-1] // curriculum(step, steps), distances[index])
        loss = distillation_loss(sample.output_of_groups(sample.keys, summed, mass), sample.exact)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    return known.scorer(network.weights, network.offsets, network.outer)
