"""Dual chunk attention: positions inside chunks, so that no distance exceeds the chunk size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..slots.base import KeyInterval, Positions
from ..slots.method import ModelFacts, require_at_least


@dataclass(frozen=True, kw_only=True)
class DualChunk(Positions):
    """With chunks of c = chunk - local tokens, the distance seen is

        same chunk, and keys ahead: t;   next chunk: min(i mod c + c, chunk) - j mod c;   older: min(2c - 1, chunk) - j mod c.

    Args:
        chunk: s, below the trained length; default three quarters of it.
        local: ℓ < s; distances up to ℓ stay exact across a chunk's edge. Default a sixteenth of the trained length.
        stack: allow it beside the model's own rope scaling.

    An et al., "Training-Free Long-Context Scaling of Large Language Models" (2024).
    """

    name: ClassVar[str] = "dual_chunk"
    summary: ClassVar[str] = "distances inside chunks"
    paper: ClassVar[str] = "An et al. 2024, Training-Free Long-Context Scaling of Large Language Models, arXiv:2402.17463"

    why_not_by_axis: ClassVar[str | None] = (
        "it counts from 0 in each chunk, and a picture may begin in one and reach into the next"
    )

    chunk: int | None = None
    local: int | None = None
    stack: bool = False

    def validate(self) -> None:
        require_at_least(1, chunk=self.chunk, local=self.local)
        if self.chunk is not None and self.local is not None and self.chunk <= self.local:
            raise ValueError(f"chunk must be larger than local, got {self.chunk} and {self.local}")

    def bind(self, facts: ModelFacts) -> Self:
        bound, length = super().bind(facts), facts.train_length
        if length is None and (self.chunk is None or self.local is None):
            raise ValueError("dual_chunk needs chunk and local: the model's config names no maximum length")
        if length is not None and self.chunk is not None and self.chunk >= length:
            raise ValueError(f"chunk {self.chunk} must be below the trained length {length}")
        chunk = self.chunk or max(int(length or 0) * 3 // 4, 2)
        return dataclasses.replace(bound, chunk=chunk, local=self.local or max(min(int(length or 0) // 16, chunk - 1), 1))

    @property
    def step(self) -> int:
        return self.filled("chunk") - self.filled("local")

    @property
    def identity_below(self) -> float:
        return 0 if self.chunk is None or self.local is None else min(self.chunk, 2 * self.step)

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        c, s = self.step, self.filled("chunk")
        apart = i // c - j // c
        older = min(2 * c - 1, s) - j % c
        return torch.where(apart <= 0, i - j, torch.where(apart == 1, (i % c + c).clamp(max=s) - j % c, older)).double()

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        c, s = self.step, self.filled("chunk")
        edge = i // c * c

        def inside(j: Tensor) -> Tensor:
            return (j % c).double()

        return [
            KeyInterval(first=edge),
            KeyInterval(edge - c, edge - 1, lambda i: (i % c + c).clamp(max=s).double(), inside),
            KeyInterval(last=edge - c - 1, query=lambda i: torch.full_like(i, min(2 * c - 1, s)).double(), key=inside),
        ]
