"""The logits that a softmax saw, in blocks of query rows: never a tensor of q_len x kv_len."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.call import Call
from ...core.geometry import AttentionLayout
from ...core.kernels import tiled
from ...core.kernels.by_segment import BySegment
from ...core.kernels.kernel import MASK_VALUE, KernelCall, entropy
from ...core.lower import lower
from ...core.plan import row_factor
from ...slots.base import EntropyTemperature

#: Logits held at a time, over batch, heads, query rows and keys; a few tensors of this size exist at once.
LOGITS = 1 << 23


@dataclass(frozen=True, eq=False)
class Block:
    """Some query rows of one call, in float32 or wider.

    Args:
        which: their numbers in the call, int64 (n,).
        rows: their geometry.
        logits: (batch, heads, n, keys), as the softmax sees them, MASK_VALUE where it does not; only the keys that any of the
            rows reaches.
        visible: bool, broadcasts to logits.
        log_p: the logarithm of the attention weights, about MASK_VALUE where they are 0.
        temperature: (batch, heads, n), the factor on the logits by length or entropy, 1 without one.
    """

    which: Tensor
    rows: AttentionLayout
    logits: Tensor
    visible: Tensor
    log_p: Tensor
    temperature: Tensor


def blocks(call: Call, chosen: Tensor | None = None) -> Iterator[Block]:
    """Recompute the logits and weights of `call`, in blocks of query rows.

    Args:
        chosen: the numbers of the query rows to read, int64 (n,), ascending; default all.
    """
    config, rows, kv_len = call.config, call.rows.on(call.query.device), call.key.shape[2]
    batch, heads = call.query.shape[:2]
    plan = lower(call)
    factor = row_factor(plan.by_length, plan.query.device, plan.wide, call.learned)
    sinks = plan.sinks(call.query, call.learned, call.sink_logits)
    calls = BySegment(plan, tiled.run, wide=True).calls(call.query, call.key, call.value, factor)
    if chosen is None:
        chosen = torch.arange(rows.index.shape[1], device=rows.index.device)
    for which in chosen.split(max(1, LOGITS // (batch * heads * kv_len))):
        block = rows.take(which)
        keys = max(1, int(block.bounds.high.max() - block.bounds.key_start[0, 0]) + 1)
        logits, visible = _logits(calls, which, keys)
        temperature = logits.new_full((), 1.0 if factor is None else factor) if not isinstance(factor, Tensor) else factor
        temperature = temperature.expand(batch, heads, rows.index.shape[1])[:, :, which]
        if isinstance(config.temperature, EntropyTemperature):
            temperature = config.temperature.factor(entropy(torch.log_softmax(logits, -1)))
            logits = (temperature[..., None] * logits).masked_fill(~visible, MASK_VALUE)
        log_p = _log_weights(logits, sinks)
        yield Block(which, block, logits, visible, log_p, temperature.expand(batch, heads, len(which)))


def _logits(calls: list[KernelCall], which: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The logits of some rows over all segments, MASK_VALUE at masked pairs, and which pairs are visible."""
    logits, visible = calls[0].logits(which, keys)
    for call in calls[1:]:
        more, own = call.logits(which, keys)
        logits, visible = torch.where(own, more, logits), visible | own
    return logits.masked_fill(~visible, MASK_VALUE), visible


def _log_weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """The logarithm of the attention weights, (batch, heads, n, keys); with sinks they add up to less than 1."""
    if sinks is None:
        return torch.log_softmax(logits, -1)
    sink = sinks.to(logits)[:, None, None]
    return logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), sink)
