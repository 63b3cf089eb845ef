"""Intervals for means over few documents and for shares of few trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

#: 97.5 % quantiles of Student's t by degrees of freedom, 1 to 30.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z = 1.959964


#: Nats per token that a setting may cost within the trained length: 2 % of perplexity.
TOLERANCE = 0.02


def mean_of(values: Iterable[float]) -> float | None:
    """The mean; None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half-width of its 95 % t interval; the latter is NaN for a single value.

    Raises:
        ValueError: no values.
    """
    n = len(values)
    if not n:
        raise ValueError("no values to average")
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    quantile = _T[n - 2] if n - 2 < len(_T) else _Z + (_Z**3 + _Z) / (4 * (n - 1))
    return mean, quantile * deviation / math.sqrt(n)


def wilson(hits: float, trials: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share; wider than need be where a trial can be a hit in part."""
    share, z = hits / trials, _Z
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(centre - half, 0.0), min(centre + half, 1.0)
