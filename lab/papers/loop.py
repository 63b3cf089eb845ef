"""A small model and its training on batches that are drawn, where no recipe fits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(vocabulary: int, layers: int, width: int, heads: int, positions: int) -> LlamaForCausalLM:
    """A Llama with plain RoPE, MLPs of 4 widths, random weights and no special tokens."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=positions,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def fit(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, steps: int, warmup: float, dtype: str
) -> float:
    """Train on whatever `loss` draws next; the rate goes up over a share `warmup` of the steps, then down to 0.

    Args:
        dtype: "float32", or what autocast multiplies in.

    Returns:
        the mean loss of the last tenth of the steps.
    """
    model.train()
    rising = max(round(warmup * steps), 1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (steps - step) / max(steps - rising, 1))
    )
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(value.detach())
    model.eval()
    return float(torch.stack(losses[-max(steps // 10, 1) :]).mean())
