"""The learned parts of methods.

"LayerNorm" in the class names is what makes every transformers model initialise a missing `weight` to 1 and a missing
`bias` to 0, so both start as exact no-ops whichever way the model is built.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HeadScaleLayerNorm(nn.Module):
    """A learned factor per head on a row factor (batch, heads or 1, q_len)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, factor: Tensor) -> Tensor:
        return factor * self.weight.to(factor.dtype)[:, None]


class FeatureAffineLayerNorm(nn.Module):
    """A learned weight and bias per feature: (batch, q_len, features) to the same."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype) + self.bias.to(x.dtype)
