"""The attention that a layer computes where no method changes it: one of Transformers' functions, or few queries at once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..core.kernels.kernel import FEW_QUERIES
from ..core.kernels.sdpa import few_queries
from .alike import Compute
from .base_attention import BaseAttention, attention_function, base_implementation
from .config_records import before
from .forward_context import LayerCall
from .masks import is_layout_mask, read_mask


def unmodified(
    layer_call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None, base: BaseAttention | None = None
) -> Compute:
    """The unmodified attention, as layers that are called alike compute it.

    Args:
        mask: the one that `base` takes; without it, the one that the layer got.
        base: of a layer with a method, the attention of before; None: the layer is left alone.
    """
    if base is None:
        function, mask = _left_alone(layer_call, query, key, mask)
    else:
        function = base.function(layer_call.module)
    if function is sdpa_attention_forward and are_few(layer_call, query, key, mask):
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
        return functools.partial(_few, mask, layer_call.scaling)
    named = {"dropout": layer_call.dropout, "scaling": layer_call.scaling}
    more = {"softcap": layer_call.softcap, "sliding_window": layer_call.sliding_window}
    named |= {name: x for name, x in more.items() if x is not None}
    return functools.partial(_by, function, mask, named, base is not None)


def _few(
    mask: Tensor | None, scaling: float | None, _: Any, query: Tensor, key: Tensor, value: Tensor, __: Any
) -> tuple[Tensor, Tensor | None]:
    return few_queries(query, key, value, mask, scaling), None


def _by(
    function: Any,
    mask: Tensor | None,
    named: dict[str, Any],
    own_mask: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    more: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """One of Transformers' attention functions."""
    if own_mask and "is_causal" in more:  # False says that the layer has a mask; this one may be None
        more = {k: v for k, v in more.items() if k != "is_causal"}
    return function(module, query, key, value, mask, **named, **more)  # type: ignore[no-any-return]


def _left_alone(layer_call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Any, Tensor | None]:
    """One of Transformers' attention functions, and the mask that it takes."""
    name = base_implementation(before(layer_call.module.config))
    if mask is not None and is_layout_mask(mask):
        rows = read_mask(mask, key.shape[2]).rows
        mask = rows.once(("visible", key.shape[2], key.device), lambda: rows.on(key.device).visible(key.shape[2]))
    if name == "eager" or layer_call.weights:
        name = "eager"
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return attention_function(name, layer_call.module), mask


def are_few(layer_call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Tell whether `few_queries` serves in place of Transformers' sdpa: the call asks for nothing beyond it."""
    small = 0 < query.shape[2] <= FEW_QUERIES and query.shape[1] > key.shape[1] and query.device.type == "cpu"
    plain = (
        not layer_call.traced
        and not layer_call.dropout
        and layer_call.softcap is None
        and "position_bias" not in layer_call.more
    )
    return small and plain and (query.shape[2] == 1 if mask is None else mask.shape[1] == 1)
