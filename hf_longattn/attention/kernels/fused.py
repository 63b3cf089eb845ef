"""Fused attention as others provide it, for methods that only touch query and key: PyTorch's, and FlashAttention 2 and 3."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry import Rows


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, scaling: float, dropout: float = 0.0) -> Tensor:
    """softmax(scaling q . k) over the visible keys; fused without a mask where the rows are plain, else with one."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    mask, causal = None, False
    if rows.plain is not None:
        key, value = _visible(key, rows), _visible(value, rows)
        causal = query.shape[2] > 1
    else:
        mask = rows.visible(key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def flash_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, scaling: float, dropout: float = 0.0) -> Tensor:
    """The same by FlashAttention, for plain rows in float16 or bfloat16 (see `why_not_flash`)."""
    key, value = _visible(key, rows), _visible(value, rows)
    q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": True}
    if dropout:
        options["dropout_p"] = dropout
    out = _flash()(q, k, v, **options)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def why_not_flash(query: Tensor, rows: Rows) -> str | None:
    """The reason why FlashAttention cannot compute a call, or None."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention needs float16 or bfloat16, got {query.dtype}"
    if rows.plain is None:
        return "the rows are padded, packed or masked, which only the other backends compute"
    try:
        _flash()
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def _flash() -> Callable[..., Any]:
    """flash_attn_func of FlashAttention 3, else 2."""
    for package in ("flash_attn_interface", "flash_attn"):
        try:
            function: Callable[..., Any] = importlib.import_module(package).flash_attn_func
            return function
        except ImportError:
            continue
    raise ImportError("neither flash_attn_interface (FlashAttention 3) nor flash_attn is installed: pip install flash-attn")


def _visible(x: Tensor, rows: Rows) -> Tensor:
    """The keys (or values) that plain rows see."""
    assert rows.plain is not None
    first, last = (int(index - rows.columns.key_start[0, 0]) for index in rows.plain)
    return x[:, :, first : last + 1]
