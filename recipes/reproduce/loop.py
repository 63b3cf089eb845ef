"""Training of small models on batches that are drawn, where no recipe fits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def fit(model: nn.Module, loss: Callable[[], Tensor], steps: int, learning_rate: float, warmup: float) -> float:
    """AdamW on whatever `loss` draws next; the rate goes up over a share `warmup` of the steps, then down to 0.

    Returns:
        the mean loss of the last tenth of the steps.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    rising = max(round(warmup * steps), 1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (steps - step) / max(steps - rising, 1))
    )
    losses = []
    for _ in range(steps):
        value = loss()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(value.detach())
    model.eval()
    return float(torch.stack(losses[-max(steps // 10, 1) :]).mean())
