"""CosScale: cosine similarity with a constant scale in place of the dot product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..slots.base import Score
from ..slots.method import ModelFacts, require_positive


@dataclass(frozen=True, kw_only=True)
class CosScale(Score):
    """S = c cos(q, k). A rotation keeps norms, so normalising after RoPE equals normalising before it.

    Args:
        scale: c > 0; 128 in the paper, 16 with windowed attention.
        stack: allow it where the model's own temperature acts through the norm of q and k, which this removes.

    In half precision the fused kernels get unit vectors that are rounded once more, and c multiplies that: on random vectors
    the error is 2 (c = 16) to 5 (c = 128) times that of plain sdpa; backend="tiled" folds in float32 and avoids it.

    "Information Entropy Invariance", Sections 2.3 and 3.2. A model must be trained (or adapted) with it.
    """

    name: ClassVar[str] = "cosscale"
    summary: ClassVar[str] = "c cos(q, k)"
    paper: ClassVar[str] = "Li et al. 2025, Information Entropy Invariance, arXiv:2501.08570"

    scale: float = 128.0
    stack: bool = False

    def validate(self) -> None:
        require_positive(scale=self.scale)

    @property
    def needs_training(self) -> bool:
        return True

    def bind(self, facts: ModelFacts) -> Self:
        if facts.own_temperature and not self.stack:
            raise ValueError(
                f"the model has a temperature of its own ({facts.own_temperature}), which acts through the norms that "
                "cosscale removes. Pass stack=True if that is what you want"
            )
        return self

    def fold(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return _unit(query), _unit(key), self.scale

    @property
    def cosine(self) -> float:
        return self.scale


def _unit(x: Tensor) -> Tensor:
    """x / |x|; a zero vector stays zero, with a finite gradient. Norms in float32 at least."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x / torch.where(norm > 0, norm, 1)).to(x.dtype)
