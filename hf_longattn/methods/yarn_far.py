"""YaRN only for far keys: near keys as the model rotates them, those between at one known distance."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..slots.base import Band
from ..slots.method import ModelFacts
from ..slots.remap import bind_window, check_at_least_one, check_window, known
from .yarn import YarnPositions


@dataclass(frozen=True, kw_only=True)
class YarnFar(YarnPositions):
    """Three bands of keys, by their distance t from the query:

        near    t < window             RoPE as it is
        middle  window <= t < border   RoPE at the distance window + (t - window) / stretch
        far     border <= t            YaRN's frequencies, at the distance as it is

    Args:
        window: w; default half the trained length.
        border: b >= w, from where on YaRN's frequencies are used; default the trained length. Equal to window: two bands.
        stretch: of the middle band; "inf", the default, shows all its keys at w.
        attention_factor: on far keys and queries; None: YaRN's 0.1 ln(factor) + 1. Default 1: far scores keep their size.
        factor, train_length, beta_fast, beta_slow, truncate: see `YarnPositions`.

    Ours: ReRoPE (Su 2023) up to the trained length, YaRN (Peng et al. 2023, Section 3.2) beyond it, by distance.
    """

    name: ClassVar[str] = "yarn_far"
    paper: ClassVar[str] = "this package; of Su 2023, ReRoPE, and Peng et al. 2023, YaRN, arXiv:2309.00071"

    window: int | None = None
    border: int | None = None
    stretch: float = math.inf
    attention_factor: float | None = 1.0

    def validate(self) -> None:
        super().validate()
        check_window(self.window)
        check_at_least_one(stretch=self.stretch)
        if self.border is not None and self.border < (self.window or 1):
            raise ValueError(f"border must be at least window ({self.window or 1}), got {self.border}")

    def bind(self, facts: ModelFacts) -> Self:
        method = bind_window(super().bind(facts), facts, 2)
        return method if method.border is not None else dataclasses.replace(method, border=method.train_length)

    def _middle(self, t: Tensor) -> Tensor:
        """The distance shown for keys of the middle band."""
        return known(self.window) + (t - known(self.window)).double() / self.stretch

    @property
    def identity_below(self) -> float:
        return self.window or 0

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        t = i - j
        between = (t >= known(self.window)) & (t < known(self.border))
        return torch.where(between, self._middle(t), t.double())

    def rescaled(self, i: Tensor, j: Tensor) -> Tensor:
        return i - j >= known(self.border)

    def bands(self, i: Tensor) -> list[Band]:
        w, b = known(self.window), known(self.border)
        near = Band(first=i - w + 1)
        middle = Band(first=i - b + 1, last=i - w, query=self._middle, key=lambda j: j.double() / self.stretch)
        far = Band(last=i - b, query=Tensor.double, key=Tensor.double, spectrum=self.spectrum)
        return [near, middle, far] if b > w else [near, far]
