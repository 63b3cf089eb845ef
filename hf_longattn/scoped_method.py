"""A method for a while: put into a model, and what it ran before given back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .integration.internals import get_implementation
from .integration.layer_methods import put
from .integration.layers import View
from .integration.model import MethodLike, Model, apply, change, no_untrained_warning, take_out
from .integration.names import name_for
from .integration.parameters import attach
from .slots.learned import container_of


@contextmanager
def using(model: Model, method: MethodLike | list[MethodLike] | tuple[MethodLike, ...], **parameters: Any) -> Iterator[Model]:
    """A method in a model for as long as the `with` is open; `model` is what `as` gets.

        with hf_longattn.using(model, "rerope"):
            model.generate(**inputs)

    Afterwards, after an exception too, the model runs what it ran before: its own attention or another method, with its
    parameters, its learned parts and the values that they have, and it reads as far as it did. These may be nested. What
    the method itself learned inside is gone: take `apply` to train it.

    Args:
        model, method, parameters: as of `apply`.

    Raises:
        ValueError: as `apply`; the model is then unchanged, and nothing inside has run.
    """
    was = AsItWas(model)
    was.put(method, **parameters)
    try:
        yield model
    finally:
        was.give_back()


class AsItWas:
    """The attention that a model runs now, with its learned parts; `give_back` restores it."""

    def __init__(self, model: nn.Module) -> None:
        view = View(model)
        self.model, self.config = model, view.running
        self.name = get_implementation(view.model.config)
        self.parts = {x.module: container_of(x.module) for x in view.layers}

    def put(self, method: MethodLike | list[MethodLike] | tuple[MethodLike, ...], **parameters: Any) -> None:
        """`apply`, without its warning of learned parts that go: they come back."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dropping the trained parameters")
            apply(self.model, method, **parameters)

    def give_back(self) -> None:
        """Let the model run what it ran."""
        with no_untrained_warning(), change(self.model, waits=True) as view:
            for layer in view.layers:
                kept = self.parts.get(layer.module)
                if container_of(layer.module) is not kept:
                    attach(view.model, layer, ())
                    if kept is not None:
                        layer.module.longattn = kept
            if self.config is None or view.target is None:
                take_out(view)
            elif view.running is not self.config:  # equal ones may reach differently far
                put(view, self.config, name_for(self.config.name))
        if self.config is None and get_implementation(view.model.config) != self.name:
            view.model.set_attn_implementation(self.name)
