"""From a config and tensors to one kernel: the public attention function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .config import BACKENDS, LongAttnConfig
from .geometry import Rows, check_mask, check_positions, check_shapes
from .kernels.flex import flex_attention, why_not_flex
from .kernels.fused import flash_attention, sdpa_attention, why_not_flash
from .kernels.tiled import HIDDEN, tiled_attention
from .kernels.triton import MARGIN, triton_attention, why_not_triton
from .methods.base import Band, EntropyTemperature, LogitMap
from .reference import dense_attention, finish, length_factor, require_rotation
from .rotary import Rotation
from .tracing import keepable, readable


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
    rotation: Rotation | None = None,
    position_ids: Tensor | None = None,
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
        rotation: how query and key are rotated; needed where the config remaps rotary distances.
        position_ids: int64 (batch or 1, length), growing: distances are then differences of positions (skip-wise training).
        backend: "auto" takes `config.backend`, and then sdpa where it is exact, FlexAttention on CUDA (not run there yet),
            else the tiled kernel; any other name insists.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of query; rows that see nothing are 0, before any output norm.

    Raises:
        ValueError: shapes or mask do not fit, or the backend named cannot compute this exactly.
    """
    check_shapes(query, key, value)
    rows = Rows.causal(query.shape[2], key.shape[2], query_start, key_start, query.device)
    rows = Rows(rows.index, check_mask(attention_mask, query, key))
    if position_ids is not None:
        rows = rows.at(*[check_positions(position_ids, query, key)] * 2)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, config, rows, scaling=scaling, backend=backend, rotation=rotation)


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
    rotation: Rotation | None = None,
    backend: str = "auto",
) -> Tensor:
    """`attention` for rows of any geometry.

    Args:
        softcap: the model's own cap on its score; it acts before every method but the score's.
        learned: the trained parts of methods by slot; without it they are what they start as.
        rotation: how query and key are rotated; needed where the config remaps rotary distances.
    """
    asked = config.backend if backend == "auto" else backend
    parts = split(config, query, key, rows, rotation, in_tiles=asked in ("auto", "tiled") and query.device.type == "cpu")
    backend = choose_backend(config, query, rows, softcap, dropout, asked)
    model: dict[str, Any] = {"scaling": scaling, "softcap": softcap}
    if backend == "reference":
        model |= {"dropout": dropout, "learned": learned, "rotation": rotation}
        return dense_attention(query, key, value, config, rows, **model)[0]
    dtype, kv_len = query.dtype, key.shape[2]
    if backend == "tiled" and (config.score or config.temperature):  # it computes in float32 anyway: fold without rounding
        parts = [p._replace(query=_wide(p.query), key=_wide(p.key)) for p in parts]
    if config.score is not None:
        for n, part in enumerate(parts):
            q, k, model["scaling"] = config.score.fold(part.query, part.key)
            parts[n] = part._replace(query=q, key=k)
    if config.logit_map is not None:
        model["gain"], model["bias"] = distance_tables(config.logit_map, query.shape[1], table_length(rows, kv_len), query)
        model["sinks"] = config.logit_map.sink_tokens

    visible = torch.stack([part.rows.count(kv_len) for part in parts]).sum(0)
    factor = length_factor(config, visible, query, learned)
    parts = _heated(parts, model, factor)
    if isinstance(config.temperature, EntropyTemperature):
        factor = config.temperature.factor(_entropy(parts, model, backend))
        parts = _heated(parts, model, factor)
        if config.logit_map is not None:
            model["row_bias"] = factor
        elif asked == "auto" and not softcap and len(parts) == 1 and rows.plain is not None:
            backend = "sdpa"  # what is left is plain attention

    if backend in ("sdpa", "flash"):
        fused = sdpa_attention if backend == "sdpa" else flash_attention
        out = fused(parts[0].query, parts[0].key, value, parts[0].rows, scaling=model["scaling"], dropout=dropout)
    else:
        options = {"dropout": dropout, "with_lse": len(parts) > 1}
        out = _merged([part.run(backend, value, model, **options) for part in parts])
    return finish(config, out, learned).to(dtype)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `attend`: its arguments and what it returned, for whoever looks on."""

    query: Tensor
    key: Tensor
    value: Tensor
    config: LongAttnConfig
    rows: Rows
    output: Tensor
    scaling: float
    softcap: float | None = None
    learned: Mapping[str, nn.Module] | None = None
    rotation: Rotation | None = None


class Part(NamedTuple):
    """Attention over one band of keys."""

    query: Tensor
    key: Tensor
    rows: Rows
    rotation: Rotation | None = None  # with `turn`: cos and sin by which the keys are still to be turned, as they are read
    turn: tuple[Tensor, Tensor] | None = None

    def run(self, backend: str, value: Tensor | None, model: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The output, logsumexp and entropy, as `kernels.tiled.tiled_attention` defines them."""
        if self.turn is not None and self.rotation is not None:
            options["turn"] = (self.rotation.quarter(self.query), *self.turn)
        kernel: Callable[..., tuple[Tensor, Tensor, Tensor]] = tiled_attention
        query, key = self.query, self.key
        if backend != "tiled":  # these refuse softcap or dropout where they lack them
            kernel = triton_attention if backend == "triton" else flex_attention
            options = {k: v for k, v in (options | model).items() if k not in ("softcap", "dropout") or v}
            model, half = {}, (key if value is None else value).dtype
            query, key = query.to(half), key.to(half)
        return kernel(query, key, value, self.rows, **model, **options)


#: Up to this many queries, keys are turned while they are read instead of once before: decoding keeps no second cache.
FEW_QUERIES = 16


def split(
    config: LongAttnConfig, query: Tensor, key: Tensor, rows: Rows, rotation: Rotation | None, in_tiles: bool = True
) -> list[Part]:
    """One part for every band of keys that the config shows and rotates alike; each is attention over an interval.

    in_tiles: the kernel may be asked to turn keys as it reads them.
    """
    if config.positions is None and config.visibility is None:
        return [Part(query, key, rows)]
    i, j = rows.query_positions(), rows.key_positions(key.shape[2])
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    on_the_fly = in_tiles and readable(query) and query.shape[2] <= FEW_QUERIES and not grad
    parts = []
    for where, positions in enumerate(config.positions.bands(i) if config.positions else [Band()]):
        for which, seen in enumerate(config.visibility.bands(i) if config.visibility else [Band()]):
            q, k, turn = query, key, None
            for method, number, band in ((config.positions, where, positions), (config.visibility, which, seen)):
                if band.query is not None:
                    q = require_rotation(rotation).move(query, i, band.query, (method, number, "query"))
                if band.key is not None and on_the_fly:
                    turn = require_rotation(rotation).spread(j, band.key, (method, number, "key"), key.shape[-1])
                elif band.key is not None:
                    k = require_rotation(rotation).move(key, j, band.key, (method, number, "key"))
            shown = rows.once(
                (config.positions, where, config.visibility, which), functools.partial(_narrowed, rows, positions, seen)
            )
            parts.append(Part(q, k, shown, rotation, turn))
    return parts


def _narrowed(rows: Rows, *bands: Band) -> Rows:
    for band in bands:
        rows = rows.narrowed(band.first, band.last)
    return rows


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _heated(parts: list[Part], model: dict[str, Any], factor: Tensor | None) -> list[Part]:
    """The same logits times a factor per row: on the query, or after the softcap where the model has one."""
    if factor is None:
        return parts
    if model["softcap"]:
        model["row_gain"] = factor.expand(parts[0].query.shape[:3])
        return parts
    return [p._replace(query=(p.query * factor[..., None]).to(p.query.dtype)) for p in parts]


def _log_shares(lse: list[Tensor]) -> Tensor:
    """The logarithm of each part's share of a row's probability, (parts, batch, heads, q_len), finite.

    Rows that see nothing share evenly.
    """
    return torch.log_softmax(torch.stack(lse).clamp(min=HIDDEN), 0)


def _merged(results: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The output over all parts from those over each: out = Σ share out_part."""
    if len(results) == 1:
        return results[0][0]
    shares = _log_shares([lse for _, lse, _ in results]).exp()
    return sum(share[..., None] * out for share, (out, _, _) in zip(shares, results, strict=True))  # type: ignore[return-value]


def _entropy(parts: list[Part], model: dict[str, Any], backend: str) -> Tensor:
    """The entropy of every row; over several parts H = Σ share (H_part - ln share)."""
    kernel = "triton" if backend == "triton" else "tiled"
    results = [part.run(kernel, None, model, with_lse=len(parts) > 1, with_entropy=True) for part in parts]
    if len(results) == 1:
        return results[0][2]
    shares = _log_shares([lse for _, lse, _ in results])
    own = torch.stack([entropy for _, _, entropy in results])
    entropy = (shares.exp() * (own - shares)).sum(0)
    seen = torch.stack([lse for _, lse, _ in results]).amax(0) > HIDDEN
    return torch.where(seen, entropy, 0.0)


def choose_backend(
    config: LongAttnConfig,
    query: Tensor,
    rows: Rows,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> str:
    """The backend that "auto" means for this call, or the one named; ValueError where that one cannot be exact."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    entropy = isinstance(config.temperature, EntropyTemperature)
    if softcap:
        not_fused: str | None = "the model caps its scores"
    else:
        in_the_way = [m.name for m in (config.logit_map, config.positions, config.visibility) if m is not None]
        in_the_way += [config.temperature.name] if config.temperature is not None and entropy else []
        not_fused = f"{in_the_way[0]} changes more than query and key" if in_the_way else None
    reasons = {"sdpa": not_fused, "flex": why_not_flex(query, dropout)}
    if backend == "triton":
        reasons["triton"] = why_not_triton(query, rows, softcap, dropout)
    if backend == "flash":
        reasons["flash"] = not_fused or why_not_flash(query, rows)
    if backend == "auto":
        if reasons["sdpa"] is None and rows.plain is not None:
            return "sdpa"
        return "flex" if query.device.type == "cuda" and reasons["flex"] is None and not entropy else "tiled"
    if reasons.get(backend) is not None:
        raise ValueError(f"backend {backend!r} cannot compute this call: {reasons[backend]}; use backend='auto'")
    return backend


def table_length(rows: Rows, kv_len: int) -> int:
    """A length beyond every distance in the call; from shapes alone, unless positions are explicit.

    Of few distinct values; where tables are built in a graph, which any length is to pass through, no more than it takes.
    """
    if not readable(rows.index):
        return kv_len + rows.index.shape[1] + MARGIN  # kernels refuse distances beyond it
    farthest = kv_len + rows.index.shape[1] - 1 if rows.key_ids is None else rows.span
    return 1 << max(10, (farthest + MARGIN).bit_length())


def distance_tables(logit_map: LogitMap, heads: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The map's gain and bias by distance, built in float64, in the dtype of the logits; cached."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if not keepable(like):
        return _tables(logit_map, heads, length, like.device, dtype)
    return _cached_tables(logit_map, heads, length, like.device, dtype)


def _tables(logit_map: LogitMap, heads: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():  # a cached tensor must serve training too
        gain, bias = logit_map.tables(heads, length, device)
        return gain.to(dtype), bias.to(dtype)


_cached_tables = functools.lru_cache(maxsize=128)(_tables)
