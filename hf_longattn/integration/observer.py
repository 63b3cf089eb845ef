"""Looking at every attention call of a model while it runs, with or without a method in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..config import CUSTOM, NO_METHOD, layer_numbers
from ..core.call import Call
from .changes import CALLS, changing, refuse_observed, remember, snapshot
from .config_records import raw_section
from .internals import get_implementation, set_implementation
from .layer_methods import settle
from .layers import Layer, View
from .model_facts import num_heads
from .names import is_longattn_name
from .state import AttentionState, LayerMethod, method_of, set_method

#: Called after every attention call of an observed layer, with its output (batch, heads, q_len, head_dim).
Observer = Callable[[Layer, Call, Tensor], None]


@contextmanager
def observe(model: nn.Module, observer: Observer, layers: Iterable[int] | None = None) -> Iterator[list[Layer]]:
    """While open, `observer` sees every call of the layers that a method changes or could change; yields those layers.

    Sliding-window layers are left out, unless the method in the model changes them (`layers="all"`). A model without a
    method computes what it always does: bit for bit where it runs sdpa without padding, and with the rounding of another
    kernel elsewhere. Afterwards the model is as it was; meanwhile its method is not changed.

    Args:
        layers: only these; default all.

    Raises:
        ValueError: `layers` names one that is not there or is left alone, or there is none.
        RuntimeError: a capture of the model is open.
    """
    with changing(model) as view:
        refuse_observed(view)
        put_back = snapshot(view)
        try:
            observed = _observe(view, observer, None if layers is None else set(layer_numbers(layers)))
        except BaseException:
            put_back(CALLS)
            raise
        state, put_in = view.state, [(x.module, method_of(x.module)) for x in view.of_target]
        state.observed = True
    try:
        yield observed
    finally:
        with changing(model, beside_passes=True):
            state.observed = False
            if all(method_of(module) is method for module, method in put_in):  # `using` has given back no other
                put_back(CALLS)


def _observe(view: View, observer: Observer, named: set[int] | None) -> list[Layer]:
    """Put the observer into the methods of all layers, or of those named; returns these layers."""
    settle(view)
    config, state, observed = view.target, view.state or AttentionState(), []
    left_alone: dict[int, str] = {}
    if config is not None and not is_longattn_name(get_implementation(config)):
        for c in view.method_configs:
            remember(view, c, get_implementation(c))
            set_implementation(c, CUSTOM)
        state.set_running(view, NO_METHOD)
    whole = None if config is None else raw_section(config)
    for layer in view.of_target:
        method, unchanged = method_of(layer.module), layer.why_not
        if method is None or method.whole_config is not whole:
            number = -1 if layer.why_never else layer.index
            method = LayerMethod(state, whole, None, unchanged or "", layer.windowed, num_heads(layer), index=number)
        if method.config is None and not unchanged:
            method = dataclasses.replace(method, config=NO_METHOD)  # not in the method's `layers`: plain attention
        if method.config is None and not layer.why_never:
            left_alone[layer.index] = method.reason
        elif method.config is not None and (named is None or layer.index in named):
            observed.append(layer)
            method = dataclasses.replace(method, observer=functools.partial(observer, layer))
        set_method(layer.module, method)
    if missing := sorted((named or set()) - {x.index for x in observed}):
        why = ", ".join(f"{i} ({left_alone.get(i, 'not in this model')})" for i in missing)
        raise ValueError(f"these layers cannot be observed: {why}")
    if not observed:
        raise ValueError("this model has no layer to look at: no causal full attention")
    return observed
