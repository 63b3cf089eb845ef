"""From a config and tensors to one kernel: the public attention function."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .config import BACKENDS, LongAttnConfig
from .geometry import Rows, check_mask, check_shapes
from .kernels.flex import flex_attention, why_not_flex
from .kernels.tiled import tiled_attention
from .methods.base import LogitMap
from .reference import dense_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: LongAttnConfig,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    query_start: int | None = None,
    key_start: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Causal attention under `config`, on the fastest exact kernel.

    Args:
        query: (batch, heads, q_len, head_dim), any float dtype; logits are float32 at least.
        key, value: (batch, kv_heads, kv_len, head_dim); kv_heads divides heads.
        config: parameters per layer already reduced (`config.for_layer(i)`).
        scaling: factor on q . k, default head_dim ** -0.5.
        attention_mask: bool, broadcastable to (batch, heads, q_len, kv_len), True = may be seen, on top of causality.
        query_start: position of the first query, default key_start + kv_len - q_len.
        key_start: position of the first key.
        backend: "auto" takes `config.backend`, and then the fastest that is exact for the call; any other name insists.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of query; rows that see nothing are 0.

    Raises:
        ValueError: shapes or mask do not fit, or the backend named cannot compute this exactly.
    """
    check_shapes(query, key, value)
    rows = Rows.causal(query.shape[2], key.shape[2], query_start, key_start, query.device)
    rows = Rows(rows.index, check_mask(attention_mask, query, key))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, config, rows, scaling=scaling, backend=backend)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: LongAttnConfig,
    rows: Rows,
    *,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """`attention` for rows of any geometry; softcap acts on the model's score, before every method."""
    backend = choose_backend(config.backend if backend == "auto" else backend, query, dropout)
    if backend == "reference":
        return dense_attention(query, key, value, config, rows, scaling=scaling, softcap=softcap, dropout=dropout)[0]
    gain = bias = None
    sinks = 0
    if config.logit_map is not None:
        gain, bias = distance_tables(config.logit_map, table_length(rows, key.shape[2]), query)
        sinks = config.logit_map.sink_tokens
    if backend == "flex":
        return flex_attention(query, key, value, rows, scaling=scaling, gain=gain, bias=bias, sinks=sinks, softcap=softcap)
    return tiled_attention(
        query, key, value, rows, scaling=scaling, gain=gain, bias=bias, sinks=sinks, softcap=softcap, dropout=dropout
    )[0]


def choose_backend(backend: str, query: Tensor, dropout: float = 0.0) -> str:
    """The backend that "auto" means for this call, or the one named; ValueError where that one cannot be exact."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    reason = why_not_flex(query, dropout)
    if backend == "auto":
        return "flex" if query.device.type == "cuda" and reason is None else "tiled"
    if backend == "flex" and reason is not None:
        raise ValueError(f"backend 'flex' cannot compute this call: {reason}; use backend='auto'")
    return backend


def table_length(rows: Rows, kv_len: int) -> int:
    """A length beyond every distance in the call, from shapes alone: no device sync, few distinct values."""
    return 1 << max(10, (kv_len + rows.index.shape[1] - 1).bit_length())


def distance_tables(logit_map: LogitMap, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The map's gain and bias by distance, built in float64, in the dtype of the logits; cached."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if torch.compiler.is_compiling():
        return _tables(logit_map, length, like.device, dtype)
    return _cached_tables(logit_map, length, like.device, dtype)


def _tables(logit_map: LogitMap, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():  # a cached tensor must serve training too
        gain, bias = logit_map.tables(length, device)
        return gain.to(dtype), bias.to(dtype)


_cached_tables = functools.lru_cache(maxsize=128)(_tables)
