"""Loss by position, in one forward pass, without ever holding all logits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache

#: The KV cache of a text's first tokens. A layer with a sliding window holds that window alone.
Prefix: TypeAlias = DynamicCache


@torch.inference_mode()
def prefix_of(model: Any, input_ids: Tensor, chunk: int = 2048) -> Prefix:
    """The KV cache of a text (batch, length), read `chunk` tokens at a time, for `token_losses` and `answer_scores`, which
    leave it as it is."""
    cache = DynamicCache(config=model.config)
    for part in input_ids.split(chunk, 1):
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    return cache


def shortened(prefix: Prefix, length: int) -> Prefix:
    """A copy of its first tokens alone.

    Raises:
        RuntimeError: a layer's sliding window has forgotten them (transformers' own).
    """
    cache = copy.deepcopy(prefix)
    if length < (read := cache.get_seq_length()):
        cache.crop(length - read)
    return cache


def last_hidden(model: Any, input_ids: Tensor, prefill: int | None = None, prefix: Prefix | None = None) -> Tensor:
    """The hidden states that the head reads, (batch, length, hidden), NaN in the prefix; arguments as of `token_losses`."""
    if prefix is not None:
        cache, read = copy.deepcopy(prefix), prefix.get_seq_length()
        hidden = model.base_model(input_ids=input_ids[:, read:], past_key_values=cache, use_cache=True).last_hidden_state
        return torch.nn.functional.pad(hidden, (0, 0, read, 0), value=torch.nan)
    if prefill is None:
        return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    cache = DynamicCache(config=model.config)
    parts = [
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
        for part in input_ids.split(prefill, 1)
    ]
    return torch.cat(parts, 1)


class _Given(tuple[Tensor]):
    """What a base model returns, with its last hidden states and nothing else."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """The model's logits, float32, from some of its last hidden states.

    They come from the model's own forward, whose base model hands them on: some models scale or cap their logits there, or
    have a head of several layers, each in its own way.
    """
    base = model.base_model
    places = [base, *([base.decoder] if isinstance(getattr(base, "decoder", None), nn.Module) else [])]  # Bart's, OPT's
    before = [m.__dict__.get("forward") for m in places]  # accelerate's hooks stand there
    for module in places:
        module.forward = lambda *_, **__: _Given((hidden,))
    try:
        return type(model).forward(model, inputs_embeds=hidden).logits.float()  # not the instance's, which may be a loss
    finally:
        for module, forward in zip(places, before, strict=True):
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


@torch.inference_mode()
def token_losses(
    model: Any,
    input_ids: Tensor,
    chunk: int = 512,
    last: int | None = None,
    prefill: int | None = None,
    prefix: Prefix | None = None,
) -> Tensor:
    """The negative log-likelihood (nats) of every token given those before it.

    Args:
        model: a causal language model with its head in `get_output_embeddings()`.
        input_ids: (batch, length).
        chunk: positions whose logits are held at a time.
        last: only these many last tokens; the head, half the work of a small model, is run for no others. None means all.
        prefill: read the text through a cache, this many tokens at a time: the same losses, and layers with a sliding
            window of their own then cost time linear in the length. None means one pass without a cache.
        prefix: the KV cache of the text's first tokens, which are then not read again; losses behind it only.

    Returns:
        float32 (batch, length); the first column, which nothing predicts, is NaN, and so is what `last` leaves out.
    """
    hidden = last_hidden(model, input_ids, prefill, prefix)
    losses = torch.full(input_ids.shape, torch.nan, dtype=torch.float32, device=input_ids.device)
    begin = 0 if last is None else max(input_ids.shape[1] - 1 - last, 0)
    for first in range(begin, input_ids.shape[1] - 1, chunk):
        end = min(first + chunk, input_ids.shape[1] - 1)
        logits, target = logits_of(model, hidden[:, first:end]), input_ids[:, first + 1 : end + 1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        losses[:, first + 1 : end + 1] = loss.view_as(target)
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
