"""ALiBi: a linear penalty on distance, with one slope per head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..slots.base import LogitMap


@dataclass(frozen=True, kw_only=True)
class Alibi(LogitMap):
    """L_ij = S_ij - slope_h t; slopes 2^{-8/H}, 2^{-16/H}, ... and, for H not a power of two, Press et al.'s filling.

    Meant in place of a position encoding: combine it with `hf_longattn.rope.nope`, or train the model with both.

    Press, Smith & Lewis, "Train short, test long" (2022).
    """

    name: ClassVar[str] = "alibi"
    summary: ClassVar[str] = "subtracts a slope per head times the distance"
    paper: ClassVar[str] = "Press, Smith & Lewis 2022, Train Short, Test Long, arXiv:2108.12409"

    @property
    def head_dependent(self) -> bool:
        return True

    def tables(self, heads: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        distance = torch.arange(length, dtype=torch.float64, device=device)
        return torch.ones(1, length, dtype=torch.float64, device=device), -slopes(heads, device)[:, None] * distance


def slopes(heads: int, device: torch.device) -> Tensor:
    """One slope per head, as published: geometric for a power of two, else filled from the next one's odd places."""
    power = 2 ** int(math.log2(heads))
    first, odd = (torch.arange(1, n + 1, dtype=torch.float64, device=device) for n in (power, heads - power))
    return torch.exp2(torch.cat([-8 / power * first, -4 / power * (2 * odd - 1)]))  # made there: a copy fails in a CUDA graph
