"""STRING: far distances shifted back to near ones, which a model has met more often in training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..slots.base import KeyInterval, Positions
from ..slots.method import ModelFacts, require_at_least


@dataclass(frozen=True, kw_only=True)
class StringRemap(Positions):
    """Distance shown: t for t < shift, else t - shift + window.

    Distances near the trained length are rare in training: a text of L tokens holds L - t pairs at t. Shown closer by
    shift - window, keys that far back can be retrieved, within the trained length and for `shift - window` tokens beyond it.

    Args:
        shift: S; default a third of the trained length.
        window: W < S, how far away the nearest shifted keys look; default 128, at most half of S.
        stack: allow it beside the model's own rope scaling.

    An et al., "Why Does the Effective Context Length of LLMs Fall Short?" (2024), Section 4.
    """

    name: ClassVar[str] = "string_remap"
    summary: ClassVar[str] = "distances beyond S are reduced by S - W"
    paper: ClassVar[str] = "An et al. 2024, STRING"

    shift: int | None = None
    window: int | None = None
    stack: bool = False

    def validate(self) -> None:
        require_at_least(1, window=self.window)
        if self.shift is not None and self.shift <= (self.window or 1):
            raise ValueError(f"shift must be an integer > window ({self.window or 1}), got {self.shift!r}")

    def bind(self, facts: ModelFacts) -> Self:
        bound = super().bind(facts)
        if self.shift is None and facts.train_length is None:
            raise ValueError("string_remap needs shift: the model's config names no maximum length")
        shift = max((facts.train_length or 0) // 3, 2) if self.shift is None else self.shift
        if facts.train_length is not None and shift >= facts.train_length:
            raise ValueError(f"shift {shift} must be below the trained length {facts.train_length}")
        return dataclasses.replace(bound, shift=shift, window=min(128, shift // 2) if self.window is None else self.window)

    def reach(self, train_length: int) -> int | None:
        return train_length + self.filled("shift") - self.filled("window")

    @property
    def identity_below(self) -> float:
        return self.shift or 0

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        t, s = i - j, self.filled("shift")
        return torch.where(t < s, t, t - s + self.filled("window")).double()

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        s = self.filled("shift")
        return [
            KeyInterval(first=i - s + 1),
            KeyInterval(last=i - s, query=lambda i: (i - s + self.filled("window")).double()),
        ]
