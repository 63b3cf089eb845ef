"""Muon for the matrices of a transformer, Adam for everything else, behind one optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .recipe import Muon as Settings


class MuonWithAdam(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW over one model; a scheduler sees the groups of both.

    Muon takes the matrices inside the layers; Adam the embedding, the head, and whatever is no matrix.
    """

    def __init__(self, model: Any, settings: Settings) -> None:
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and p is not embedding and p is not head]
        taken = {id(p) for p in (*matrices, embedding)}
        betas = (settings.betas[0], settings.betas[1])
        adam = [
            {"params": [embedding], "lr": settings.embedding_lr},
            {"params": [p for p in trained if id(p) not in taken], "lr": settings.other_lr},
        ]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=settings.matrix_lr, momentum=settings.momentum, weight_decay=settings.weight_decay),
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
