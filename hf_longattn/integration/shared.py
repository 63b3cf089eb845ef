"""The models of this process that run a method: to which one a layer belongs, and what two of them share."""

from __future__ import annotations

import copy
import threading
from typing import Any
from weakref import WeakSet

from torch import nn

from .config_records import record_in
from .internals import modules_of
from .layers import View
from .state import AttentionState, LayerMethod, state_of

#: Models that run a method.
_MODELS: WeakSet[nn.Module] = WeakSet()
#: All models that were built, parts of others apart, to find those on one config object.
_BUILT: WeakSet[nn.Module] = WeakSet()
_MODELS_LOCK = threading.Lock()


def track_model(model: nn.Module) -> None:
    """Note that a model runs a method."""
    with _MODELS_LOCK:
        _MODELS.add(model)


def note_built(model: nn.Module) -> None:
    """Note that a model was built: what is put into another one on its config is not to go into its own."""
    with _MODELS_LOCK:
        _BUILT.add(model)


def untrack_model(model: nn.Module) -> None:
    """Note that a model runs no method any more."""
    with _MODELS_LOCK:
        _MODELS.discard(model)


def model_of(state: AttentionState) -> nn.Module | None:
    """The model that a state belongs to; None of a copy."""
    with _MODELS_LOCK:
        models = list(_MODELS)
    return next((m for m in models if state_of(m) is state), None)


def refuse_stray_layer(module: nn.Module, method: LayerMethod) -> None:
    """Raise ValueError for a layer, called in no pass, that was copied or taken out of the model that its method is from."""
    whole = model_of(method.state) if method.state.passes else None
    if method.state.orphaned or (whole is not None and module not in modules_of(whole)):
        raise ValueError(
            f"a layer is called that was copied or taken out of a model under {method.whole_config.name}, by a model that "
            "runs no method, whose masks do not fit it: put a method into all of that one, hf_longattn.apply(model, ...), or "
            "take the layer's out, hf_longattn.remove(model)"
        )


def outermost(state: AttentionState, inner: nn.Module) -> nn.Module:
    """The model that a state belongs to, of which only the innermost is known; of a copy that one."""
    whole = model_of(state)
    return inner if whole is None or inner not in modules_of(whole) else whole


def refuse_shared(view: View) -> None:
    """Raise ValueError for a model that shares only some layers with one under a method, unless one is a part of the other."""
    mine, modules = {x.module for x in view.candidates}, set(view.modules)
    with _MODELS_LOCK:
        models = [m for m in _MODELS if m not in modules]
    for other in models:
        if mine.isdisjoint(inside := set(modules_of(other))) or view.model in inside:
            continue
        its = View(other)
        if mine != {x.module for x in its.candidates}:
            both = [x.index for x in view.candidates if x.module in inside]
            runs = "a method" if its.running is None else its.running.name
            raise ValueError(
                f"the layers {both} of this {view.name} are also those of a {its.name} with {len(its.candidates)} layers "
                f"that runs {runs}: what is put into one acts in the other, whose other layers and masks know nothing of it. "
                "Give this one layers of its own (copy.deepcopy), or change that one"
            )


def own_configs(view: View) -> bool:
    """Give a model copies of the configs that it shares with another one, which is not to change with it; True if it did.

    `LlamaForCausalLM(config)` keeps the config that it is given, so two models may be built on one.
    """
    modules, mine = set(view.modules), view.configs
    with _MODELS_LOCK:
        others = [inside for other in _BUILT | _MODELS if modules.isdisjoint(inside := modules_of(other))]
    shared = {id(vars(m).get("config")) for inside in others for m in inside}
    if shared.isdisjoint(map(id, mine)):
        return False
    copy_configs(view)
    return True


def copy_configs(view: View) -> None:
    """Give a model copies of its configs in their place."""
    mine = view.configs
    memo: dict[int, Any] = {}
    copies = {id(c): copy.deepcopy(c, memo) for c in mine}
    for c in mine:  # layers' methods know their config by identity
        vars(copies[id(c)])["_longattn"] = record_in(c)
    for module in view.modules:
        vars(module).update({k: copies[id(v)] for k, v in vars(module).items() if id(v) in copies})
