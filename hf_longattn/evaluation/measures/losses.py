"""Loss by position, in one forward pass, without ever holding all logits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...integration.caches import CACHE
from ...integration.layers import bodies_of

#: The KV cache of a text's first tokens. A layer with a sliding window holds that window alone.
Prefix: TypeAlias = DynamicCache


@torch.inference_mode()
def prefix_of(model: Any, input_ids: Tensor, chunk: int = 2048, read: Prefix | None = None) -> Prefix:
    """The KV cache of a text (batch, length), read `chunk` tokens at a time, for `token_losses` and `answer_scores`, which
    leave it as it is.

    Args:
        read: the cache of the text's first tokens, which are then not read again; it grows.

    Raises:
        ValueError: the model does not read on from a cache as it reads a text whole.
    """
    _check_reads_on(model, input_ids)
    cache = DynamicCache(config=model.config) if read is None else read
    new = input_ids[:, cache.get_seq_length() :]
    for part in new.split(chunk, 1) if new.shape[1] else ():
        hidden_of(model, input_ids=part, **{CACHE: cache}, use_cache=True)
    return cache


def _check_reads_on(model: Any, input_ids: Tensor) -> None:
    """Raise ValueError where a text read in two parts is not the text read whole: some models keep no cache, or a state
    that only single tokens go on from."""
    ids = input_ids[:1, :16]
    if ids.shape[1] < 2:
        return
    try:
        cache = DynamicCache(config=model.config)
        whole = hidden_of(model, input_ids=ids, use_cache=False).float()
        parts = [hidden_of(model, input_ids=x, **{CACHE: cache}, use_cache=True) for x in ids.tensor_split(2, 1)]
        off = (torch.cat(parts, 1) - whole).abs().mean() / whole.abs().mean()
        exact = bool(off < 4 * torch.finfo(parts[0].dtype).eps ** 0.5)
    except (AttributeError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{type(model).__name__} {_WHOLE} ({error})") from error
    if not exact:
        raise ValueError(f"{type(model).__name__} {_WHOLE} (its hidden states differ by {float(off):.1%})")


_WHOLE = "does not read on in a text from a KV cache as it reads the text whole: measure it without a prefix or prefill"


def crops(model: Any) -> bool:
    """Tell whether a model's KV cache can give tokens back: no layer of it has a window or a state."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def shortened(prefix: Prefix, length: int) -> Prefix:
    """A copy of its first tokens alone.

    Raises:
        RuntimeError: a layer's sliding window has forgotten them (transformers' own).
    """
    cache = copy.deepcopy(prefix)
    if length < (read := cache.get_seq_length()):
        cache.crop(length - read)
    return cache


def hidden_of(model: Any, **inputs: Any) -> Tensor:
    """Return the input of a model's head, (batch, length, hidden); its logits where the head is no module of its own."""
    bodies = bodies_of(model)
    if not bodies:
        logits: Tensor = type(model).forward(model, **inputs).logits  # not the instance's, which may be a loss
        return logits
    hidden: Tensor = bodies[0](**inputs).last_hidden_state
    return hidden


def last_hidden(model: Any, input_ids: Tensor, prefill: int | None = None, prefix: Prefix | None = None) -> Tensor:
    """The hidden states that the head reads, (batch, length, hidden), NaN in the prefix; arguments as of `token_losses`."""
    if prefix is not None:
        cache, read = copy.deepcopy(prefix), prefix.get_seq_length()
        hidden = hidden_of(model, input_ids=input_ids[:, read:], **{CACHE: cache}, use_cache=True)
        return torch.nn.functional.pad(hidden, (0, 0, read, 0), value=torch.nan)
    if prefill is None:
        return hidden_of(model, input_ids=input_ids, use_cache=False)
    _check_reads_on(model, input_ids)
    cache = DynamicCache(config=model.config)
    parts = input_ids.split(prefill, 1)
    return torch.cat([hidden_of(model, input_ids=part, **{CACHE: cache}, use_cache=True) for part in parts], 1)


class _Given(tuple[Tensor]):
    """A base model's output that holds its last hidden states alone."""

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
    if not (bodies := bodies_of(model)):
        return hidden.float()
    before = [m.__dict__.get("forward") for m in bodies]  # accelerate's hooks stand there
    for module in bodies:
        module.forward = lambda *_, **__: _Given((hidden,))
    try:
        return type(model).forward(model, inputs_embeds=hidden).logits.float()  # not the instance's, which may be a loss
    finally:
        for module, forward in zip(bodies, before, strict=True):
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
        model: a causal language model.
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
