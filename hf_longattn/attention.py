"""From a config and tensors to one kernel: the public attention function."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import BACKENDS, LongAttnConfig
from .geometry import Rows, check_mask, check_shapes
from .kernels.flex import flex_attention, why_not_flex
from .kernels.fused import sdpa_attention
from .kernels.tiled import tiled_attention
from .methods.base import EntropyTemperature, LogitMap
from .reference import dense_attention, finish, length_factor


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
    learned: Mapping[str, nn.Module] | None = None,
    backend: str = "auto",
) -> Tensor:
    """`attention` for rows of any geometry.

    Args:
        softcap: the model's own cap on its score; it acts before every method but the score's.
        learned: the trained parts of methods by slot; without it they are what they start as.
    """
    backend = choose_backend(config, query, rows, softcap, dropout, config.backend if backend == "auto" else backend)
    if backend == "reference":
        return dense_attention(
            query, key, value, config, rows, scaling=scaling, softcap=softcap, dropout=dropout, learned=learned
        )[0]
    dtype, kv_len = query.dtype, key.shape[2]
    if backend == "tiled" and (config.score or config.temperature):  # it computes in float32 anyway: fold without rounding
        query, key = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key))
    if config.score is not None:
        query, key, scaling = config.score.fold(query, key)
    row_gain = length_factor(config, rows, query, kv_len, learned)
    if row_gain is not None and not softcap:
        query, row_gain = (query * row_gain[..., None]).to(query.dtype), None

    shape: dict[str, Any] = {"scaling": scaling, "softcap": softcap}
    if config.logit_map is not None:
        length = table_length(rows, kv_len)
        shape["gain"], shape["bias"] = distance_tables(config.logit_map, query.shape[1], length, query)
        shape["sinks"] = config.logit_map.sink_tokens
    if row_gain is not None:
        shape["row_gain"] = row_gain.expand(query.shape[:3])
    if isinstance(config.temperature, EntropyTemperature):
        entropy = tiled_attention(query, key, None, rows, **shape, with_entropy=True)[2]
        factor = config.temperature.factor(entropy)
        if softcap:
            shape["row_gain"] = factor
        else:
            query = (query * factor[..., None]).to(query.dtype)
            if config.logit_map is None and rows.plain is not None:
                backend = "sdpa"  # what is left is plain attention
        if config.logit_map is not None:
            shape["row_bias"] = factor
    if backend == "sdpa":
        out = sdpa_attention(query, key, value, rows, scaling=scaling, dropout=dropout)
    elif backend == "flex":
        out = flex_attention(query, key, value, rows, **shape)
    else:
        out = tiled_attention(query, key, value, rows, **shape, dropout=dropout)[0]
    return finish(config, out, learned).to(dtype)


def choose_backend(
    config: LongAttnConfig, query: Tensor, rows: Rows, softcap: float | None, dropout: float, backend: str = "auto"
) -> str:
    """The backend that "auto" means for this call, or the one named; ValueError where that one cannot be exact."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    entropy = isinstance(config.temperature, EntropyTemperature)
    in_the_way = config.logit_map or (config.temperature if entropy else None)
    why_not_sdpa = "the model caps its scores" if softcap else f"{in_the_way.name} changes logits" if in_the_way else None
    reasons = {"sdpa": why_not_sdpa, "flex": why_not_flex(query, dropout)}
    if backend == "auto":
        if reasons["sdpa"] is None and rows.plain is not None:
            return "sdpa"
        return "flex" if query.device.type == "cuda" and reasons["flex"] is None and not entropy else "tiled"
    if reasons.get(backend) is not None:
        raise ValueError(f"backend {backend!r} cannot compute this call: {reasons[backend]}; use backend='auto'")
    return backend


def table_length(rows: Rows, kv_len: int) -> int:
    """A length beyond every distance in the call, from shapes alone: no device sync, few distinct values."""
    return 1 << max(10, (kv_len + rows.index.shape[1] - 1).bit_length())


def distance_tables(logit_map: LogitMap, heads: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The map's gain and bias by distance, built in float64, in the dtype of the logits; cached."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if torch.compiler.is_compiling():
        return _tables(logit_map, heads, length, like.device, dtype)
    return _cached_tables(logit_map, heads, length, like.device, dtype)


def _tables(logit_map: LogitMap, heads: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():  # a cached tensor must serve training too
        gain, bias = logit_map.tables(heads, length, device)
        return gain.to(dtype), bias.to(dtype)


_cached_tables = functools.lru_cache(maxsize=128)(_tables)
