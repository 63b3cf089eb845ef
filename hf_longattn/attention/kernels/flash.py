"""FlashAttention 2 and 3, for methods that only touch query and key."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..geometry import Rows
from .lowered import Kernel, KVSegment, LoweredAttention
from .sdpa import visible
from .spec import Result

if TYPE_CHECKING:
    from ..call import Call


def flash_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, scaling: float, dropout: float = 0.0) -> Tensor:
    """softmax(scaling q . k) over the visible keys, for plain rows in float16 or bfloat16 (see `why_not`)."""
    key, value = visible(key, rows), visible(value, rows)
    q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": True}
    if dropout:
        options["dropout_p"] = dropout
    out = _flash()(q, k, v, **options)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def why_not(call: Call) -> str | None:
    """The reason why FlashAttention cannot compute a call, or None."""
    if call.beyond_product is not None:
        return call.beyond_product
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention needs float16 or bfloat16, got {call.query.dtype}"
    if call.rows.plain is None:
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


def run(call: LoweredAttention, segment: KVSegment) -> Result:
    query, key, rows = segment.query, segment.key, segment.rows
    out = flash_attention(query, key, call.value, rows, scaling=call.spec.scaling, dropout=call.dropout)
    return out, out.new_empty(0), out.new_empty(0)


KERNEL = Kernel("flash", why_not, run)
