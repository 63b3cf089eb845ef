"""What each slot asks of its methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..config import Method


class LogitMap(Method, ABC):
    """L_ij = gain_t S_ij + bias_t at the distance t = |i - j|."""

    slot: ClassVar[str] = "logit_map"

    sink_tokens: int = 0
    """The first keys of each sequence that the map leaves alone."""

    @abstractmethod
    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """gain and bias for t = 0 .. length-1: two float64 tensors, each of shape (heads or 1, length)."""
