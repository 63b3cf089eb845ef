"""YaRN only beyond the trained length: rows within it keep the model's own RoPE, and so their logits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..slots.base import KeyInterval, Positions
from ..slots.method import ModelFacts, require_at_least, require_in, require_positive

#: Beyond every position.
NEVER = 1 << 30


@dataclass(frozen=True, kw_only=True)
class YarnBeyond(Positions):
    """Rows at positions i < train_length see RoPE as it is; the others see query and keys as YaRN rotates and scales them.

    Distances stay as they are. All keys of one row are rotated in the same way, so that a row beyond computes what stock YaRN
    does from the same hidden states. YaRN turns pair f at the frequency θ_f (1 - r_f + r_f / factor), where the ramp r_f grows
    from 0 to 1 between the pairs that turn beta_fast and beta_slow times within the trained length, and multiplies rotated
    queries and keys by a factor.

    Args:
        factor: >= 1, how many times the trained length is to be read.
        train_length: L; default the model's.
        beta_fast, beta_slow: turns within L.
        attention_factor: None: 0.1 ln(factor) + 1. Its square is a temperature on the scores of what is rotated.
        truncate: round the ramp's ends to whole pairs, as published code does.

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), Sections 3.2 and 3.4; applied by
    row here, where it is published for whole texts.
    """

    name: ClassVar[str] = "yarn_beyond"
    summary: ClassVar[str] = "YaRN only in rows beyond the trained length"
    paper: ClassVar[str] = "Peng et al. 2023, YaRN: Efficient Context Window Extension, arXiv:2309.00071"

    factor: float = 2.0
    train_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def validate(self) -> None:
        require_in("factor", self.factor, 1.0, math.inf)
        require_positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow, attention_factor=self.attention_factor)
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow must be below beta_fast, got {self.beta_slow} and {self.beta_fast}")
        require_at_least(1, train_length=self.train_length)

    @property
    def own_temperature(self) -> str | None:
        return None if self.scale == 1 else f"{self.name}'s attention factor"

    def bind(self, facts: ModelFacts) -> Self:
        bound = super().bind(facts)
        if facts.rope_type != "default":
            raise ValueError(
                f"{self.name} takes the frequencies of plain RoPE, and this model's rope_type is {facts.rope_type!r}"
            )
        if self.train_length is None and facts.train_length is None:
            raise ValueError(f"{self.name} needs train_length: the model's config names no maximum length")
        return dataclasses.replace(bound, train_length=self.train_length or facts.train_length)

    def reach(self, train_length: int) -> int | None:
        return int(round(self.factor * train_length, 6))  # a factor to / train_length may be rounded down

    @property
    def scale(self) -> float:
        """The factor on rotated queries and keys."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor

    def spectrum(self, inv_freq: Tensor) -> tuple[Tensor, float]:
        pairs = inv_freq.shape[0]
        if pairs <= 1:  # the fastest one, which YaRN leaves as it is
            return inv_freq, self.scale
        step = -inv_freq[-1].abs().log() / (pairs - 1)  # of the logarithms of the frequencies, from 0 on
        low, high = (
            (math.log(self.filled("train_length") / (2 * math.pi * b))) / step for b in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = low.floor(), high.ceil()
        low, high = low.clamp(min=0), high.clamp(max=2 * pairs - 1)
        width = torch.where(low == high, 0.001, high - low)
        ramp = ((torch.arange(pairs, device=inv_freq.device) - low) / width).clamp(0, 1)
        return inv_freq * (1 - ramp + ramp / self.factor), self.scale

    @property
    def identity_below(self) -> float:
        return self.train_length or 0

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).double()

    def rescaled(self, i: Tensor, j: Tensor) -> Tensor:
        return (i >= self.filled("train_length")) & torch.ones_like(j, dtype=torch.bool)

    def intervals(self, i: Tensor) -> list[KeyInterval]:
        late = i >= self.filled("train_length")
        within, beyond = torch.where(late, -1, NEVER), torch.where(late, 0, NEVER)
        return [
            KeyInterval(last=within),
            KeyInterval(first=beyond, query=Tensor.double, key=Tensor.double, spectrum=self.spectrum),
        ]
