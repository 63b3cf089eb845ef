"""Which heads copy: that find the first reading of a passage and attend to what came next in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..geometry import Rows
from ..integration.model import Layer
from ..integration.observe import observe
from .copying import PASSAGE, SKIP, Copy, with_copies


def copying_heads(model: nn.Module, input_ids: Tensor) -> Tensor:
    """The mean probability that each head gives, while it reads a passage again, to the token it should expect next.

    The second half of the text is overwritten with passages of the first half, every other 128 tokens, nearest first: at
    distances from 256 tokens to almost the whole text. A model without a method, or with one: attention is the model's own.

    Args:
        input_ids: (1, length), of a length that the model knows, at least 1024; about 4096 is a good choice.

    Returns:
        float64 (layers, heads); NaN where a layer was not seen (one with a sliding window).
    """
    length, step = input_ids.shape[1], 2 * PASSAGE
    if input_ids.shape[0] != 1 or length < 1024:
        raise ValueError(f"copying heads are measured on one text of at least 1024 tokens, got {tuple(input_ids.shape)}")
    count = length // 2 // step
    targets = [length // 2 + step * n for n in range(count)]
    copies = [Copy(target - step * (count - 1 - n), target) for n, target in enumerate(targets)]
    found: dict[int, Tensor] = {}

    def seen(
        layer: Layer, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float, cap: float | None, out: Tensor
    ) -> None:
        key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
        total = torch.zeros(query.shape[1], dtype=torch.float64, device=query.device)
        for copy in copies:
            i = torch.arange(copy.position + SKIP, copy.position + PASSAGE - 1, device=query.device)
            logits = scaling * query[0, :, i].float() @ key[0].transpose(-1, -2)
            if cap:
                logits = cap * torch.tanh(logits / cap)
            future = torch.arange(key.shape[2], device=i.device) > i[:, None]
            p = torch.softmax(logits.masked_fill(future, -torch.inf), -1)
            expected = (i - copy.distance + 1)[None, :, None].expand(p.shape[0], -1, 1)
            total += p.gather(-1, expected).double().mean((1, 2))
        found[layer.index] = total / len(copies)

    ids, _ = with_copies(input_ids, copies)
    with torch.no_grad(), observe(model, seen) as layers:
        if not layers:
            raise ValueError("this model has no layer to measure: no causal full attention")
        config: Any = layers[0].module.config
        getattr(model, "base_model", model)(input_ids=ids, use_cache=False)
    missing = torch.full_like(next(iter(found.values())), torch.nan)
    return torch.stack([found.get(i, missing) for i in range(config.num_hidden_layers)]).cpu()
