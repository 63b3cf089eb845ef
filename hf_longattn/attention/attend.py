"""From a config and tensors to one kernel: the public attention function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import BACKENDS, LongAttnConfig, check_config
from ..methods.base import EntropyTemperature
from . import decoding
from .geometry import Rows, check_mask, check_positions, check_shapes
from .kernels.flex import flex_attention, why_not_flex
from .kernels.fused import flash_attention, sdpa_attention, why_not_flash
from .kernels.spec import MASK_VALUE, LogitSpec
from .kernels.tiled import tiled_attention
from .kernels.triton import triton_attention, why_not_triton
from .lowering import KVSegment, LoweredAttention, lower
from .reference import dense_attention
from .rotary import Rotation
from .tables import TableCache


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
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Causal attention under `config`, on the fastest exact kernel.

    Args:
        query: (batch, heads, q_len, head_dim), any float dtype; logits are float32 at least.
        key, value: (batch, kv_heads, kv_len, head_dim); kv_heads divides heads.
        config: parameters per layer already reduced (`config.for_layer(i)`).
        scaling: factor on q . k, default head_dim ** -0.5.
        attention_mask: bool, broadcastable to (batch, heads, q_len, kv_len), True = visible, on top of causality.
        query_start: position of the first query, default key_start + kv_len - q_len.
        key_start: position of the first key.
        rotation: how query and key are rotated; needed where the config remaps rotary distances.
        position_ids: int64 (batch or 1, length), growing: distances are then differences of positions (skip-wise training).
        sink_logits: (heads,), the model's learned sinks: exp(sink) is one more term in the denominator of every softmax,
            beside that of a method; no method acts on it.
        backend: "auto" takes `config.backend`, and then sdpa where it is exact, FlexAttention on CUDA (not run there yet),
            else the tiled kernel; any other name insists.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of query; fully masked rows are 0, before any output norm.

    Raises:
        ValueError: shapes or mask do not fit, or the backend named cannot compute this exactly.
    """
    check_config(config)
    check_shapes(query, key, value)
    rows = Rows.causal(query.shape[2], key.shape[2], query_start, key_start, query.device)
    rows = Rows(rows.index, check_mask(attention_mask, query, key), rows.query_ids, rows.key_ids)
    if position_ids is not None:
        ids = check_positions(position_ids, query, key)
        rows = rows.at(ids, ids)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(
        query, key, value, config, rows, scaling=scaling, backend=backend, rotation=rotation, sink_logits=sink_logits
    )


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
    sink_logits: Tensor | None = None,
    backend: str = "auto",
    tables: TableCache | None = None,
    strength: Tensor | None = None,
) -> Tensor:
    """`attention` for rows of any geometry.

    Args:
        softcap: the model's own cap on its score; it acts before every method but the score's.
        learned: the trained parts of methods by slot; without it they are what they start as.
        rotation: how query and key are rotated; needed where the config remaps rotary distances.
        sink_logits: (heads,), the model's learned sinks: exp(sink) is one more term in the denominator of every softmax,
            beside that of a method; no method acts on it.
        tables: where tables are kept for the next call, a model's own; default a cache that all calls without one share.
        strength: the logit map's, in place of the config's: a number that a compiled graph reads when it runs.
    """
    if not torch.compiler.is_compiling() and 0 in (query.shape[0], query.shape[2], key.shape[2]):
        return LoweredAttention(config, rows, (), LogitSpec(scaling), learned).finish(_nothing(query, key, value))
    asked = config.backend if backend == "auto" else backend
    model: dict[str, Any] = {
        "scaling": scaling,
        "softcap": softcap,
        "learned": learned,
        "rotation": rotation,
        "sink_logits": sink_logits,
    }
    if asked in ("auto", "tiled") and decoding.serves(query, dropout) and not _trains(query, key, value, learned):
        return decoding.decode(query, key, value, config, rows, fuses=asked == "auto", tables=tables, **model)
    backend = choose_backend(config, query, rows, softcap, dropout, asked, sink_logits is not None)
    if backend == "reference":
        return dense_attention(query, key, value, config, rows, dropout=dropout, **model)[0]
    tiled = backend == "tiled"
    folds = config.score is not None or config.temperature is not None
    call = lower(config, query, key, rows, tables=tables, strength=strength, wide=tiled and folds, **model)
    if isinstance(config.temperature, EntropyTemperature):
        call = call.scaled(config.temperature.factor(_entropy(call, backend)))
        plain = config.logit_map is None and not softcap and len(call.segments) == 1 and rows.plain is not None
        plain = plain and call.sink_logits is None
        if asked == "auto" and plain:
            backend = "sdpa"  # what is left is plain attention
    if backend in ("sdpa", "flash"):
        fused, segment = sdpa_attention if backend == "sdpa" else flash_attention, call.segments[0]
        out = fused(segment.query, segment.key, value, segment.rows, scaling=call.spec.scaling, dropout=dropout)
    else:
        several = len(call.segments) > 1 or call.sink_logits is not None
        results = [_run(backend, segment, value, call.spec, dropout, several) for segment in call.segments]
        out = merge_outputs(results, call.sink_logits)
    return call.finish(out).to(query.dtype)


def _nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The weighted sum of values where there are no queries or no keys: 0, or nothing; with their gradients."""
    zero = sum(x[..., :0].sum() for x in (query, key, value))
    return query.new_zeros(*query.shape[:3], value.shape[-1]) + zero


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
    sink_logits: Tensor | None = None
    tables: TableCache | None = None


Result = tuple[Tensor, Tensor, Tensor]


def _run(
    backend: str,
    segment: KVSegment,
    value: Tensor | None,
    spec: LogitSpec,
    dropout: float = 0.0,
    with_lse: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, logsumexp and entropy over one segment, as `kernels.tiled.tiled_attention` defines them."""
    options: dict[str, Any] = {"with_lse": with_lse} | ({"with_entropy": True} if with_entropy else {})
    query, key, rows = segment.query, segment.key, segment.rows
    if backend == "tiled":
        return tiled_attention(query, key, value, rows, spec, dropout=dropout, **options)
    kernel: Callable[..., tuple[Tensor, Tensor, Tensor]] = triton_attention if backend == "triton" else flex_attention
    half = (key if value is None else value).dtype
    return kernel(query.to(half), key.to(half), value, rows, spec, **options)


def _log_shares(results: list[Result], sink_logits: Tensor | None) -> Tensor:
    """The logarithm of each segment's share of a row's probability, last the sink's: (segments, batch, heads, q_len), finite.

    Fully masked rows without a sink share evenly.
    """
    lse = [lse for _, lse, _ in results]
    if sink_logits is not None:
        lse.append(sink_logits.to(lse[0])[:, None].expand_as(lse[0]))
    return torch.log_softmax(torch.stack(lse).clamp(min=MASK_VALUE), 0)


def merge_outputs(results: list[Result], sink_logits: Tensor | None = None) -> Tensor:
    """The output over all segments from those over each, by their logsumexps: out = Σ share out_segment; a sink's is 0."""
    if len(results) == 1 and sink_logits is None:
        return results[0][0]
    shares = _log_shares(results, sink_logits).exp()
    return sum(share[..., None] * out for share, (out, _, _) in zip(shares, results, strict=False))  # type: ignore[return-value]


def merge_entropies(results: list[Result], sink_logits: Tensor | None = None) -> Tensor:
    """The entropy over all segments, H = Σ share (H_segment - ln share); with a sink, its own share is one of them."""
    if len(results) == 1 and sink_logits is None:
        return results[0][2]
    shares, own = _log_shares(results, sink_logits), [entropy for _, _, entropy in results]
    own += [] if sink_logits is None else [torch.zeros_like(own[0])]
    entropy = (shares.exp() * (torch.stack(own) - shares)).sum(0)
    visible = torch.stack([lse for _, lse, _ in results]).amax(0) > MASK_VALUE
    return torch.where(visible, entropy, 0.0)


def _entropy(call: LoweredAttention, backend: str) -> Tensor:
    """The entropy of every row over its keys; a sink is none."""
    kernel, several = "triton" if backend == "triton" else "tiled", len(call.segments) > 1
    return merge_entropies([_run(kernel, segment, None, call.spec, 0.0, several, True) for segment in call.segments])


def _trains(query: Tensor, key: Tensor, value: Tensor, learned: Mapping[str, nn.Module] | None) -> bool:
    """Whether gradients may be asked for, of tensors or of learned parts."""
    if not torch.is_grad_enabled():
        return False
    parts = (learned or {}).values()
    tensors = (query, key, value, *(parameter for part in parts for parameter in part.parameters()))
    return any(x.requires_grad for x in tensors)


def choose_backend(
    config: LongAttnConfig,
    query: Tensor,
    rows: Rows,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    sink: bool = False,
) -> str:
    """The backend that "auto" means for this call, or the one named; ValueError where that one cannot be exact."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    entropy = isinstance(config.temperature, EntropyTemperature)
    not_fused: str | None
    if softcap or sink:
        not_fused = "the model caps its scores" if softcap else "the model has learned sinks"
    else:
        in_the_way = [m.name for m in (config.logit_map, *config.key_bands, config.sink) if m is not None]
        in_the_way += [config.temperature.name] if config.temperature is not None and entropy else []
        not_fused = f"{in_the_way[0]} changes more than query and key" if in_the_way else None
    reasons = {"sdpa": not_fused, "flex": why_not_flex(query, dropout)}
    if backend == "triton":
        reasons["triton"] = why_not_triton(query, rows, softcap, dropout)
    if backend == "flash":
        reasons["flash"] = not_fused or why_not_flash(query, rows)
    if backend == "auto":
        if torch.onnx.is_in_onnx_export():
            return "reference"  # ONNX has no translation of our operator
        if reasons["sdpa"] is None and rows.plain is not None:
            return "sdpa"
        return "flex" if query.device.type == "cuda" and reasons["flex"] is None and not entropy else "tiled"
    if reasons.get(backend) is not None:
        raise ValueError(f"backend {backend!r} cannot compute this call: {reasons[backend]}; use backend='auto'")
    return backend
