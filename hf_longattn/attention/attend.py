"""From a config and tensors to one kernel: the public attention function."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..config import BACKENDS, LongAttnConfig
from ..slots.base import EntropyTemperature
from . import decoding
from .call import Call as Call
from .kernels.lowered import Kernel, LoweredAttention
from .kernels.spec import MASK_VALUE, Result
from .kernels.tiled import tempered
from .lowering import lower
from .reference import dense_attention
from .rotary import Rotation
from .stages import finish
from .tracing import keepable

#: Every kernel by its name, in the order in which "auto" asks them.
KERNELS: dict[str, Kernel] = {name: import_module(f".kernels.{name}", __package__).KERNEL for name in BACKENDS[1:-1]}


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
    return attend(
        Call.causal(
            query,
            key,
            value,
            config,
            scaling,
            attention_mask,
            query_start,
            key_start,
            backend,
            rotation,
            position_ids,
            sink_logits,
        )
    )


def reference_attention(*args: Any, backend: str = "reference", **kwargs: Any) -> Tensor:
    """`attention` by its definition, in the dtype it is given; the same arguments."""
    if backend != "reference":
        raise ValueError(f"reference_attention is the reference; backend={backend!r} belongs to hf_longattn.attention")
    return attention(*args, **kwargs | {"backend": backend})


def attend(call: Call) -> Tensor:
    """`attention` for a call over rows of any geometry."""
    query = call.query
    if not torch.compiler.is_compiling() and 0 in (query.shape[0], query.shape[2], call.key.shape[2]):
        return finish(call.config, _nothing(call), call.learned)
    if call.asked in ("auto", "tiled") and decoding.serves(query, call.dropout) and not call.trains:
        return decoding.decode(call)
    backend = choose_backend(call)
    if backend == "reference":
        return dense_attention(call)[0]
    kernel = KERNELS[backend]
    lowered = lower(call, wide=kernel.wide and call.folds)
    if isinstance(call.config.temperature, EntropyTemperature):
        if backend == "tiled" and not call.trains and not lowered.with_lse and keepable(query):
            return finish(call.config, tempered(lowered, call.config.temperature.factor), call.learned).to(query.dtype)
        lowered = lowered.scaled(call.config.temperature.factor(_entropies(lowered, kernel)))
        if call.asked == "auto" and lowered.is_plain:
            kernel = KERNELS["sdpa"]
    results = [kernel.run(lowered, segment) for segment in lowered.segments]
    return finish(call.config, merge_outputs(results, lowered.sink_logits), call.learned).to(query.dtype)


def choose_backend(call: Call) -> str:
    """The backend that "auto" means for this call, or the one asked for; ValueError where that one cannot be exact."""
    asked = call.asked
    if asked not in BACKENDS:
        raise ValueError(f"unknown backend {asked!r}; choose one of {', '.join(BACKENDS)}")
    if asked == "auto":
        if torch.onnx.is_in_onnx_export():
            return "reference"  # ONNX has no translation of our operator
        for name, kernel in KERNELS.items():
            if kernel.picked is not None and kernel.why_not(call) is None and kernel.picked(call):
                return name
    if asked != "reference" and (reason := KERNELS[asked].why_not(call)) is not None:
        raise ValueError(f"backend {asked!r} cannot compute this call: {reason}; use backend='auto'")
    return asked


def _nothing(call: Call) -> Tensor:
    """The weighted sum of values where there are no queries or no keys: 0, or nothing; with their gradients."""
    zero = sum(x[..., :0].sum() for x in (call.query, call.key, call.value))
    return call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1]) + zero


def _entropies(lowered: LoweredAttention, kernel: Kernel) -> Tensor:
    """The entropy of every row over its keys; a sink is none."""
    own, pass_before = kernel if kernel.entropies else KERNELS["tiled"], dataclasses.replace(lowered, of_entropy=True)
    return merge_entropies([own.run(pass_before, segment) for segment in lowered.segments])


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
