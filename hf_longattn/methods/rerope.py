"""ReRoPE and Leaky ReRoPE: exact distances near the query, capped or stretched ones beyond a window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..slots.base import KeyInterval, Positions, Window, capped
from ..slots.method import numbers, require_at_least


@dataclass(frozen=True, kw_only=True)
class ReRope(Window, Positions):
    """Distance seen: t for t < window, else window.

    Args:
        window: w; default half the trained length. It must be smaller than that length, which is what the model knows.
        stack: allow it beside the model's own rope scaling (YaRN, linear, ...), which shrinks distances too.

    Su, "ReRoPE" (2023); combined with temperatures in "Information Entropy Invariance", Table 1.
    """

    name: ClassVar[str] = "rerope"
    summary: ClassVar[str] = "RoPE sees no distance beyond w"
    paper: ClassVar[str] = "Su 2023, ReRoPE (blog and code)"

    window: int | None = None
    stack: bool = False

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).double().clamp(max=self.filled("window"))

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        w = self.filled("window")
        return [KeyInterval(first=i - w + 1), capped(i - w, w)]


@dataclass(frozen=True, kw_only=True)
class LeakyReRope(Window, Positions):
    """Distance seen: t for t < window, else window + (t - window) / stretch.

    Args:
        window: w; default half the trained length.
        stretch: k >= 1; the model reaches window + k (trained length - window) tokens back. `math.inf` ("inf" in JSON) shows
            all far keys at w, as ReRoPE does. A number, or one for each layer, each a number or one for each key head.
        stack: as in `ReRope`.

    Su, "Leaky ReRoPE" (2023).
    """

    name: ClassVar[str] = "leaky_rerope"
    summary: ClassVar[str] = "distances beyond w are divided"
    paper: ClassVar[str] = "Su 2023, ReRoPE (blog and code)"
    by_layer: ClassVar[tuple[str, ...]] = ("stretch",)

    window: int | None = None
    stretch: float | tuple[Any, ...] = 4.0
    stack: bool = False

    def validate(self) -> None:
        super().validate()
        for stretch in numbers(self.stretch):
            require_at_least(1, stretch=stretch)

    def reach(self, train_length: int) -> int | None:
        w, least = self.filled("window"), min(numbers(self.stretch))
        return None if math.isinf(least) else int(w + least * (train_length - w))

    def leaky(self, n: Tensor) -> Tensor:
        """n / stretch, with one more dimension where key heads differ."""
        if isinstance(self.stretch, tuple):
            return n.double()[..., None] / torch.tensor(self.stretch, dtype=torch.float64, device=n.device)
        return n.double() / self.stretch

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        t, w = i - j, self.filled("window")
        far = self.leaky(t - w)
        near = t.double().reshape(*t.shape, *[1] * (far.ndim - t.ndim))
        return torch.where(near < w, near, w + far)

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        w = self.filled("window")
        return [KeyInterval(first=i - w + 1), KeyInterval(last=i - w, query=lambda i: self.leaky(i - w) + w, key=self.leaky)]
