"""ReRoPE and Leaky ReRoPE: exact distances near the query, capped or stretched ones beyond a window."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..config import ModelFacts
from .base import Band, Positions


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


def capped(last: Tensor, w: int) -> Band:
    """Keys up to `last`, all of them at distance w: the query turned to w, keys to 0."""
    return Band(last=last, query=lambda i: torch.full_like(i, w).double(), key=lambda j: torch.zeros_like(j).double())


def known(window: int | None) -> int:
    if window is None:
        raise ValueError("give window, or put the method into a model, which fills it in by itself")
    return window


def check_window(window: int | None) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be an integer >= 1, got {window!r}")


def check_at_least_one(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
            raise ValueError(f"{name} must be >= 1, got {value!r}")


def check_remap(name: str, facts: ModelFacts, stack: bool) -> None:
    """Refuse what a remap of rotary distances cannot be put on top of."""
    if facts.rope_type is None:
        raise ValueError(f"{name} remaps rotary distances, and this model has no rotary position encoding")
    if facts.rope_type not in ("default", "proportional", "llama3") and not stack:
        raise ValueError(
            f"the model scales its rotary positions already (rope_type {facts.rope_type!r}) and {name} would do it again. "
            "Pass stack=True if you want both, or load the model with its default rope"
        )


def bind_window(method, facts: ModelFacts, share: int, may_equal: bool = False):  # type: ignore[no-untyped-def]
    """Fill in window = trained length / share, and hold it below the trained length."""
    if method.window is None:
        if facts.train_length is None:
            raise ValueError(f"{method.name} needs window: the model's config names no maximum length")
        return dataclasses.replace(method, window=max(facts.train_length // share, 1))
    if facts.train_length is not None and method.window >= facts.train_length + may_equal:
        raise ValueError(
            f"window {method.window} must be {'at most' if may_equal else 'below'} the trained length {facts.train_length}: "
            "beyond it are the distances that the model does not know"
        )
    return method
