"""PyTorch's own fused attention, for methods that only touch query and key."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import KEY_START, Rows


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, scaling: float, dropout: float = 0.0) -> Tensor:
    """softmax(scaling q . k) over the visible keys; fused without a mask where the rows are plain, else with one."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    mask, causal = None, False
    if rows.plain is not None:
        first, last = (int(slot - rows.index[0, 0, KEY_START]) for slot in rows.plain)
        key, value = key[:, :, first : last + 1], value[:, :, first : last + 1]
        causal = query.shape[2] > 1
    else:
        mask = rows.visible(key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
