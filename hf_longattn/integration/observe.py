"""Looking at every attention call of a model while it runs, with or without a method in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from ..attention.attend import Call
from ..config import CUSTOM, LongAttnConfig
from .dispatch import LayerPlan
from .layers import Layer, candidates_of, layers_of, pretrained
from .model import remember
from .names import is_ours

#: Called after every attention call of an observed layer.
Observer = Callable[[Layer, Call], None]


@contextmanager
def observe(model: nn.Module, observer: Observer, layers: Iterable[int] | None = None) -> Iterator[list[Layer]]:
    """While open, `observer` sees every call of the layers that a method changes or could change; yields those layers.

    Sliding-window layers are left out, unless the method in the model changes them (`layers="all"`). A model without a
    method computes what it always does: bit for bit where it runs sdpa without padding, and with the rounding of another
    kernel elsewhere. Afterwards the model is as it was.

    Args:
        layers: only these; default all.

    Raises:
        ValueError: `layers` names one that is not there or is left alone.
    """
    base = pretrained(model)
    config = next((x.module.config for x in candidates_of(base)), None)
    implementation, section = getattr(config, "_attn_implementation", None), getattr(config, "longattn", None)
    attention = [x for x in layers_of(base) if x.module.config is config]
    before = {id(layer.module): layer.module.__dict__.get("longattn_plan") for layer in attention}
    wanted = None if layers is None else set(layers)
    observed = []
    left_alone: dict[int, str] = {}
    try:
        if config is not None and not is_ours(implementation):
            remember(base, config, implementation)
            config._attn_implementation_internal = CUSTOM
            config.longattn = LongAttnConfig().to_dict()
        for layer in attention:
            plan: LayerPlan | None = before[id(layer.module)]
            if plan is None or plan.section is not layer.module.config.longattn:
                unchanged = layer.why_not
                plan = LayerPlan(
                    layer.module.config.longattn,
                    None if unchanged else LongAttnConfig(),
                    unchanged or "",
                    layer.windowed,
                    layer.module.config.num_attention_heads,
                )
            if plan.config is None and not layer.why_not:
                plan = dataclasses.replace(plan, config=LongAttnConfig())  # not in the method's `layers`: plain attention
            if layer.why_never:
                pass
            elif plan.config is None:
                left_alone[layer.index] = plan.reason
            elif wanted is None or layer.index in wanted:
                observed.append(layer)
                plan = dataclasses.replace(plan, observer=_bound(observer, layer))
            layer.module.longattn_plan = plan
        if missing := sorted((wanted or set()) - {x.index for x in observed}):
            why = ", ".join(f"{i} ({left_alone.get(i, 'not in this model')})" for i in missing)
            raise ValueError(f"these layers cannot be observed: {why}")
        yield observed
    finally:
        if config is not None:
            config._attn_implementation_internal = implementation
            config.longattn = section
        for layer in attention:
            layer.module.__dict__.pop("longattn_plan", None)
            if (plan := before[id(layer.module)]) is not None:
                layer.module.longattn_plan = plan


def _bound(observer: Observer, layer: Layer) -> Callable[[Call], None]:
    return lambda call: observer(layer, call)
