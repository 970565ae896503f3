"""What each choice of the menu costs each head, in the end: in the model's predictions, not in the output of the head.

A small error d in the attention output of a head changes the distribution of the next token by a divergence of g . F . g / 2
nat, which one backward pass estimates for all heads at once: with labels drawn from the model's own distribution and g the
gradient of their log-probability, the mean of (g . d)^2 / 2 (the empirical Fisher information; Theis et al. 2018, "Faster
gaze prediction with dense networks and Fisher pruning", use it to prune).

The error d is that of the codec that serves: pages of the sample sealed and opened in each choice of the menu, everything
else exact.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from csa2.calibrate.capture import CapturedLayer
from csa2.calibrate.offline import SampleSplit, attend, joined, pages, rows, stored
from csa2.calibrate.statistics import PAGE_TOKENS
from csa2.codec.budgets import HeadBudget
from csa2.codec.channels import Rotation
from csa2.codec.codec import PageCodec, make_codec
from csa2.errors import OptionError
from sgl_kernels.page_layout import PageGeometry, PageLayout

SCORED_TOKENS = 512
"""Tokens at the end of a sample whose predictions count."""
EXACT_TOKENS = 1024
"""Tokens before them that stay exact, as in the warm window of a server."""


def budget_split(tokens: int) -> SampleSplit:
    """The split of a sample of `tokens`: compressed up to `EXACT_TOKENS` before the scored ones. The windows shrink with
    samples that are too short for them.

    Raises:
        OptionError: no page would be left to compress.
    """
    scored = min(SCORED_TOKENS, tokens // 4)
    context = tokens - scored
    last = (context - min(EXACT_TOKENS, context // 3)) // PAGE_TOKENS
    if last < 2:
        raise OptionError(f"--budget-tokens {tokens} is too short: one page stays exact, so give at least {6 * PAGE_TOKENS}")
    return SampleSplit(context, last)


class LayerErrors:
    """What storing the pages of one layer of one sample does to its attention output, everything else exact."""

    def __init__(self, layer: CapturedLayer, split: SampleSplit) -> None:
        tokens = layer.keys.shape[1]
        self._layer = layer
        self._exact = attend(layer.asked, rows(layer.keys, layer.values, 0, tokens))
        self._before = rows(layer.keys, layer.values, 0, PAGE_TOKENS)
        self._after = rows(layer.keys, layer.values, split.last_page * PAGE_TOKENS, tokens)
        self._pages = pages(layer.keys, layer.values, 1, split.last_page, PAGE_TOKENS)

    def of(self, codec: PageCodec, layout: PageLayout) -> Tensor:
        """(H, n, D) error of the output for the n tokens that ask, pages in `layout`."""
        coded = stored(codec, layout, self._pages, self._layer.sample)
        return attend(self._layer.asked, joined((self._before, coded, self._after))) - self._exact


def head_losses(gradient: Tensor, error: Tensor, groups: int) -> Tensor:
    """(G,) fp32 loss of each KV head, nat per scored token.

    Args:
        gradient: (H, n, D) from `CapturedModel.output_gradients`.
        error: (H, n, D) of the attention output.
        groups: G.
    """
    # The query heads of a group err together.
    by_query = (gradient * error).view(groups, -1, *error.shape[1:]).sum((1, 3))
    return by_query.square().mean(-1) / 2


def layer_losses(
    layer: CapturedLayer,
    gradient: Tensor,
    split: SampleSplit,
    choices: Sequence[HeadBudget],
    rotation: Rotation,
    orders: list[list[int]],
) -> Tensor:
    """(M, G) fp32 loss of each choice for each head of one layer, nat per scored token.

    Args:
        gradient: (H, n, D) from `CapturedModel.output_gradients`.
        orders: channel order of each of the G heads.
    """
    groups, _, dim = layer.keys.shape
    errors = LayerErrors(layer, split)
    geometry = PageGeometry(1, groups, dim, PAGE_TOKENS, torch.bfloat16)
    losses = []
    for choice in choices:
        head = choice.layout(geometry)
        layout = PageLayout("choice", geometry, (head,) * groups)
        codec = make_codec(geometry, rotation, (head.key_classes,) * groups, orders)
        losses.append(head_losses(gradient, errors.of(codec, layout), groups))
    return torch.stack(losses)
