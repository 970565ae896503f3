"""Values that scoring and merging can compute with: one broken token must not decide what becomes of others."""

import torch
from torch import Tensor

from sgl_kernels.codes import SATURATION


def finite(x: Tensor) -> Tensor:
    """`x` in fp32, NaN and infinities 0, and no magnitude beyond what a page holds, so that squares are finite too."""
    return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0).clamp_(-SATURATION, SATURATION)
