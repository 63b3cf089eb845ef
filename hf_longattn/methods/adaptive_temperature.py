"""Adaptive temperature: sharpen a row of attention by as much as its own entropy asks for."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import require_in
from .base import EntropyTemperature

PUBLISHED = (-0.037, 0.481, -2.3, 4.917, -1.791)


@dataclass(frozen=True, kw_only=True)
class AdaptiveTemperature(EntropyTemperature):
    """p = softmax(L), H = -Σ p ln p, output softmax(β L) with β = 1 if H <= threshold, else max(poly(H), 1).

    It acts last, on the logits that the softmax would see (after any logit map). Rows with one visible key have H = 0.

    Args:
        coefficients: of the polynomial, highest power first. The published one peaks at 2.39 (H = 4.1) and falls below 1
            at H = 5.95, about 380 equally weighted keys: beyond that the published rule does nothing.
        threshold: entropy in nats up to which a row is left alone.
        beyond: "published", or "saturate": hold the polynomial's largest value for every higher entropy.

    Veličković et al., "softmax is not enough (for sharp out-of-distribution)", Fig. 4, App. F.
    """

    name: ClassVar[str] = "adaptive_temperature"
    paper: ClassVar[str] = "softmax is not enough, Fig. 4 and App. F"

    coefficients: tuple[float, ...] = PUBLISHED
    threshold: float = 0.5
    beyond: str = "published"

    def validate(self) -> None:
        if not self.coefficients or not all(isinstance(c, (int, float)) and math.isfinite(c) for c in self.coefficients):
            raise ValueError(f"coefficients must be finite numbers, highest power first; got {self.coefficients!r}")
        require_in("threshold", self.threshold, 0.0, math.inf)
        if self.beyond not in ("published", "saturate"):
            raise ValueError(f"beyond must be 'published' or 'saturate', got {self.beyond!r}")

    def factor(self, entropy: Tensor) -> Tensor:
        held = entropy
        if self.beyond == "saturate":
            held = entropy.clamp(max=peak(self.coefficients, self.threshold))
        return torch.where(entropy > self.threshold, _polynomial(self.coefficients, held).clamp(min=1), 1.0)


@functools.cache
def peak(coefficients: tuple[float, ...], threshold: float) -> float:
    """The entropy at which the polynomial is largest, between the threshold and 16 nats (9 million equal keys)."""
    grid = torch.linspace(threshold, max(threshold, 16.0), 100_001, dtype=torch.float64)
    return float(grid[_polynomial(coefficients, grid).argmax()])


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.zeros_like(x)
    for coefficient in coefficients:
        value = value * x + coefficient
    return value
