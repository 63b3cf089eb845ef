"""Layers of a pass that are called alike: what the first of them found out, the others compute at once.

Where a decoded token takes many layers and little arithmetic, each Python call counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..core.kernels.kernel import KernelFailure
from ..core.tracing import keepable
from ..slots.learned import learned_parts
from .forward_context import PASS, LayerCall
from .masks import MaskContext
from .state import LayerMethod

#: The layer's learned parts of methods by slot.
Parts: TypeAlias = Mapping[str, nn.Module]
#: (module, query, key, value, learned parts, arguments that `attention_forward` does not name) -> what that returns.
Compute: TypeAlias = Callable[[Any, Tensor, Tensor, Tensor, Parts, dict[str, Any]], tuple[Tensor, Tensor | None]]


def compute_alike(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: tuple[Any, ...], more: dict[str, Any]
) -> tuple[Tensor, Tensor | None] | None:
    """Compute a layer as the first that was called alike; None: none was, or its kernel failed, and said so.

    Args:
        named: dropout, scaling, softcap and sliding window.
        more: the arguments that `attention_forward` does not name.
    """
    forward_pass, method = PASS.get(), module.__dict__.get("_longattn")
    if forward_pass is None or method is None or mask is None or torch.is_grad_enabled():
        return None
    context = mask.__dict__.get("_longattn")
    if context is None or context.forward_pass is not forward_pass or method.observer is not None:
        return None
    learned = learned_parts(module)
    found = context.alike.get(_name(module, method, query, key, value, learned, named))
    if found is None or not _same(found[0], more):
        return None
    forward_pass.reached.add(module)
    try:
        return found[1](module, query, key, value, learned, more)  # type: ignore[no-any-return]
    except KernelFailure:
        return None


def note_alike(
    layer_call: LayerCall, context: MaskContext, query: Tensor, key: Tensor, value: Tensor, compute: Compute
) -> None:
    """Let layers of the pass that are called alike compute so."""
    forward_pass, method = layer_call.forward_pass, layer_call.method
    if forward_pass is None or forward_pass is not context.forward_pass or forward_pass.probed is not None:
        return
    usual = method.observer is None and query.shape[1] == method.heads and not layer_call.weights
    if usual and not torch.is_grad_enabled() and keepable(query):
        named = layer_call.dropout, layer_call.scaling, layer_call.softcap, layer_call.sliding_window
        name = _name(layer_call.module, method, query, key, value, learned_parts(layer_call.module), named)
        context.alike[name] = layer_call.more, compute


def _name(
    module: Any, method: LayerMethod, query: Tensor, key: Tensor, value: Tensor, learned: Parts, named: tuple[Any, ...]
) -> Hashable:
    own = method.method_id, type(module), module.__dict__.get("is_causal"), *learned
    return own, query.shape, key.shape, value.shape, query.dtype, query.device, named


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two calls got the same arguments, but for their layers' sinks."""
    others = [name for name, x in one.items() if x is not other.get(name) and name != "s_aux"]
    return not others and one.keys() == other.keys()
