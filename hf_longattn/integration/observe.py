"""Looking at every attention call of a model while it runs, with or without a method in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..config import CUSTOM, LongAttnConfig
from ..geometry import Rows
from .dispatch import LayerPlan
from .model import Layer, _configs, _layers, _pretrained
from .names import is_ours

#: Called with (layer, query, key, value, rows, scaling, softcap, output); see `attend` for their shapes.
Observer = Callable[[Layer, Tensor, Tensor, Tensor, Rows, float, float | None, Tensor], None]


@contextmanager
def observe(model: nn.Module, observer: Observer) -> Iterator[list[Layer]]:
    """While open, `observer` sees every call of every layer that a method would change; yields those layers.

    A model without a method computes what it always does. Afterwards the model is as it was.
    """
    base = _pretrained(model)
    saved = [(c, c._attn_implementation, c.longattn) for c in _configs(base, causal=True)]
    before = {id(layer.module): layer.module.__dict__.get("longattn_plan") for layer in _layers(base)}
    layers = []
    try:
        for config, implementation, _ in saved:
            if not is_ours(implementation):
                config._attn_implementation_internal = CUSTOM
                config.longattn = LongAttnConfig().to_dict()
        for layer in _layers(base):
            plan: LayerPlan | None = before[id(layer.module)]
            if plan is None or plan.section is not layer.module.config.longattn:
                unchanged = layer.why_never or ("sliding window" if layer.windowed else None)
                plan = LayerPlan(
                    layer.module.config.longattn,
                    None if unchanged else LongAttnConfig(),
                    unchanged or "",
                    layer.windowed,
                    layer.module.config.num_attention_heads,
                )
            if plan.config is not None:
                layers.append(layer)
                plan = dataclasses.replace(plan, observer=_bound(observer, layer))
            layer.module.longattn_plan = plan
        yield layers
    finally:
        for config, implementation, section in saved:
            config._attn_implementation_internal = implementation
            config.longattn = section
        for layer in _layers(base):
            layer.module.__dict__.pop("longattn_plan", None)
            if (plan := before[id(layer.module)]) is not None:
                layer.module.longattn_plan = plan


def _bound(observer: Observer, layer: Layer) -> Callable[..., None]:
    def seen(*call: Any) -> None:
        observer(layer, *call)

    return seen
