"""The public attention function: finds or makes the plan of a call, and its kernel."""

from __future__ import annotations

from collections.abc import Hashable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..config import BACKENDS, LongAttnConfig
from .call import Call
from .geometry import AttentionLayout, check_mask, check_positions, check_shapes
from .kernels import few
from .kernels.kernel import Kernel, KernelFailure
from .lower import lower
from .plan import MOST_PLANS, AttentionPlan, ReadyPlan, plans
from .reference import dense_attention
from .rotary import Rotation
from .stages import finish
from .tracing import readable, shareable

#: Kernels by name, in the order in which "auto" tries them: `few` first, which cannot be asked for by name, then
#: kernels/NAME.py for each name between "auto" and "reference" in `config.BACKENDS`.
KERNELS: dict[str, Kernel] = {"few": few.KERNEL}
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
        backend: "auto" takes `config.backend`, and then PyTorch's fused kernels where they are exact, Triton on CUDA,
            else the tiled kernel; any other name insists.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of query; fully masked rows are 0, before any output norm.

    Raises:
        TypeError: config is no `LongAttnConfig`, rotation no `Rotation`, or another argument no tensor.
        ValueError: it has parts, shapes or mask do not fit, or the backend named cannot compute this exactly.
        KernelFailure: the backend named does not compile or run on this machine.
    """
    _check_config(config)
    _check_tensors(query=query, key=key, value=value)
    more = {"attention_mask": attention_mask, "position_ids": position_ids, "sink_logits": sink_logits}
    _check_tensors(**{name: x for name, x in more.items() if x is not None})
    check_shapes(query, key, value)
    if sink_logits is not None and sink_logits.shape != query.shape[1:2]:
        raise ValueError(
            f"sink_logits {tuple(sink_logits.shape)} must be (heads,), one for each of {query.shape[1]} query heads"
        )
    if rotation is not None:
        _check_rotation(rotation, query.shape[3])
    mask = check_mask(attention_mask, query, key)
    device = torch.device("cpu") if readable(query) and mask is None else query.device
    rows = AttentionLayout.causal(query.shape[2], key.shape[2], query_start, key_start, device)
    rows = rows if mask is None else rows.masked(mask)
    if position_ids is not None:
        ids = check_positions(position_ids, query, key).to(device)
        rows = rows.at(ids, ids)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(query, key, value, config, rows, scaling, backend=backend, rotation=rotation, sink_logits=sink_logits)
    return attend(call)


def _check_config(config: LongAttnConfig) -> None:
    """Raise TypeError for what is no config (a name says nothing of parameters), and ValueError for one that has parts."""
    if not isinstance(config, LongAttnConfig):
        raise TypeError(
            f"attention takes a LongAttnConfig, got {config!r}: LongAttnConfig.preset({str(config)!r}, ...) makes one"
        )
    if config.parts:
        raise ValueError(f"attention is of one layer, and {config.name} has parts: config.for_layer(i) is that of layer i")


def _check_tensors(**given: Any) -> None:
    """Raise TypeError for what is no tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _check_rotation(rotation: Any, head_dim: int) -> None:
    """Raise TypeError for what is no rotation, ValueError for frequencies that are no row of them or too many."""
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation takes hf_longattn.Rotation(inv_freq), got {type(rotation).__name__}")
    _check_tensors(inv_freq=rotation.inv_freq)
    if rotation.inv_freq.ndim != 1 or not rotation.inv_freq.is_floating_point():
        got = f"{rotation.inv_freq.dtype}, {tuple(rotation.inv_freq.shape)}"
        raise ValueError(f"the inv_freq of a rotation must be of a floating-point dtype, (pairs,), got {got}")
    if rotation.last > head_dim:
        raise ValueError(f"rotation turns features up to {rotation.last} of a head_dim of {head_dim}")


def reference_attention(*args: Any, backend: str = "reference", **kwargs: Any) -> Tensor:
    """`attention` by its definition, in the dtype it is given; the same arguments but for `backend`."""
    if backend != "reference":
        raise ValueError(f"reference_attention is the reference; backend={backend!r} belongs to hf_longattn.attention")
    return attention(*args, **kwargs | {"backend": backend})


def attend(call: Call) -> Tensor:
    """`attention` for a call over rows of any geometry."""
    query, key, value, learned = call.query, call.key, call.value, call.learned
    if not torch.compiler.is_compiling() and 0 in (query.shape[0], query.shape[2], call.kv_len):
        return finish(call.config, call.table_cache, _nothing(call), learned)
    if call.asked not in BACKENDS:
        raise ValueError(f"unknown backend {call.asked!r}; choose one of {', '.join(BACKENDS)}")
    if call.asked == "reference" or (call.asked == "auto" and torch.onnx.is_in_onnx_export()):  # it translates no operator
        return dense_attention(call)[0]
    plan = plan_of(call)
    try:
        return plan.run(query, key, value, learned, call.sink_logits, call.keep)
    except KernelFailure:  # which said so, and is not chosen again
        if plan.kernel == call.asked:
            raise
        plans(call.rows).clear()
        return attend(call)


def plan_of(call: Call) -> ReadyPlan:
    """The plan of a call with its kernel, the one of its rows; made anew where nothing may be kept.

    Raises:
        ValueError: the backend asked for cannot be exact.
    """
    if not shareable(call.query) or call.strength is not None or "logit_map" in (call.learned or ()):  # tables of one layer
        return chosen(lower(call))
    name, made = _name(call), plans(call.rows)
    if (own := made.get(name)) is None:
        if len(made) >= MOST_PLANS:
            made.clear()
        own = made[name] = chosen(lower(call))
    return own


def kept_plan(call: Call) -> ReadyPlan | None:
    """The plan of a call with its kernel, if its rows keep one."""
    return plans(call.rows).get(_name(call))


def _name(call: Call) -> Hashable:
    """Calls over the same rows with equal names share a plan."""
    method_id = (call.config, call.rotation, call.asked) if call.method_id is None else call.method_id
    shapes = call.query.shape, call.key.shape, call.value.shape[3], call.query.dtype, call.query.device
    learned, has_sinks = tuple(call.learned or ()), call.sink_logits is not None
    return method_id, shapes, call.scaling, call.softcap, learned, has_sinks, call.dropout, call.trains


def chosen(plan: AttentionPlan) -> ReadyPlan:
    """The plan with the kernel that "auto" means for it, or the one asked for; ValueError where that one cannot be exact.

    On a CPU few queries are "few" where "fused" or "tiled" is asked for, too.
    """
    asked = plan.asked
    if asked == "auto":
        name = _preferred(plan)
    elif asked in ("fused", "tiled") and plan.query.device.type == "cpu" and KERNELS["few"].refuses(plan) is None:
        name = "few"
    elif (reason := KERNELS[asked].refuses(plan)) is not None:
        raise ValueError(f"backend {asked!r} cannot compute this call: {reason}; use backend='auto'")
    else:
        name = asked
    return ReadyPlan(plan, name, KERNELS[name].prepare(plan))


def _preferred(plan: AttentionPlan) -> str:
    for name, kernel in KERNELS.items():
        if kernel.preferred is not None and kernel.refuses(plan) is None and kernel.preferred(plan):
            return name
    raise AssertionError("the tiled kernel computes every plan")


def _nothing(call: Call) -> Tensor:
    """The weighted sum of values where there are no queries or no keys: 0, or nothing; with their gradients."""
    zero = sum(x[..., :0].sum() for x in (call.query, call.key, call.value))
    return call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1]) + zero
