"""Head gains: a factor on the output of each head; few enough to train on a few samples, and they fold into the weights."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .base import OutputNorm
from .learned import HeadScaleLayerNorm
from .method import Heads, ModelFacts, numbers, per_head, require_in


@dataclass(frozen=True, kw_only=True)
class OutputGain(OutputNorm):
    """y_h = g_h x_h for the output x of head h, before W_O.

    Args:
        gain: g, a number, or one per (layer, head); `hf_longattn.calibrate` raises those of heads that copy.
        learned: a learned factor on it per head, starting at 1.

    Lee et al., "SEAL: Scaling to Emphasize Attention for Long-Context Retrieval" (2025): the form with one factor per head.
    """

    name: ClassVar[str] = "output_gain"
    paper: ClassVar[str] = "Lee et al. 2025, SEAL: Scaling to Emphasize Attention for Long-Context Retrieval, arXiv:2501.15225"

    gain: float | tuple[Any, ...] = 1.0
    learned: bool = True

    def validate(self) -> None:
        for value in numbers(self.gain):
            require_in("gain", value, -math.inf, math.inf)

    @property
    def needs_training(self) -> bool:
        return False  # it starts as the identity, or as one chose it

    def bind(self, facts: ModelFacts) -> Self:
        per_head("gain", self.gain, facts)
        return self

    def for_layer(self, layer: int) -> Self:
        nested = isinstance(self.gain, tuple) and isinstance(self.gain[0], tuple)
        return dataclasses.replace(self, gain=self.gain[layer]) if nested else self  # type: ignore[index]

    def for_heads(self, heads: Heads) -> Self:
        return dataclasses.replace(self, gain=heads.own(self.gain)) if isinstance(self.gain, tuple) else self

    def module(self, facts: ModelFacts) -> nn.Module | None:
        return HeadScaleLayerNorm(facts.num_heads) if self.learned else None

    def gains(self, like: Tensor, learned: nn.Module | None = None) -> Tensor:
        """g by head, (1, heads or 1, 1), in float32 at least."""
        wide = torch.promote_types(like.dtype, torch.float32)
        gain = torch.as_tensor(self.gain, dtype=wide, device=like.device).reshape(1, -1, 1)
        return gain if learned is None else learned(gain)

    def normalise(self, output: Tensor, affine: nn.Module | None = None) -> Tensor:
        return (output * self.gains(output, affine)[..., None]).to(output.dtype)
