"""Loss by position, in one forward pass, without ever holding all logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def token_losses(model: Any, input_ids: Tensor, chunk: int = 512) -> Tensor:
    """The negative log-likelihood (nats) of every token given those before it.

    Args:
        model: a causal language model with its head in `get_output_embeddings()`.
        input_ids: (batch, length).
        chunk: positions whose logits are held at a time.

    Returns:
        float32 (batch, length); the first column, which nothing predicts, is NaN.
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    head, cap = model.get_output_embeddings(), getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    losses = torch.full(input_ids.shape, torch.nan, dtype=torch.float32, device=input_ids.device)
    for first in range(0, input_ids.shape[1] - 1, chunk):
        last = min(first + chunk, input_ids.shape[1] - 1)
        logits = head(hidden[:, first:last]).float()
        if cap:
            logits = cap * torch.tanh(logits / cap)
        target = input_ids[:, first + 1 : last + 1]
        losses[:, first + 1 : last + 1] = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
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
