"""Self-Extend: exact distances near the query, distances between groups of tokens beyond a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..slots.base import KeyInterval, Positions, Window
from ..slots.method import require_at_least


@dataclass(frozen=True, kw_only=True)
class SelfExtend(Window, Positions):
    """Distance seen: t for t < window, else ⌊i/group⌋ - ⌊j/group⌋ + window - ⌊window/group⌋.

    Args:
        window: w; default an eighth of the trained length.
        group: g >= 1; the model reaches g (trained length - window + ⌊window/g⌋) tokens back.
        stack: allow it beside the model's own rope scaling.

    Jin et al., "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning" (2024).
    """

    name: ClassVar[str] = "self_extend"
    summary: ClassVar[str] = "distances beyond w count in groups of tokens"
    paper: ClassVar[str] = "Jin et al. 2024, LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning, arXiv:2401.01325"
    default_divisor: ClassVar[int] = 8

    window: int | None = None
    group: int = 4
    stack: bool = False

    def validate(self) -> None:
        super().validate()
        require_at_least(1, group=self.group)

    def reach(self, train_length: int) -> int:
        return self.group * (train_length - self.filled("window") + self.filled("window") // self.group)

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        w, g = self.filled("window"), self.group
        return torch.where(i - j < w, i - j, i // g - j // g + w - w // g).double()

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        w, g = self.filled("window"), self.group
        far = KeyInterval(last=i - w, query=lambda i: (i // g + w - w // g).double(), key=lambda j: (j // g).double())
        return [KeyInterval(first=i - w + 1), far]
