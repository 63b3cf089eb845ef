"""The bare logarithm of the length as a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import LengthTemperature


@dataclass(frozen=True, kw_only=True)
class LogLength(LengthTemperature):
    """factor(n) = ln n: no identity at any training length, so a model must be trained with it.

    Args:
        clamp: False by default, as published.

    "Information Entropy Invariance", Table 6.
    """

    name: ClassVar[str] = "log_length"
    paper: ClassVar[str] = "Information Entropy Invariance, Table 6"
    uses_train_length: ClassVar[bool] = False

    clamp: bool = False

    @property
    def needs_training(self) -> bool:
        return True

    def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
        return torch.log(n.double())
