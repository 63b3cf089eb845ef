"""Windows and sinks: attention that sees only the last keys, or the last and the first few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..slots.base import KeyInterval, Visibility, Window, capped, near
from ..slots.method import ModelFacts, require_at_least


@dataclass(frozen=True, kw_only=True)
class Windowed(Window, Visibility):
    """The last `window` keys, the token itself included; where a mask lets tokens look ahead, the next ones too.

    Args:
        window: w; default half the trained length, at most all of it.
    """

    name: ClassVar[str] = "windowed"
    summary: ClassVar[str] = "the last w keys"
    paper: ClassVar[str] = "Li et al. 2025, Information Entropy Invariance, arXiv:2501.08570"
    may_be_whole: ClassVar[bool] = True

    window: int | None = None

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < self.filled("window")

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        return [near(i, self.filled("window"))]


@dataclass(frozen=True, kw_only=True)
class Streaming(Window, Visibility):
    """The first `sinks` keys and the last `window`, with distances as in the shortened cache:

    a query sees a sink at min(i, sinks + window - 1) - j, and recent keys at t.

    Args:
        window: w; default half the trained length; window + sinks must not exceed it.
        sinks: the first keys of each sequence.
        stack: allow it beside the model's own rope scaling.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024).
    """

    name: ClassVar[str] = "streaming"
    summary: ClassVar[str] = "the first 4 keys and the last w"
    paper: ClassVar[str] = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453"
    may_be_whole: ClassVar[bool] = True

    window: int | None = None
    sinks: int = 4
    stack: bool = False

    def validate(self) -> None:
        super().validate()
        require_at_least(0, sinks=self.sinks)

    def bind(self, facts: ModelFacts) -> Self:
        bound = super().bind(facts)
        if facts.train_length is not None and bound.filled("window") + self.sinks > facts.train_length:
            raise ValueError(
                f"window {bound.window} and {self.sinks} sinks together exceed the trained length {facts.train_length}"
            )
        return bound

    def cap(self, i: Tensor) -> Tensor:
        """The position of the query as its sinks see it."""
        return i.clamp(max=self.sinks + self.filled("window") - 1)

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() < self.filled("window")) | ((j < self.sinks) & (j < i))

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i - j < self.filled("window"), i - j, self.cap(i) - j).double()

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        w = self.filled("window")
        return [near(i, w), KeyInterval(last=(i - w).clamp(max=self.sinks - 1), query=lambda i: self.cap(i).double())]


@dataclass(frozen=True, kw_only=True)
class LmInfinite(Streaming):
    """The first `sinks` keys and the last `window`, no distance beyond `window`.

    Args:
        window: w; default the trained length.
        sinks: n_g, 5 as published.

    Han et al., "LM-Infinite: Simple On-the-Fly Length Generalization for Large Language Models" (2024).
    """

    name: ClassVar[str] = "lm_infinite"
    summary: ClassVar[str] = "the first 5 keys and the last w, no distance beyond w"
    paper: ClassVar[str] = "Han et al. 2024, LM-Infinite, arXiv:2308.16137"
    default_divisor: ClassVar[int] = 1

    sinks: int = 5

    def bind(self, facts: ModelFacts) -> Self:
        return Window.bind(self, facts)  # the sinks lie inside

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).double().clamp(max=self.filled("window"))

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        w = self.filled("window")
        return [near(i, w), capped((i - w).clamp(max=self.sinks - 1), w)]
