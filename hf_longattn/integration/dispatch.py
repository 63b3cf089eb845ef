"""The attention function that we register: one call of one layer, from transformers' arguments to a kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..config import NO_METHOD
from ..core.attend import attend, kept_plan
from ..core.call import Call
from ..core.geometry import AttentionLayout
from ..core.kernels.kernel import KernelFailure
from ..core.plan import ReadyPlan
from ..core.reference import dense_attention
from ..core.rotated_keys import Keep
from ..slots.learned import learned_parts
from .alike import found_alike, name_of_call, note_alike
from .arguments import HARMLESS, HARMLESS_IN_PAGES, check_arguments
from .caches import is_paged
from .engines import ulysses
from .engines.heads import of_these_heads
from .engines.paged import paged_attention
from .forward_context import ForwardContext, LayerCall
from .masks import MaskContext, is_layout_mask
from .passes import find_pass
from .positions import rows_under
from .rotated_key_cache import kept_keys
from .unmodified import unmodified

_PICTURES_IN_PARTS = (
    "a remap of rotary distances cannot read pictures in a model with M-RoPE under continuous batching, nor in a sequence "
    "that is split over processes: call generate() in one process, or take a method without a remap"
)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query (batch, heads, q_len, head_dim), key and value not repeated.

    Returns:
        output (batch, q_len, heads, head_dim), and attention weights if output_attentions asks for them.
    """
    traced = torch.compiler.is_compiling()
    name = None if traced else name_of_call(module, query, key, value, dropout, scaling, softcap, sliding_window)
    if name is not None and (compute := found_alike(module, attention_mask, name, kwargs)) is not None:
        try:
            return compute(module, query, key, value, kwargs)
        except KernelFailure:  # which said so: another kernel is chosen
            pass
    forward_pass, method, positions = find_pass(module, attention_mask, kwargs.get("position_ids"), traced)
    weights = bool(kwargs.get("output_attentions")) or (forward_pass is not None and forward_pass.weights)
    layer_call = LayerCall(
        module,
        method,
        forward_pass,
        positions,
        q_len=query.shape[2],
        kv_len=key.shape[2],
        traced=traced,
        weights=weights,
        dropout=dropout,
        scaling=scaling,
        softcap=softcap,
        sliding_window=sliding_window,
        more=kwargs,
        alike=name,
    )
    paged = is_paged(kwargs)
    exchanged = attention_mask is None and not paged and ulysses.is_exchanged(layer_call, query, key)
    split = exchanged or method.state.group is not None
    if forward_pass is not None and forward_pass.axes is not None and (split or paged):
        raise NotImplementedError(_PICTURES_IN_PARTS)
    if method.config is not None or split:
        check_arguments(layer_call, HARMLESS_IN_PAGES if paged else HARMLESS)
    if split:
        return ulysses.whole_sequence(layer_call, query, key, value, _over_rows), None
    if paged:
        return paged_attention(layer_call, query, key, value, _over_rows), None
    context = None
    if method.config is not None and not _keeps_own_mask(layer_call, attention_mask):
        context = rows_under(attention_mask, layer_call)
    if context is None:
        return unmodified(layer_call, query, key, attention_mask)(module, query, key, value, kwargs)
    if context.base is not None and _changes_nothing(layer_call, context):
        compute = unmodified(layer_call, query, key, context.base.mask(query.device), context.base)
        note_alike(layer_call, context, compute)
        return compute(module, query, key, value, kwargs)
    assert context.rows is not None
    return _attend(layer_call, query, key, value, context.rows, context)


def _keeps_own_mask(layer_call: LayerCall, mask: Tensor | None) -> bool:
    """Tell whether a layer runs its unmodified attention under the mask that it got.

    That is so in a pass with pictures in which its method changes nothing, where attention weights are asked for or the mask
    is the user's own.
    """
    forward_pass = layer_call.forward_pass
    if forward_pass is None or forward_pass.axes is None or not forward_pass.unchanged(layer_call.method):
        return False
    return layer_call.weights or mask is None or not is_layout_mask(mask)


def _changes_nothing(layer_call: LayerCall, context: MaskContext) -> bool:
    """Tell whether the model's own attention computes a layer: its method changes nothing in the longest text of the pass."""
    if layer_call.weights:
        return False
    forward_pass, method = layer_call.forward_pass, layer_call.method
    if forward_pass is not None and forward_pass.axes is not None:
        return forward_pass.unchanged(method)
    return context.changes_nothing(method.identity_below)


def _attend(
    layer_call: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: AttentionLayout,
    context: MaskContext | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A layer's method over rows of any geometry: output (batch, q_len, heads, head_dim), and weights if asked for.

    Args:
        context: that of the rows' mask, for the layers that are called alike.
    """
    method, sinks, traced = layer_call.method, layer_call.more.get("s_aux"), layer_call.traced
    config, learned = method.config or NO_METHOD, learned_parts(layer_call.module)
    scaling = query.shape[-1] ** -0.5 if layer_call.scaling is None else layer_call.scaling
    in_part = query.shape[1] != method.heads and (
        bool(learned) or sinks is not None or any(m.head_dependent for m in config.methods)
    )
    if in_part:
        config, learned, own = of_these_heads(layer_call.module, query.shape[1], method.heads, config, learned)
        sinks = own(sinks) if sinks is not None and sinks.shape[0] == method.heads else sinks
    method_id = None if traced or config is not method.config else method.method_id
    call = Call(
        query,
        key,
        value,
        config,
        rows,
        scaling=scaling,
        softcap=layer_call.softcap,
        dropout=layer_call.dropout,
        learned=learned,
        rotation=None if method.rotary is None else method.rotary.rotation(query),
        sink_logits=sinks,
        tables=method.state.tables,
        # a graph reads the strength when it runs; it would be compiled anew for each number
        strength=method.state.strength if traced and not torch.compiler.is_exporting() else None,
        method_id=method_id,
        keep=None if method_id is None else _keep(layer_call.module, layer_call.forward_pass, layer_call.q_len),
    )
    out, weights = dense_attention(call) if layer_call.weights else (attend(call), None)
    if method.observer is not None:
        method.observer(call, out)
    if context is not None and layer_call.alike is not None and not in_part and (plan := kept_plan(call)) is not None:
        note_alike(layer_call, context, functools.partial(_run, plan, layer_call.forward_pass))
    return out.transpose(1, 2).contiguous(), weights


def _run(
    plan: ReadyPlan,
    forward_pass: ForwardContext | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    more: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Compute another layer under the plan of one that was called alike."""
    learned = learned_parts(module) if plan.learns else None
    keep = _keep(module, forward_pass, query.shape[2]) if plan.keeps else None
    return plan.run(query, key, value, learned, more.get("s_aux"), keep).transpose(1, 2).contiguous(), None


def _keep(module: Any, forward_pass: ForwardContext | None, q_len: int) -> Keep | None:
    """Return what finds a layer's rotated keys beside the KV cache; None: outside of a pass."""
    if forward_pass is None or forward_pass.state is None:
        return None
    number = getattr(module, "layer_idx", None)
    return functools.partial(kept_keys, forward_pass.cache, forward_pass.state.rotated_keys, number, q_len)


def _over_rows(layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, rows: AttentionLayout) -> Tensor:
    """A layer whose rows no mask tells of: (batch, q_len, heads, head_dim)."""
    return _attend(layer_call, query, key, value, rows)[0]
