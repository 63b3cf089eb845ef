"""Loss by position, in one forward pass, without ever holding all logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def last_hidden(model: Any, input_ids: Tensor) -> Tensor:
    """The hidden states that the head reads, (batch, length, hidden)."""
    return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """The model's logits, float32, from some of its last hidden states; with its final softcap, if it has one."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


@torch.inference_mode()
def token_losses(model: Any, input_ids: Tensor, chunk: int = 512, last: int | None = None) -> Tensor:
    """The negative log-likelihood (nats) of every token given those before it.

    Args:
        model: a causal language model with its head in `get_output_embeddings()`.
        input_ids: (batch, length).
        chunk: positions whose logits are held at a time.
        last: only these many last tokens; the head, half the work of a small model, is run for no others. None means all.

    Returns:
        float32 (batch, length); the first column, which nothing predicts, is NaN, and so is what `last` leaves out.
    """
    hidden = last_hidden(model, input_ids)
    losses = torch.full(input_ids.shape, torch.nan, dtype=torch.float32, device=input_ids.device)
    begin = 0 if last is None else max(input_ids.shape[1] - 1 - last, 0)
    for first in range(begin, input_ids.shape[1] - 1, chunk):
        end = min(first + chunk, input_ids.shape[1] - 1)
        logits, target = logits_of(model, hidden[:, first:end]), input_ids[:, first + 1 : end + 1]
        losses[:, first + 1 : end + 1] = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return losses


def loss_by_position(losses: Tensor, edges: Sequence[int], leave_out: Tensor | None = None) -> list[float]:
    """Mean loss of the tokens in each [edges[i], edges[i + 1]); `leave_out` (length,) marks positions that do not count."""
    counts = ~losses.isnan()
    if leave_out is not None:
        counts &= ~leave_out
    return [
        float(losses[:, a:b][counts[:, a:b]].mean()) if counts[:, a:b].any() else float("nan")
        for a, b in itertools.pairwise(edges)
    ]
