"""softmax_plus: the logarithm of the length to the base of the training length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import LengthTemperature


@dataclass(frozen=True, kw_only=True)
class SoftmaxPlus(LengthTemperature):
    """factor(n) = ln n / ln n_tr (log_512 n in the paper, where n_tr = 512).

    Su Jianlin's "softmax plus", as in "Information Entropy Invariance", Table 6.
    """

    name: ClassVar[str] = "softmax_plus"
    paper: ClassVar[str] = "Information Entropy Invariance, Table 6"

    def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
        return torch.log(n.double()) / math.log(train_length)
