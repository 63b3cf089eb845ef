"""PyTorch's fused attention, for methods that only touch query and key."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .by_segment import BySegment
from .fused import HALF, by_head, few, pieces
from .kernel import Kernel, KernelCall, Result


def run(call: KernelCall) -> Result:
    """softmax(scaling q . k) over the visible keys; fused without a mask where the rows are plain, else with one."""
    query, key, value, rows = call.query, call.key, call.value, call.rows
    assert value is not None
    mask, causal, plain = None, False, rows.plain
    if plain is not None:
        key, value = visible(key, plain), visible(value, plain)
        causal = query.shape[2] > 1
    else:
        mask = rows.visible(key.shape[2])
    shared = query.shape[1] != key.shape[1]
    if shared and query.is_cuda and query.dtype not in HALF:  # there none of the fused kernels shares key heads
        key, value, shared = by_head(key, query), by_head(value, query), False
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, call.dropout, causal, scale=call.spec.scaling, enable_gqa=shared
    )
    return out, out.new_empty(0), out.new_empty(0)


def few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scaling: float | None = None) -> Tensor:
    """sdpa of few queries: heads that share a key head are so many queries of it, so that a CPU reads a key once for all.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, ...).
        mask: as sdpa takes it, (batch or 1, kv_heads or 1, rows or 1, kv_len), the rows those queries of each head in turn
            that share a key head. None: each query sees each key.

    Returns:
        (batch, q_len, heads, value_dim).
    """
    batch, heads, q_len, width = query.shape
    together = query.reshape(batch, key.shape[1], -1, width)
    if mask is None and not torch.is_grad_enabled() and width == value.shape[3] and pieces(key) > 1:
        out, _ = few(together, key, value, None, width**-0.5 if scaling is None else scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(together, key, value, mask, scale=scaling)
    if q_len == 1:  # in one step, of which a decoded token takes one in each layer
        return out.reshape(batch, 1, heads, -1)
    return out.reshape(batch, heads, q_len, -1).transpose(1, 2).contiguous()


def visible(x: Tensor, columns: slice) -> Tensor:
    """The keys (or values) in the columns that plain rows see."""
    return x if columns == slice(0, x.shape[2]) else x[:, :, columns]


#: All that is more than a softmax of scaling q . k.
BEYOND_PRODUCTS = frozenset({"softcap", "sinks", "map", "segments", "entropy"})

KERNEL = Kernel(
    "sdpa",
    functools.partial(BySegment, run=run),
    lacks=BEYOND_PRODUCTS,
    preferred=lambda plan: plan.rows.plain is not None,
)
