"""Adaptive temperature: sharpen a row of attention by a factor of its own entropy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy
import torch
from torch import Tensor

from ..slots.base import EntropyTemperature
from ..slots.method import require_in

PUBLISHED = (-0.037, 0.481, -2.3, 4.917, -1.791)
#: The lowest and the highest entropy that the polynomial is given, at which others are held; None: they are not.
ActiveRange: TypeAlias = tuple[float | None, float | None]


@dataclass(frozen=True, kw_only=True)
class AdaptiveTemperature(EntropyTemperature):
    """p = softmax(L), H = -Σ p ln p, output softmax(β L) with β = 1 if H <= threshold, else max(poly(H), 1).

    It acts last, on the logits that the softmax would see (after any logit map). Rows with one visible key have H = 0.

    Args:
        coefficients: of the polynomial, highest power first. The published one peaks at 2.42 (H = 4.4) and falls below 1
            at H = 5.95, about 380 equally weighted keys: beyond that the published rule changes nothing.
        threshold: entropy in nats up to which a row does not change.
        beyond: "published", or "saturate": hold the polynomial's largest value for every higher entropy.

    Veličković et al., "Softmax is not Enough (for Sharp Size Generalisation)", Fig. 4, App. F.
    """

    name: ClassVar[str] = "adaptive_temperature"
    summary: ClassVar[str] = "sharpens each row by its entropy; no change beyond 5.95 nats"
    paper: ClassVar[str] = "Veličković et al. 2024, Softmax is not Enough (for Sharp Size Generalisation), arXiv:2410.01104"

    coefficients: tuple[float, ...] = PUBLISHED
    threshold: float = 0.5
    beyond: str = "published"
    _range: ClassVar[ActiveRange]  # each instance's own; ClassVar, since a field would be a parameter

    def __post_init__(self) -> None:
        super().__post_init__()
        found = _active_range(self.coefficients, self.threshold, self.beyond == "saturate")
        object.__setattr__(self, "_range", found)  # here, because no graph can find the roots of a polynomial

    def validate(self) -> None:
        if not self.coefficients or not all(isinstance(c, (int, float)) and math.isfinite(c) for c in self.coefficients):
            raise ValueError(f"coefficients must be finite numbers, highest power first; got {self.coefficients!r}")
        require_in("threshold", self.threshold, 0.0, math.inf)
        if self.beyond not in ("published", "saturate"):
            raise ValueError(f"beyond must be 'published' or 'saturate', got {self.beyond!r}")

    @property
    def needs_training(self) -> bool:
        return self.coefficients == PUBLISHED  # another model's

    def factor(self, entropy: Tensor) -> Tensor:
        return self.prepared(entropy)(entropy)

    @property
    def polynomial(self) -> tuple[float, ...]:
        low, high = self._range
        return () if low is None else (low, math.inf if high is None else high, *self.coefficients)

    def prepared(self, like: Tensor) -> Callable[[Tensor], Tensor]:
        return functools.partial(self._factor, [like.new_full((), c) for c in self.coefficients])

    def _factor(self, coefficients: list[Tensor], entropy: Tensor) -> Tensor:
        """Compute the factor by Horner's rule, a step an operation: in decoding each is a kernel on a GPU."""
        low, high = self._range
        x = entropy if low is high is None else entropy.clamp(low, high)
        constant, *others = coefficients
        value = torch.add(others[0], x, alpha=self.coefficients[0]) if others else constant.expand_as(x)
        for coefficient in others[1:]:
            value = torch.addcmul(coefficient, value, x)
        return value if low is not None else value.clamp(min=1).masked_fill(entropy <= self.threshold, 1.0)


def fit_adaptive_temperature(
    logits: Iterable[Tensor], targets: Iterable[int], degree: int = 4, **parameters: Any
) -> AdaptiveTemperature:
    """The paper's fit (App. F) on recorded logits.

    Samples whose target holds the largest logit already are left out. For each other one, θ runs over 0.1, 0.2, ... 10,
    and the one that gives the target the largest probability is kept; 1/θ is then fitted as a polynomial in the entropy
    at θ = 1.

    Args:
        logits: one 1-D tensor per sample; lengths may differ.
        targets: the index that should be attended to, one per sample.
        degree: of the polynomial.
        parameters: further parameters of `AdaptiveTemperature`.

    Raises:
        ValueError: fewer usable samples than coefficients, a target that is none of its logits, or logits of another shape.
    """
    if not isinstance(degree, int) or degree < 0:
        raise ValueError(f"degree must be an integer >= 0, got {degree!r}")
    theta = torch.arange(1, 101, dtype=torch.float64, device="cpu") / 10
    entropies, inverse = [], []
    for row, target in zip(logits, targets, strict=True):
        if not isinstance(row, Tensor) or row.ndim != 1:
            raise ValueError(f"logits are a 1-D tensor for each sample, got {getattr(row, 'shape', type(row).__name__)}")
        if target not in range(len(row)):  # -1 would be the last
            raise ValueError(f"target {target!r} is the index of none of {len(row)} logits")
        row, target = row.double(), int(target)
        if int(row.argmax()) == target:
            continue
        p = torch.softmax(row, -1)
        entropies.append(float(-torch.special.xlogy(p, p).sum()))
        inverse.append(1 / float(theta[torch.log_softmax(row / theta[:, None], -1)[:, target].argmax()]))
    if len(entropies) <= degree:
        raise ValueError(
            f"only {len(entropies)} samples have a target that does not hold the largest logit; a fit of degree {degree} "
            f"needs more than {degree}"
        )
    coefficients = numpy.polyfit(entropies, inverse, degree)
    return AdaptiveTemperature(coefficients=tuple(float(c) for c in coefficients), **parameters)


@functools.cache
def _active_range(coefficients: tuple[float, ...], threshold: float, saturate: bool) -> ActiveRange:
    """The entropies between which the factor is the polynomial.

    At either end the polynomial is 1, or has the value that higher entropies keep. The lower end is None where there is no
    such range, as where the polynomial is above 1 at the threshold.
    """
    grid = numpy.linspace(threshold, max(threshold, 16.0), 100_001)  # 16 nats are 9 million equal keys
    top = float(grid[numpy.polyval(coefficients, grid).argmax()]) if saturate else None
    *higher, constant = coefficients
    roots = numpy.roots([*higher, constant - 1.0])
    crossings = sorted(
        float(x.real) for x in roots if abs(x.imag) < 1e-9 and threshold < x.real < (math.inf if top is None else top)
    )
    if numpy.polyval(coefficients, threshold) >= 1 or not 1 <= len(crossings) <= 2 - saturate:
        return None, top
    low, high = crossings[0], crossings[1] if len(crossings) == 2 else top
    inside = low + 1 if high is None else (low + high) / 2  # a crossing at the threshold itself may have been rounded away
    return (low, high) if numpy.polyval(coefficients, inside) > 1 else (None, top)
