"""Attention sink: one more term in the softmax's denominator, so that a head may attend to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..slots.base import Sink
from ..slots.learned import HeadShift
from ..slots.method import ModelFacts, numbers, require_in

#: Untrained, sinks up to this change a pretrained model by hundredths of a nat (docs/reference/methods/attention_sink.md).
HARDLY_HARMS = 0.0


@dataclass(frozen=True, kw_only=True)
class AttentionSink(Sink):
    """p_j = exp(L_j) / (exp(s) + Σ exp(L)), so that the output is that of plain attention times σ(lse - s).

    s is neither scaled nor mapped: the other slots act on keys alone. A row without keys stays 0.

    Args:
        logit: s, a number, or one per (layer, head). 0 is "softmax off by one", to train from scratch; -6 is where to start
            in a pretrained model; -30 is the identity.
        learned: a learned addend to it per head, starting at 0.

    OpenAI, gpt-oss (2025), where s is learned; Miller, "Attention Is Off By One" (2023), where it is 0.
    """

    name: ClassVar[str] = "attention_sink"
    summary: ClassVar[str] = "a fixed or learned term in the denominator, one per head"
    paper: ClassVar[str] = "OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card, arXiv:2508.10925"
    by_head: ClassVar[tuple[str, ...]] = ("logit",)

    logit: float | tuple[Any, ...] = 0.0
    learned: bool = False

    def validate(self) -> None:
        for value in numbers(self.logit):
            require_in("logit", value, -math.inf, math.inf)

    @property
    def needs_training(self) -> bool:
        return any(value > HARDLY_HARMS for value in numbers(self.logit))

    def module(self, facts: ModelFacts) -> nn.Module | None:
        return HeadShift(facts.num_heads) if self.learned else None

    def logits(self, heads: int, like: Tensor) -> Tensor:
        return torch.as_tensor(self.logit, dtype=like.dtype, device=like.device).expand(heads)
