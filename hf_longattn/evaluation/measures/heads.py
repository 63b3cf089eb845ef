"""Copying heads: those that find the first reading of a passage and attend to the token that followed there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...config import NO_METHOD
from ...core.call import Call
from ...core.tracing import wide_device, widened
from ...integration.layers import Layer
from ...integration.model_facts import num_layers
from ...integration.observer import observe
from .blocks import blocks
from .copies import PASSAGE, SKIP, Copy, with_copies


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
    again = [range(c.position + SKIP, c.position + PASSAGE - 1) for c in copies]
    reading = torch.tensor([i for each in again for i in each], device="cpu")
    expected = torch.tensor([i - c.distance + 1 for c, each in zip(copies, again, strict=True) for i in each], device="cpu")
    result: dict[int, Tensor] = {}

    def seen(layer: Layer, call: Call, output: Tensor) -> None:
        total = torch.zeros(call.query.shape[1], dtype=torch.float64, device=wide_device(call.query.device))
        after = expected.to(call.query.device)
        for block in blocks(call.under(NO_METHOD), reading.to(after.device)):
            here, after = after[: len(block.which)], after[len(block.which) :]
            log_p = block.log_p.gather(-1, here[None, None, :, None].expand(1, len(total), -1, 1))
            total += widened(log_p.exp()).sum((0, 2, 3))
        result[layer.index] = total / len(reading)

    ids, _ = with_copies(input_ids, copies)
    with torch.no_grad(), observe(model, seen) as layers:
        getattr(model, "base_model", model)(input_ids=ids, use_cache=False)
    return by_layer(result, layers)


def by_layer(values: Mapping[int, Tensor], observed: Sequence[Layer]) -> Tensor:
    """Values by the number of the layer as one tensor, over all layers of the model; NaN where a layer was not seen."""
    missing = torch.full_like(next(iter(values.values())), torch.nan)
    return torch.stack([values.get(i, missing) for i in range(num_layers(observed[0].config))]).cpu()
