"""Methods of one's own with learned parameters that no method of the package has; tests that use them register them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_longattn.slots.base import LengthTemperature, LogitMap
from hf_longattn.slots.method import ModelFacts


def _all(parameter: Tensor) -> Tensor:
    return parameter


class Shared(nn.Module):
    """A learned number that all heads share, used as it is or by way of `own`, and a network of it."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.scale, self.inner = whole, nn.Parameter(torch.tensor(1.2)), nn.Linear(1, 1)

    def forward(self, factor: Tensor, own: Callable[[Tensor], Tensor] = _all) -> Tensor:
        scale = self.scale if self.whole else own(self.scale)
        return factor * (scale + self.inner(scale[None]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedFactor(LengthTemperature):
    """Root of the length, times a learned number."""

    name: ClassVar[str] = "shared_factor"
    whole: bool = True

    def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
        return (n / train_length).sqrt()

    def module(self, facts: ModelFacts) -> nn.Module:
        return Shared(self.whole)


def kerple(kind: str, r: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    """The bias of each head (heads, 1) at the distances t."""
    return -r[0] * torch.log1p(r[1] * t) if kind == "log" else -r[0] * t ** r[1]


class Curves(nn.Module):
    """The logarithms of r1 and r2 of each head, from 0."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__()
        self.kind = kind
        self.r1, self.r2 = (nn.Parameter(torch.zeros(heads)) for _ in range(2))

    def forward(self, gain: Tensor, bias: Tensor, own: Callable[[Tensor], Tensor] = _all) -> tuple[Tensor, Tensor]:
        t = torch.arange(bias.shape[-1], dtype=bias.dtype, device=bias.device)
        r1, r2 = (own(x).to(bias.dtype).exp()[:, None] for x in (self.r1, self.r2))
        return gain, kerple(self.kind, (r1, r2), t)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kerple(LogitMap):
    """L_ij = S_ij - r1 log(1 + r2 t), or S_ij - r1 t^r2, with r1, r2 > 0 learned in each head.

    Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation" (2022), arXiv:2205.09921.
    """

    name: ClassVar[str] = "kerple"
    kind: str = "log"
    sink_tokens: int = 0

    @property
    def head_dependent(self) -> bool:
        return True

    def tables(self, heads: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        one = torch.ones(1, length, dtype=torch.float64, device=device)
        t = torch.arange(length, dtype=torch.float64, device=device)
        return one, kerple(self.kind, (one[:, :1], one[:, :1]), t).expand(heads, -1)

    def module(self, facts: ModelFacts) -> nn.Module:
        return Curves(self.kind, facts.num_heads)


METHODS = (SharedFactor, Kerple)
