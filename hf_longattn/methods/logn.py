"""LogN (also SSMax, scalable softmax): logits grow with the logarithm of the number of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..slots.base import LengthTemperature
from ..slots.learned import HeadScale
from ..slots.method import ModelFacts, require_positive


@dataclass(frozen=True, kw_only=True)
class LogN(LengthTemperature):
    """factor(n) = s (ln n)^p; by default s = (ln n_tr)^{-p}, the identity at the training length.

    Args:
        scale: s > 0; None for the default above.
        learned: a learned factor on s per head, starting at 1. With clamp it is n that is held at n_tr (or where the
            factor reaches 1), so that the parameter always has a gradient.
        exponent: p > 0, for research: theories disagree whether the logarithm or its root is right.
        train_length, clamp, stack: see `LengthTemperature`.

    Anson et al., "Scale-invariant attention", Sections 2 and 4; Nakanishi, "Scalable-Softmax" (2025).
    """

    name: ClassVar[str] = "logn"
    summary: ClassVar[str] = "s ln n"
    paper: ClassVar[str] = "Nakanishi 2025, Scalable-Softmax Is Superior for Attention, arXiv:2501.19399"

    scale: float | None = None
    learned: bool = False
    exponent: float = 1.0

    def validate(self) -> None:
        super().validate()
        require_positive(scale=self.scale, exponent=self.exponent)

    @property
    def uses_train_length(self) -> bool:
        return self.scale is None or self.learned

    @property
    def needs_training(self) -> bool:
        return super().needs_training or self.scale is not None  # no identity at the training length

    @property
    def head_dependent(self) -> bool:
        return self.learned

    @property
    def rises_to_one(self) -> bool:
        return self.scale is None and not self.learned

    def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
        scale = math.log(train_length) ** -self.exponent if self.scale is None else self.scale
        return scale * torch.log(n.double()) ** self.exponent

    def module(self, facts: ModelFacts) -> nn.Module | None:
        return HeadScale(facts.num_heads) if self.learned else None
