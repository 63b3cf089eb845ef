"""YaRN's temperature, by the number of keys, without YaRN's change of frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..slots.base import LengthTemperature


@dataclass(frozen=True, kw_only=True)
class YarnTemperature(LengthTemperature):
    """factor(n) = (0.1 ln(n / n_tr) + 1)²; a base below 0 (n < n_tr e^{-10}) counts as 0.

    Peng et al., "YaRN", as in "Information Entropy Invariance", Table 6.
    """

    name: ClassVar[str] = "yarn_temperature"
    summary: ClassVar[str] = "(0.1 ln(n / n_tr) + 1)²"
    paper: ClassVar[str] = "Peng et al. 2023, YaRN: Efficient Context Window Extension, arXiv:2309.00071"

    @property
    def rises_to_one(self) -> bool:
        return True

    def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
        return (0.1 * (torch.log(n.double()) - math.log(train_length)) + 1).clamp(min=0) ** 2
