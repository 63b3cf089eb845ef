"""ReRoPE and Leaky ReRoPE: exact distances near the query, capped or stretched ones beyond a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..config import ModelFacts
from .base import Band, Positions
from .remap import bind_window, check_at_least_one, check_remap, check_window, known


@dataclass(frozen=True, kw_only=True)
class ReRope(Positions):
    """Distance seen: t for t < window, else window.

    Args:
        window: w; default half the trained length. It must be smaller than that length, which is what the model knows.
        stack: allow it beside the model's own rope scaling (YaRN, linear, ...), which shrinks distances too.

    Su, "ReRoPE" (2023); combined with temperatures in "Information Entropy Invariance", Table 1.
    """

    name: ClassVar[str] = "rerope"
    paper: ClassVar[str] = "Su 2023, ReRoPE; Information Entropy Invariance, Table 1"

    window: int | None = None
    stack: bool = False

    def validate(self) -> None:
        check_window(self.window)

    def bind(self, facts: ModelFacts) -> Self:
        check_remap(self.name, facts, self.stack)
        return bind_window(self, facts, 2)

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).double().clamp(max=known(self.window))

    def bands(self, i: Tensor) -> list[Band]:
        w = known(self.window)
        near = Band(first=i - w + 1)
        return [
            near,
            Band(last=i - w, query=lambda i: torch.full_like(i, w).double(), key=lambda j: torch.zeros_like(j).double()),
        ]


@dataclass(frozen=True, kw_only=True)
class LeakyReRope(Positions):
    """Distance seen: t for t < window, else window + (t - window) / stretch.

    Args:
        window: w; default half the trained length.
        stretch: k >= 1; the model reaches window + k (trained length - window) tokens back.
        stack: as in `ReRope`.

    Su, "Leaky ReRoPE" (2023).
    """

    name: ClassVar[str] = "leaky_rerope"
    paper: ClassVar[str] = "Su 2023, ReRoPE"

    window: int | None = None
    stretch: float = 4.0
    stack: bool = False

    def validate(self) -> None:
        check_window(self.window)
        check_at_least_one(stretch=self.stretch)

    def bind(self, facts: ModelFacts) -> Self:
        check_remap(self.name, facts, self.stack)
        return bind_window(self, facts, 2)

    def reach(self, train_length: int) -> int | None:
        return int(known(self.window) + self.stretch * (train_length - known(self.window)))

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        t, w = (i - j).double(), known(self.window)
        return torch.where(t < w, t, w + (t - w) / self.stretch)

    def bands(self, i: Tensor) -> list[Band]:
        w, k = known(self.window), self.stretch
        return [
            Band(first=i - w + 1),
            Band(last=i - w, query=lambda i: i.double() / k + w - w / k, key=lambda j: j.double() / k),
        ]
