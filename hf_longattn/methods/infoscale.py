"""InfoScale: a temperature against the growth of entropy with the number of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..slots.base import LengthTemperature
from ..slots.method import require_in


@dataclass(frozen=True, kw_only=True)
class InfoScale(LengthTemperature):
    """factor(n) = sqrt( (1 - e^{2ε/d} n^{-2/d}) / (1 - e^{2ε/d} n_tr^{-2/d}) ), d = head_dim (Eq. 15).

    Args:
        epsilon: ε >= 0, below ln n_tr; 0 in the paper's experiments. Numerators below 0 (n < e^ε) count as 0.
        train_length, clamp, stack: see `LengthTemperature`. Published unclamped, for models trained with it.

    Li et al., "Information Entropy Invariance" (2025), Eq. 15.
    """

    name: ClassVar[str] = "infoscale"
    summary: ClassVar[str] = "slows the growth of entropy beyond the training length"
    paper: ClassVar[str] = "Li et al. 2025, Information Entropy Invariance, arXiv:2501.08570"

    epsilon: float = 0.0

    def validate(self) -> None:
        super().validate()
        require_in("epsilon", self.epsilon, 0.0, math.inf)
        if self.train_length is not None and self.epsilon >= math.log(self.train_length):
            raise ValueError(f"epsilon must lie below ln(train_length) = {math.log(self.train_length):g}, got {self.epsilon}")

    @property
    def rises_to_one(self) -> bool:
        return True

    def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
        # expm1 keeps the difference from 1 exact for large head_dim
        numerator = -torch.expm1(2 * (self.epsilon - torch.log(n.double())) / head_dim)
        return torch.sqrt(numerator.clamp(min=0) / -math.expm1(2 * (self.epsilon - math.log(train_length)) / head_dim))
