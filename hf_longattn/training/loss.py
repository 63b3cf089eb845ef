"""The training loss, with logits of a few positions at a time, by position, and from a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.checkpoint import checkpoint

from ..evaluation.measures.losses import hidden_of, logits_of
from ..evaluation.tasks.sample import IGNORE
from ..integration.skip_masks import masks_of_jumps
from ..integration.verify import evaluating
from .recipe import Distill

#: Positions whose logits are held at a time.
CHUNK = 512
#: Parts of the window whose losses are logged apart.
PARTS = 4


class CausalLoss:
    """Stands in for a causal language model's forward: next-token loss, and the divergence from a teacher.

    Logits are made and differentiated CHUNK positions at a time, so memory does not grow with length x vocabulary.

    Args:
        model: a causal language model (inside PEFT's wrapper, if any).
        distill: how the teacher counts; None for no teacher.
        teacher: opens the context in which `model` is the teacher, which has no dropout.
        jumps: whether the positions of rows jump. Each row is one text all the same, in which a sliding window counts
            positions; the teacher reads it at consecutive ones.
        part: which part of its windows this process holds, and how many parts there are.
    """

    def __init__(
        self,
        model: Any,
        distill: Distill | None = None,
        teacher: Callable[[], AbstractContextManager[Any]] | None = None,
        jumps: bool = False,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.model, self.distill, self.teacher, self.jumps, self.part = model, distill, teacher, jumps, part

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **inputs: Any,
    ) -> dict[str, Tensor]:
        """The loss per predicted token (of `num_items_in_batch`, if given: a share of an accumulated batch).

        Args:
            input_ids, labels: int64 (batch, length); labels as the ids, IGNORE where there is no loss.
            shift_labels: likewise what each token is to predict, where windows are in parts.

        Returns:
            loss, with gradient; cross_entropy and divergence, the sums of each over tokens, and tokens, their number, each
            (PARTS,) by position in the window.
        """
        inputs = {name: x for name, x in inputs.items() if name in ("position_ids", "attention_mask") and x is not None}
        if self.jumps:
            inputs["attention_mask"] = masks_of_jumps(self.model, input_ids, inputs["position_ids"])
        taught = None
        if self.distill is not None and self.teacher is not None:
            own = {} if self.jumps else inputs
            with torch.no_grad(), self.teacher(), evaluating(self.model):
                taught = hidden_of(self.model, input_ids=input_ids, use_cache=False, **own)
        hidden = hidden_of(self.model, input_ids=input_ids, use_cache=False, **inputs)
        labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:] if shift_labels is None else shift_labels
        rank, parts = self.part
        position = torch.arange(labels.shape[1], device=labels.device) + rank * labels.shape[1]
        part = (position * PARTS // (parts * labels.shape[1] - 1)).clamp(max=PARTS - 1)
        sums = [torch.zeros(PARTS, device=labels.device) for _ in range(2)]
        total = torch.zeros((), device=labels.device)
        for first in range(0, labels.shape[1], CHUNK):
            chunk = slice(first, first + CHUNK)
            given = hidden[:, chunk], None if taught is None else taught[:, chunk], labels[:, chunk]
            losses = checkpoint(self._losses, *given, use_reentrant=False)
            for i, loss in enumerate(losses):
                sums[i].index_add_(0, part[chunk], loss.detach().sum(0))
            weight = 0.0 if self.distill is None else self.distill.weight
            total = total + (1 - weight) * losses[0].sum()
            if taught is not None:
                total = total + weight * losses[1].sum()
        counts = torch.zeros(PARTS, device=labels.device).index_add_(0, part, (labels != IGNORE).sum(0).float())
        items = torch.as_tensor(counts.sum() if num_items_in_batch is None else num_items_in_batch, device=total.device)
        return {"loss": total / items.clamp(min=1), "cross_entropy": sums[0], "divergence": sums[1], "tokens": counts}

    def _losses(self, hidden: Tensor, taught: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and T² KL(teacher ‖ student) of each token, (batch, positions), 0 where there is no loss."""
        logits = logits_of(self.model, hidden)
        flat = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
        loss = flat.view_as(labels)
        if taught is None or self.distill is None:
            return loss, torch.zeros_like(loss)
        with torch.no_grad():
            target = torch.log_softmax(logits_of(self.model, taught) / self.distill.temperature, -1)
        given = torch.log_softmax(logits / self.distill.temperature, -1)
        divergence = kl_div(given, target, reduction="none", log_target=True).sum(-1)
        return loss, divergence.masked_fill(labels == IGNORE, 0.0) * self.distill.temperature**2


@contextmanager
def trained_by(model: nn.Module, loss: CausalLoss) -> Iterator[None]:
    """While open, calling `model` computes `loss`, inside every wrapper (PEFT, DDP), so that their hooks see the gradients."""
    model.forward = loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
