"""LongPPL: perplexity on the tokens that far context helps with.

Most tokens of a long text are predicted as well from the last few thousand tokens, so their loss says nothing about far
context. Key tokens are those that it pays for: the model is surer of them with the whole text before them than with its last
`context` tokens alone, and sure of them at all.

Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?" (2024), Sections 2.3 and 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .losses import token_losses

#: By how many nats far context must help, and the loss below which a token counts as predicted, as published.
GAP, CERTAIN = 2.0, 2.0


def short_losses(model: Any, input_ids: Tensor, context: int = 4096, stride: int = 1024) -> Tensor:
    """The loss of every token given only tokens near it: at least context - stride of those before it, at most context.

    Args:
        input_ids: (batch, length).
        stride: tokens between the starts of the windows that are read, each of `context` tokens; less than context.

    Returns:
        float32 (batch, length); the first column, which nothing predicts, is NaN.
    """
    if not 1 <= stride < context:
        raise ValueError(f"stride must lie in [1, {context - 1}], got {stride}")
    length = input_ids.shape[1]
    losses = token_losses(model, input_ids[:, :context])
    losses = torch.nn.functional.pad(losses, (0, max(length - context, 0)), value=torch.nan)
    for end in range(context + stride, length + stride, stride):
        end, first = min(end, length), end - stride
        window = token_losses(model, input_ids[:, end - context : end], last=end - first)
        losses[:, first:end] = window[:, first - end :]
    return losses


def key_tokens(long: Tensor, short: Tensor, gap: float = GAP, certain: float = CERTAIN) -> Tensor:
    """bool, like `long`: which tokens far context helps with, by their losses with and without it (nats)."""
    return (short - long > gap) & (long < certain)


def long_loss(losses: Tensor, keys: Tensor) -> float:
    """Mean loss (nats) of the key tokens, whose exponential is LongPPL; NaN without any."""
    return float(losses[keys].mean()) if bool(keys.any()) else float("nan")


def long_ce_weights(long: Tensor, short: Tensor, most: float = 5.0) -> Tensor:
    """LongCE's weight of each token in a training loss: min(P(token | all) / P(token | near), most); NaN counts as 0."""
    return (short - long).exp().clamp(max=most).nan_to_num(0.0)
