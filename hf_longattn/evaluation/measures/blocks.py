"""The logits that a softmax saw, in blocks of query rows: never a tensor of q_len x kv_len."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention.attend import Call
from ...attention.geometry import Rows
from ...attention.kernels.spec import MASK_VALUE
from ...attention.lowering import FEW_QUERIES, lower
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
    rows: Rows
    logits: Tensor
    visible: Tensor
    log_p: Tensor
    temperature: Tensor


def blocks(call: Call, chosen: Tensor | None = None) -> Iterator[Block]:
    """What `call` computed before it weighed its values.

    Args:
        chosen: the numbers of the query rows to read, int64 (n,), ascending; default all.
    """
    config, rows, kv_len = call.config, call.rows, call.key.shape[2]
    batch, heads = call.query.shape[:2]
    lowered = lower(call, wide=True, rotate_reading=call.query.shape[2] <= FEW_QUERIES)
    factor = lowered.factor
    if chosen is None:
        chosen = torch.arange(rows.index.shape[1], device=rows.index.device)
    for which in chosen.split(max(1, LOGITS // (batch * heads * kv_len))):
        block = rows.take(which)
        keys = max(1, int(block.columns.high.max() - block.columns.key_start[0, 0]) + 1)
        logits, visible = lowered.logits(which, keys)
        temperature = logits.new_ones(()) if factor is None else factor.expand(batch, heads, -1)[:, :, which]
        if isinstance(config.temperature, EntropyTemperature):
            temperature = config.temperature.factor(entropy(torch.log_softmax(logits, -1)))
            logits = (temperature[..., None] * logits).masked_fill(~visible, MASK_VALUE)
        log_p = lowered.log_weights(logits)
        yield Block(which, block, logits, visible, log_p, temperature.expand(batch, heads, len(which)))


def entropy(log_p: Tensor) -> Tensor:
    """-Σ p ln p over the last dimension, in nats."""
    return -(log_p.exp() * log_p).sum(-1)
