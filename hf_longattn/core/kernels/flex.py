"""The same Toeplitz-affine logit map on PyTorch's FlexAttention: the path on CUDA, where it has not run yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from ..geometry import Rows
from .kernel import Kernel, KernelCall, LogitSpec, Result

if TYPE_CHECKING:
    from ..call import Call


def why_not_flex(query: Tensor, dropout: float = 0.0) -> str | None:
    """The reason why FlexAttention cannot compute a call exactly, or None."""
    if dropout:
        return "FlexAttention has no dropout"
    if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        return "FlexAttention has no backward pass on the CPU"
    if query.dtype == torch.float64 and query.device.type == "cuda":
        return "FlexAttention has no float64 on CUDA"
    if query.shape[-1] < 16 and query.device.type == "cuda":
        return f"FlexAttention needs head_dim >= 16, got {query.shape[-1]}"
    return None


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(torch_flex.flex_attention, dynamic=True)


def run(call: KernelCall) -> Result:
    """Without dropout; the entropy comes back empty.

    To be compiled on CUDA; elsewhere PyTorch's own uncompiled form runs, which is dense and serves as a check.
    """
    query, key, value, rows, spec, with_lse = call.query, call.key, call.value, call.rows, call.spec, call.with_lse
    batch, heads, q_len, kv_len = *query.shape[:3], key.shape[2]
    mask_heads = heads if rows.allowed is not None and rows.allowed.shape[1] > 1 else None
    device = str(query.device)
    mask = rows.once(
        ("block_mask", batch, mask_heads, kv_len),
        lambda: torch_flex.create_block_mask(_mask(rows, batch), batch, mask_heads, q_len, kv_len, device=device),
    )
    kernel: Any = (
        _compiled() if query.device.type == "cuda" and not torch.compiler.is_compiling() else torch_flex.flex_attention
    )
    asked, logit = torch_flex.AuxRequest(lse=with_lse), _logit(rows, spec, batch)
    out, aux = kernel(query, key, value, logit, mask, spec.scaling, heads != key.shape[1], return_aux=asked)
    return out, aux.lse if with_lse else out.new_empty(0), out.new_empty(0)


def _mask(rows: Rows, batch: int) -> Callable[..., Tensor]:
    """Whether the query in row q sees the key in column kv."""
    allowed = rows.allowed
    _, first, _, low, high = (column.expand(batch, -1) for column in rows.columns)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        index = first[b, q] + kv
        inside = (index >= low[b, q]) & (index <= high[b, q])
        if allowed is None:
            return inside
        b, h, q = (i if n > 1 else i * 0 for i, n in zip((b, h, q), allowed.shape, strict=False))
        return inside & allowed[b, h, q, kv]

    return mask_mod


def _logit(rows: Rows, spec: LogitSpec, batch: int) -> Callable[..., Tensor]:
    """From the score of row q and column kv to the logit that `LogitSpec` defines."""
    position, first, start, _, _ = (column.expand(batch, -1) for column in rows.columns)
    softcap, row_scale, bias_scale, sinks = spec.softcap, spec.row_scale, spec.bias_scale, spec.sinks
    gain, bias = spec.gain, spec.bias
    ids = None
    if rows.query_ids is not None and rows.key_ids is not None:
        ids = rows.query_ids.expand(batch, -1), rows.key_ids.expand(batch, -1)

    def at(table: Tensor, h: Tensor, t: Tensor) -> Tensor:
        return table[h if table.shape[0] > 1 else h * 0, t]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if row_scale is not None:
            score = score * row_scale[b, h, q]
        if gain is None or bias is None:
            return score
        index = first[b, q] + kv
        t = (position[b, q] - index if ids is None else ids[0][b, q] - ids[1][b, kv]).abs()
        added = at(bias, h, t) if bias_scale is None else at(bias, h, t) * bias_scale[b, h, q]
        mapped = at(gain, h, t) * score + added
        if sinks:
            offset = index - start[b, q] if ids is None else ids[1][b, kv]
            mapped = torch.where((offset >= 0) & (offset < sinks), score, mapped)
        return mapped

    return score_mod


def _picked(call: Call) -> bool:
    return call.query.device.type == "cuda" and not call.by_entropy


KERNEL = Kernel("flex", lambda call: why_not_flex(call.query, call.dropout), run, _picked)
