"""Muon for the matrices of a transformer, Adam for everything else, behind one optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_longattn.checks import device_of
from hf_longattn.core.kernels.precision import multiplies_fast


@dataclass
class Muon:
    """Learning rates of the 162M model of the scale-invariant-attention paper; trainer.learning_rate is not used."""

    matrix_lr: float = 0.02
    momentum: float = 0.95
    embedding_lr: float = 0.3
    other_lr: float = 0.002
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0


class MuonWithAdam(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW over one model; a scheduler sees the groups of both.

    Muon takes the matrices inside the layers; Adam the embedding, the head, and whatever is no matrix.
    """

    def __init__(self, model: Any, settings: Muon) -> None:
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and p is not embedding and p is not head]
        taken = {id(p) for p in (*matrices, embedding)}
        betas = (settings.betas[0], settings.betas[1])
        adam = [
            {"params": [embedding], "lr": settings.embedding_lr},
            {"params": [p for p in trained if id(p) not in taken], "lr": settings.other_lr},
        ]
        muon = torch.optim.Muon if multiplies_fast("bfloat16", device_of("auto")) else Float32Muon
        self.parts: list[torch.optim.Optimizer] = [
            muon(matrices, lr=settings.matrix_lr, momentum=settings.momentum, weight_decay=settings.weight_decay),
            torch.optim.AdamW(
                [group for group in adam if group["params"]],
                lr=settings.other_lr,
                betas=betas,
                weight_decay=settings.weight_decay,
            ),
        ]
        super().__init__(trained, {})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share()


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon in float32: it works in bfloat16, which on a CPU without units for it takes half of a training step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                seen = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                seen.lerp_(p.grad, 1 - group["momentum"])
                change = orthogonal(
                    p.grad.lerp(seen, group["momentum"]), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(change, alpha=-group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix with its singular values brought near 1, by Newton-Schulz iterations, in its own dtype."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
