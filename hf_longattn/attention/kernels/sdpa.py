"""PyTorch's fused attention, for methods that only touch query and key."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import Rows
from .lowered import Kernel, KVSegment, LoweredAttention
from .spec import Result


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, scaling: float, dropout: float = 0.0) -> Tensor:
    """softmax(scaling q . k) over the visible keys; fused without a mask where the rows are plain, else with one."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    mask, causal = None, False
    if rows.plain is not None:
        key, value = visible(key, rows), visible(value, rows)
        causal = query.shape[2] > 1
    else:
        mask = rows.visible(key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def visible(x: Tensor, rows: Rows) -> Tensor:
    """The keys (or values) that plain rows see."""
    assert rows.plain is not None
    first, last = (int(index - rows.columns.key_start[0, 0]) for index in rows.plain)
    return x[:, :, first : last + 1]


def run(call: LoweredAttention, segment: KVSegment) -> Result:
    query, key, rows = segment.query, segment.key, segment.rows
    out = sdpa_attention(query, key, call.value, rows, scaling=call.spec.scaling, dropout=call.dropout)
    return out, out.new_empty(0), out.new_empty(0)


KERNEL = Kernel("sdpa", lambda call: call.beyond_product, run, picked=lambda call: call.rows.plain is not None)
