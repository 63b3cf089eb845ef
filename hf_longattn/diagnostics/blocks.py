"""The logits that a softmax saw, in blocks of query rows: never a tensor of q_len x kv_len."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import Call, Part, distance_tables, split, table_length
from ..geometry import HIGH, KEY_START, Rows
from ..kernels.tiled import HIDDEN
from ..methods.base import EntropyTemperature
from ..reference import length_factor

#: Logits held at a time, over batch, heads, query rows and keys; a few tensors of this size exist at once.
LOGITS = 1 << 23


@dataclass(frozen=True, eq=False)
class Block:
    """Some query rows of one call, in float32 or wider.

    Args:
        which: their numbers in the call, int64 (n,).
        rows: their geometry.
        logits: (batch, heads, n, keys), as the softmax sees them, HIDDEN where it does not; only the keys that any of the
            rows reaches.
        visible: bool, broadcasts to logits.
        log_p: the logarithm of the attention weights, about HIDDEN where they are 0.
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
    wide = torch.promote_types(call.query.dtype, torch.float32)
    parts, scaling = split(config, call.query, call.key, rows, call.rotation), call.scaling
    parts = [p._replace(query=p.query.to(wide), key=p.key.to(wide)) for p in parts]
    if config.score is not None:
        for n, part in enumerate(parts):
            q, k, scaling = config.score.fold(part.query, part.key)
            parts[n] = part._replace(query=q, key=k)
    factor = length_factor(config, torch.stack([p.rows.count(kv_len) for p in parts]).sum(0), call.query, call.learned)
    if chosen is None:
        chosen = torch.arange(rows.index.shape[1], device=rows.index.device)
    for which in chosen.split(max(1, LOGITS // (batch * heads * kv_len))):
        block = rows.take(which)
        keys = max(1, int(block.index[..., HIGH].max() - block.index[0, 0, KEY_START]) + 1)
        logits = torch.full((batch, heads, len(which), keys), HIDDEN, dtype=wide, device=call.query.device)
        visible = torch.zeros(1, dtype=torch.bool, device=logits.device)
        for part in parts:
            shown = _visible(part.rows.take(which), keys)
            logits = torch.where(shown, _scores(part, which, keys).mul_(scaling), logits)
            visible = visible | shown
        if call.softcap:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        temperature = logits.new_ones(()) if factor is None else factor.expand(batch, heads, -1)[:, :, which]
        if factor is not None:
            logits = temperature[..., None] * logits
        if config.logit_map is not None:
            gain, bias = distance_tables(config.logit_map, heads, table_length(rows, kv_len), logits)
            t = rows.distance(keys, which)
            mapped = gain[:, t].transpose(0, 1) * logits + bias[:, t].transpose(0, 1)
            sinks = block.sinks(keys, config.logit_map.sink_tokens)[:, None]
            logits = torch.where(sinks, logits, mapped)
        logits = logits.masked_fill(~visible, HIDDEN)
        log_p = torch.log_softmax(logits, -1)
        if isinstance(config.temperature, EntropyTemperature):
            temperature = config.temperature.factor(entropy(log_p))
            logits = (temperature[..., None] * logits).masked_fill(~visible, HIDDEN)
            log_p = torch.log_softmax(logits, -1)
        yield Block(which, block, logits, visible, log_p, temperature.expand(batch, heads, len(which)))


def entropy(log_p: Tensor) -> Tensor:
    """-Σ p ln p over the last dimension, in nats."""
    return -(log_p.exp() * log_p).sum(-1)


def _visible(rows: Rows, keys: int) -> Tensor:
    allowed = None if rows.allowed is None else rows.allowed[..., :keys]
    return Rows(rows.index, allowed).visible(keys)


def _scores(part: Part, which: Tensor, keys: int) -> Tensor:
    """q . k, (batch, heads, n, keys); query heads that share a key head are multiplied with it together."""
    q, k = part.query[:, :, which], part.key[:, :, :keys]
    if part.turn is None or part.rotation is None:
        return _product(q, k)
    cos, sin = (x[:, :keys].transpose(1, 2).to(k.dtype) for x in part.turn)
    return _product(q, cos * k) + _product(part.rotation.quarter(q), sin * k)


def _product(query: Tensor, key: Tensor) -> Tensor:
    batch, heads, n, width = query.shape
    together = query.reshape(batch, key.shape[1], -1, width) @ key.transpose(-1, -2)
    return together.reshape(batch, heads, n, -1)
