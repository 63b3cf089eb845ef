"""Scale-invariant attention: a logit map that depends on the distance between query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..slots.base import LogitMap
from ..slots.method import numbers, require_at_least, require_in, require_positive


@dataclass(frozen=True, kw_only=True)
class ScaleInvariant(LogitMap):
    """L_ij = a_t S_ij + m_t at distance t = |i - j|, so that of N(0, 1) logits every range [t, Δt) gets the same attention.

    Paper's form (Eq. 16):      a_t² = 2 [ln(1 + t/τ) - ln α + β/α],   m_t = -a_t² + β/α.
        Default α = β = e^{1/2}: a_0 = 1, m_0 = 0, the token itself does not change.
    Calibrated form, for logits ~ N(μ, σ²) and decay γ (used as soon as one of the three is given):
        L = μ + a_t (S - μ) + m_t,   a_t² = 1 + (2γ/σ²) ln(1 + t/τ),   m_t = -2γ ln(1 + t/τ);
        E[exp L] falls as (1 + t/τ)^-γ, so that ranges keep their share only for γ = 1;
        μ = 0, σ² = 1, γ = 1 is the paper's default; γ = 0 is plain attention.

    Args:
        tau: τ > 0, in tokens: distances well below it are hardly changed.
        alpha, beta: α, β > 0 with β >= α ln α; give both or neither.
        logit_mean, logit_variance: μ and σ² > 0; a number, or one per (layer, head).
        decay: γ >= 0.
        sink_tokens: the first keys of each sequence that keep their logit.
        offset: in tokens; the map acts on max(t - offset, 0), so that it can begin where a position remap does.
        strength: λ in [0, 1]; L_λ = (1 - λ) S + λ L.

    Anson, Wang & Aitchison, "Scale-invariant attention" (2025), Eq. 16, App. A and C.
    """

    name: ClassVar[str] = "scale_invariant"
    summary: ClassVar[str] = "gain and bias by distance, so that of N(0, 1) scores every range gets the same attention"
    blends: ClassVar[bool] = True
    paper: ClassVar[str] = "Anson, Wang & Aitchison 2025, Scale-invariant attention, arXiv:2505.17083"
    by_head: ClassVar[tuple[str, ...]] = ("logit_mean", "logit_variance")

    tau: float = 10.0
    alpha: float | None = None
    beta: float | None = None
    logit_mean: float | tuple[Any, ...] | None = None
    logit_variance: float | tuple[Any, ...] | None = None
    decay: float | None = None
    sink_tokens: int = 0
    offset: int = 0
    strength: float = 1.0

    def validate(self) -> None:
        require_positive(tau=self.tau, alpha=self.alpha, beta=self.beta)
        require_at_least(0, sink_tokens=self.sink_tokens, offset=self.offset)
        require_in("strength", self.strength, 0.0, 1.0)
        if (self.alpha is None) != (self.beta is None):
            raise ValueError("give both alpha and beta, or neither (the boundary condition a_0 = 1, m_0 = 0)")
        if self.alpha is not None and self.calibrated:
            raise ValueError(
                "alpha and beta (the paper's form) and logit_mean, logit_variance or decay (the calibrated form) "
                "exclude each other: give one group"
            )
        if self.alpha is not None and self.beta is not None and self.beta < self.alpha * math.log(self.alpha):
            raise ValueError(
                f"beta must be >= alpha ln(alpha) = {self.alpha * math.log(self.alpha):g}, or a_0² < 0; got {self.beta}"
            )
        if self.decay is not None:
            require_in("decay", self.decay, 0.0, math.inf)
        for value in numbers(self.logit_mean):
            if value is not None:
                require_in("logit_mean", value, -math.inf, math.inf)
        for value in numbers(self.logit_variance):
            require_positive(logit_variance=value)

    @property
    def calibrated(self) -> bool:
        return not (self.logit_mean is None and self.logit_variance is None and self.decay is None)

    @property
    def needs_training(self) -> bool:
        return self.strength > 0 and self.decay != 0 and self.logit_mean is None and self.logit_variance is None

    @property
    def identity_below(self) -> float:
        if self.strength == 0 or self.decay == 0:
            return math.inf
        return self.offset + 1 if self.alpha is None else 0  # max(t - offset, 0) is 0

    def tables(self, heads: int, length: int, device: torch.device, strength: Tensor | None = None) -> tuple[Tensor, Tensor]:
        t = (torch.arange(length, dtype=torch.float64, device=device) - self.offset).clamp(min=0)
        log = torch.log1p(t / self.tau)[None]
        if self.calibrated:
            mean, variance = (
                torch.as_tensor(v, dtype=torch.float64, device=device).reshape(-1, 1)
                for v in (self.logit_mean or 0.0, 1.0 if self.logit_variance is None else self.logit_variance)
            )
            decay = 1.0 if self.decay is None else self.decay
            gain = torch.sqrt(1 + 2 * decay / variance * log)
            bias = mean * (1 - gain) - 2 * decay * log
        else:
            alpha, beta = self.alpha or math.exp(0.5), self.beta or math.exp(0.5)
            square = (2 * (log - math.log(alpha) + beta / alpha)).clamp(min=0)  # rounding, where beta is at its bound
            gain, bias = torch.sqrt(square), beta / alpha - square
        share = self.strength if strength is None else strength
        return 1 + share * (gain - 1), share * bias
