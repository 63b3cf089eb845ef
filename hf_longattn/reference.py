"""The definition: dense attention in plain PyTorch, in the dtype it is given (float64 in, float64 out).

Every fast path is tested against this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LongAttnConfig
from .geometry import Rows, check_mask, check_shapes


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: LongAttnConfig,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    query_start: int | None = None,
    key_start: int = 0,
    backend: str = "reference",
) -> Tensor:
    """Causal attention under `config`, by its definition; the signature of `hf_longattn.attention`.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim); kv_heads divides heads.
        config: parameters per layer already reduced (`config.for_layer(i)`).
        scaling: factor on q . k, default head_dim ** -0.5.
        attention_mask: bool, broadcastable to (batch, heads, q_len, kv_len), True = may be seen, on top of causality.
        query_start: position of the first query, default key_start + kv_len - q_len.
        key_start: position of the first key.
        backend: here always the reference.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of query; rows that see nothing are 0.
    """
    if backend not in ("auto", "reference"):
        raise ValueError(f"reference_attention is the reference; backend={backend!r} belongs to hf_longattn.attention")
    check_shapes(query, key, value)
    rows = Rows.causal(query.shape[2], key.shape[2], query_start, key_start, query.device)
    rows = Rows(rows.index, check_mask(attention_mask, query, key))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return dense_attention(query, key, value, config, rows, scaling=scaling)[0]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: LongAttnConfig,
    rows: Rows,
    *,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, q_len, head_dim) and attention weights (batch, heads, q_len, kv_len).

    Order of the stages: the model's own score and softcap, logit map, visibility, softmax, dropout.
    Computes in float32 for half precisions.
    """
    dtype = query.dtype
    compute = torch.promote_types(dtype, torch.float32)
    group, kv_len = query.shape[1] // key.shape[1], key.shape[2]
    query, key, value = (
        query.to(compute),
        key.to(compute).repeat_interleave(group, 1),
        value.to(compute).repeat_interleave(group, 1),
    )

    logits = scaling * query @ key.transpose(-1, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if config.logit_map is not None:
        t = rows.distance(kv_len)
        gain, bias = (x[:, t].transpose(0, 1).to(compute) for x in config.logit_map.tables(int(t.max()) + 1, t.device))
        sinks = rows.sinks(kv_len, config.logit_map.sink_tokens)[:, None]
        logits = torch.where(sinks, logits, gain * logits + bias)
    visible = rows.visible(kv_len)
    weights = torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1)
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)  # softmax over nothing is NaN
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ value).to(dtype), weights
