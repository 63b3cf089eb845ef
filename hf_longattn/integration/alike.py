"""Layers of a pass that are called alike: what the first of them found out, the others compute at once.

Where a decoded token takes many layers and little arithmetic, each Python call counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.tracing import keepable
from ..slots.learned import learned_parts
from .forward_context import PASS, LayerCall
from .masks import MaskContext

#: (module, query, key, value, arguments that `attention_forward` does not name) -> what that returns.
Compute: TypeAlias = Callable[[Any, Tensor, Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor | None]]


def name_of_call(module: Any, query: Tensor, key: Tensor, value: Tensor, *named: Any) -> Hashable:
    """The name that calls of layers share under one mask if they are alike; None: this one is looked at by itself.

    Args:
        named: dropout, scaling, softcap and sliding window.
    """
    method = module.__dict__.get("_longattn")
    if method is None or method.observer is not None or torch.is_grad_enabled():
        return None
    own = method.method_id, type(module), module.__dict__.get("is_causal"), *learned_parts(module)
    return own, query.shape, key.shape, value.shape, query.dtype, query.device, named


def found_alike(module: Any, mask: Tensor | None, name: Hashable, more: dict[str, Any]) -> Compute | None:
    """What a layer computes if one was called alike before it in its pass; None: none was.

    Args:
        more: the arguments that `attention_forward` does not name.
    """
    forward_pass = PASS.get()
    if forward_pass is None or mask is None:
        return None
    context = mask.__dict__.get("_longattn")
    if context is None or context.forward_pass is not forward_pass:
        return None
    arguments, compute = context.alike.get(name, (None, None))
    if arguments is None or not _same(arguments, more):
        return None
    forward_pass.reached.add(module)
    return compute  # type: ignore[no-any-return]


def note_alike(layer_call: LayerCall, context: MaskContext, compute: Compute) -> None:
    """Let layers of the pass that are called alike compute so."""
    forward_pass, rows = layer_call.forward_pass, context.rows
    if layer_call.alike is None or layer_call.weights or rows is None or forward_pass is None:
        return
    if forward_pass is context.forward_pass and forward_pass.probed is None and keepable(rows.index):
        context.alike[layer_call.alike] = layer_call.more, compute


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two calls got the same arguments, but for the sinks, which are each layer's own, or None for both."""
    others = [name for name, x in one.items() if x is not other.get(name)]
    if others == ["s_aux"] and one["s_aux"] is not None and other.get("s_aux") is not None:
        others = []
    return not others and one.keys() == other.keys()
