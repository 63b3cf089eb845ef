"""From a config and tensors to one kernel: the public attention function."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..config import BACKENDS, LongAttnConfig, check_config
from .call import Call
from .geometry import Rows, check_mask, check_positions, check_shapes
from .kernels import dense, few
from .kernels.kernel import Kernel, KernelFailure
from .prepared import Prepared, prepared
from .reference import dense_attention
from .rotary import Rotation
from .stages import finish
from .tracing import readable

#: Every kernel by its name, in the order in which "auto" asks them; the first two are for few queries, and no backends.
KERNELS: dict[str, Kernel] = {"dense": dense.KERNEL, "few": few.KERNEL}
KERNELS |= {name: import_module(f".kernels.{name}", __package__).KERNEL for name in BACKENDS[1:-1]}


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
        backend: "auto" takes `config.backend`, and then sdpa where it is exact, bands of fused
            kernels where they are, Triton on CUDA, else the tiled kernel; any other name insists.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of query; fully masked rows are 0, before any output norm.

    Raises:
        ValueError: shapes or mask do not fit, or the backend named cannot compute this exactly.
    """
    check_config(config)
    check_shapes(query, key, value)
    mask = check_mask(attention_mask, query, key)
    device = torch.device("cpu") if readable(query) and mask is None else query.device
    rows = Rows.causal(query.shape[2], key.shape[2], query_start, key_start, device)
    rows = rows if mask is None else rows.masked(mask)
    if position_ids is not None:
        ids = check_positions(position_ids, query, key).to(device)
        rows = rows.at(ids, ids)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    model: dict[str, Any] = {"rotation": rotation, "sink_logits": sink_logits}
    return attend(Call(query, key, value, config, rows, scaling, backend=backend, **model))


def reference_attention(*args: Any, backend: str = "reference", **kwargs: Any) -> Tensor:
    """`attention` by its definition, in the dtype it is given; the same arguments."""
    if backend != "reference":
        raise ValueError(f"reference_attention is the reference; backend={backend!r} belongs to hf_longattn.attention")
    return attention(*args, **kwargs | {"backend": backend})


def attend(call: Call) -> Tensor:
    """`attention` for a call over rows of any geometry."""
    query, key, value, learned = call.query, call.key, call.value, call.learned
    if not torch.compiler.is_compiling() and 0 in (query.shape[0], query.shape[2], call.kv_len):
        return finish(call.config, _nothing(call), learned)
    backend = choose_backend(call)
    if backend == "reference":
        return dense_attention(call)[0]
    try:
        return Prepared.of(call, KERNELS[backend])(query, key, value, learned, call.sink_logits, call.keep)
    except KernelFailure:  # which said so, and is not chosen again
        if backend == call.asked:
            raise
        prepared(call.rows).clear()
        return attend(call)


def choose_backend(call: Call) -> str:
    """The kernel that "auto" means for this call, or the one asked for; ValueError where that one cannot be exact.

    Few queries are "dense" where "bands" or "tiled" is asked for, too.
    """
    asked = call.asked
    if asked not in BACKENDS:
        raise ValueError(f"unknown backend {asked!r}; choose one of {', '.join(BACKENDS)}")
    if asked in ("bands", "tiled") and KERNELS["dense"].why_not(call) is None:
        return "dense"
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
