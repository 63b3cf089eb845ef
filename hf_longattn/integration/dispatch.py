"""The attention function that we register: one call of one layer, from transformers' arguments to a kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..core.attend import attend
from ..core.call import Call
from ..core.geometry import AttentionLayout
from ..core.kernels.kernel import KernelFailure
from ..core.plan import AttentionPlan, plan_key, plans
from ..core.reference import dense_attention
from ..core.rotated_keys import Keep
from ..slots.learned import learned_parts
from .arguments import HARMLESS, HARMLESS_IN_PAGES, check_arguments
from .caches import is_paged
from .engines import ulysses
from .engines.heads import of_these_heads
from .engines.paged import paged_attention
from .forward_context import LayerCall
from .masks import MaskContext, is_layout_mask
from .passes import find_pass
from .positions import rows_under
from .rotated_key_cache import kept_keys
from .unmodified import run_function, unmodified

_PICTURES_IN_PARTS = (
    "tokens at several positions each, as those of pictures are in a model with M-RoPE, are read by a remap of rotary "
    "distances in whole sequences: not in paged caches, and not split over processes"
)
#: What a layer that is left alone computes where no other function knows its rows.
_LEFT_ALONE = LongAttnConfig()


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
    forward_pass, method, positions = find_pass(module, attention_mask, kwargs.get("position_ids"), traced)
    layer_call = LayerCall(module, method, forward_pass, positions, traced, dropout, scaling, softcap, sliding_window, kwargs)
    out: tuple[Tensor, Tensor | None]
    paged = is_paged(kwargs)
    exchanged = attention_mask is None and not paged and ulysses.is_exchanged(layer_call, query, key)
    split = exchanged or method.state.group is not None
    if forward_pass is not None and forward_pass.axes is not None and (split or paged):
        raise NotImplementedError(_PICTURES_IN_PARTS)
    if method.config is not None or split:
        check_arguments(layer_call, HARMLESS_IN_PAGES if paged else HARMLESS)
    if split:
        out = ulysses.whole_sequence(layer_call, query, key, value, _over_rows), None
    elif paged:
        out = paged_attention(layer_call, query, key, value, _over_rows if method.config is not None else _left_alone), None
    elif method.config is None:
        out = unmodified(layer_call, query, key, value, attention_mask)
    elif forward_pass is not None and forward_pass.axes is not None and forward_pass.unchanged(method):
        out = _before_method(layer_call, query, key, value, attention_mask)
    else:
        out = _over_mask(layer_call, query, key, value, rows_under(attention_mask, layer_call, query.shape[2], key.shape[2]))
    return out


def _before_method(
    layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute a layer as before its method, in a pass with pictures in which the method changes nothing."""
    base = None
    if mask is not None and is_layout_mask(mask):
        base = rows_under(mask, layer_call, query.shape[2], key.shape[2]).base  # the pass notes where its tokens stand
    if base is None or layer_call.weights:
        return unmodified(layer_call, query, key, value, mask)
    return run_function(base.function(layer_call.module), layer_call, query, key, value, base.mask)


def _over_mask(
    layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, context: MaskContext
) -> tuple[Tensor, Tensor | None]:
    """A layer's method, or the model's own attention where the method changes nothing in the longest text of the pass."""
    weights, base, rows = layer_call.weights, context.base, context.rows
    assert rows is not None
    several = layer_call.forward_pass is not None and layer_call.forward_pass.axes is not None
    if base is not None and not weights and not several and context.changes_nothing(layer_call.method.identity_below):
        return run_function(base.function(layer_call.module), layer_call, query, key, value, base.mask)
    if context.plans is None and not layer_call.traced:
        context.plans = plans(rows)
    return _attend(layer_call, query, key, value, rows, None if weights else context.plans, weights)


def _attend(
    layer_call: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: AttentionLayout,
    made: Mapping[Hashable, AttentionPlan] | None = None,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A layer's method over rows of any geometry: output (batch, q_len, heads, head_dim), and weights if asked for.

    Args:
        made: the plans over these rows, of which a layer in decoding takes its own without making a `Call`; None: makes one.
    """
    method, sinks, traced = layer_call.method, layer_call.more.get("s_aux"), layer_call.traced
    config, scaling = (
        method.config or _LEFT_ALONE,
        query.shape[-1] ** -0.5 if layer_call.scaling is None else layer_call.scaling,
    )
    learned = learned_parts(layer_call.module)
    if query.shape[1] != method.heads and (sinks is not None or any(m.head_dependent for m in config.methods)):
        config, learned, own = of_these_heads(layer_call.module, query.shape[1], method.heads, config, learned)
        sinks = own(sinks) if sinks is not None and sinks.shape[0] == method.heads else sinks
    method_id = None if traced or config is not method.config else method.method_id
    if made and method_id is not None and not (layer_call.dropout or method.observer or torch.is_grad_enabled()):
        ready = made.get(plan_key(method_id, query, key, value, scaling, layer_call.softcap, learned, sinks))
        if ready is not None:
            try:
                out = ready.run(query, key, value, learned, sinks, _keep(layer_call, query))
                return out.transpose(1, 2).contiguous(), None
            except KernelFailure:  # which said so: another kernel is chosen
                pass
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
        keep=None if method_id is None else _keep(layer_call, query),
    )
    out, weights = dense_attention(call) if with_weights else (attend(call), None)
    if method.observer is not None:
        method.observer(dataclasses.replace(call, output=out))
    return out.transpose(1, 2).contiguous(), weights


def _keep(layer_call: LayerCall, query: Tensor) -> Keep | None:
    """Return what finds a layer's rotated keys beside the KV cache; None: outside of a pass, or not on a CPU."""
    forward_pass = layer_call.forward_pass
    if query.device.type != "cpu" or forward_pass is None or forward_pass.state is None:
        return None
    number = getattr(layer_call.module, "layer_idx", None)
    return functools.partial(kept_keys, forward_pass.cache, forward_pass.state.rotated_keys, number, query.shape[2])


def _over_rows(layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, rows: AttentionLayout) -> Tensor:
    """A layer whose rows no mask tells of: (batch, q_len, heads, head_dim)."""
    return _attend(layer_call, query, key, value, rows)[0]


def _left_alone(layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, rows: AttentionLayout) -> Tensor:
    """Compute a layer that keeps its attention."""
    return unmodified(layer_call, query, key, value, rows.on(key.device).visible(key.shape[2]))[0]
