"""The learned parts of methods.

"LayerNorm" in the class names is what makes every transformers model initialise a missing `weight` to 1 and a missing
`bias` to 0, so both start as exact no-ops whichever way the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .method import SLOTS

#: What a learned parameter starts at, by its name.
START = {"weight": 1.0, "bias": 0.0}


class LearnedParts(nn.Module):
    """The learned parts of one attention module, each under the name of its slot.

    Not a ModuleDict, which PEFT refuses in modules_to_save.
    """

    weight = None  # most of PEFT's tuners read it of what they unload

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for slot, part in parts.items():
            self.add_module(slot, part)


def learned_parts(attention: Any) -> dict[str, nn.Module]:
    """The learned parts of an attention module by slot; of the active adapter where PEFT has wrapped them."""
    container = attention._modules.get("longattn")  # by attribute an absent one would cost as much as a product
    if container is None:
        return {}
    plain = type(container) is LearnedParts
    parts = container._modules if plain else {slot: getattr(container, slot, None) for slot in SLOTS}
    return {slot: part for slot, part in parts.items() if part is not None}


def _all(parameter: Tensor) -> Tensor:
    return parameter


class HeadScaleLayerNorm(nn.Module):
    """A learned factor per head on a row factor (batch, heads or 1, q_len)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, factor: Tensor, own: Callable[[Tensor], Tensor] = _all) -> Tensor:
        """`own` takes the part of a parameter that belongs to the heads at hand."""
        return factor * own(self.weight).to(factor.dtype)[:, None]


class HeadShiftLayerNorm(nn.Module):
    """A learned addend per head: (heads,) to the same."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor, own: Callable[[Tensor], Tensor] = _all) -> Tensor:
        return x + own(self.bias).to(x.dtype)


class FeatureAffineLayerNorm(nn.Module):
    """A learned weight and bias per feature: (batch, q_len, features) to the same."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor, own: Callable[[Tensor], Tensor] = _all) -> Tensor:
        return torch.addcmul(own(self.bias).to(x.dtype), x, own(self.weight).to(x.dtype))
