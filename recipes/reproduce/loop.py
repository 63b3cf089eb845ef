"""A small model over bytes and its training on batches that are drawn, where no recipe fits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM


def byte_llama(layers: int, width: int, heads: int, positions: int) -> LlamaForCausalLM:
    """A Llama with plain RoPE over the tokens of `ByT5Tokenizer(extra_ids=0)`, MLPs of 4 widths, random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ByT5Tokenizer(extra_ids=0)),
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


def fit(model: nn.Module, loss: Callable[[], Tensor], steps: int, learning_rate: float, warmup: float) -> float:
    """AdamW on whatever `loss` draws next, in bfloat16 as autocast has it; the rate goes up over a share `warmup` of the
    steps, then down to 0.

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
        with torch.autocast("cpu", torch.bfloat16):
            value = loss()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(value.detach())
    model.eval()
    return float(torch.stack(losses[-max(steps // 10, 1) :]).mean())
