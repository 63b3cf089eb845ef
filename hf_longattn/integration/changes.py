"""Changing what a model's attention computes: beside no pass, whole or not at all; switched off and on again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from transformers import PreTrainedModel

from ..config import LongAttnConfig
from .config_records import Before, before, raw_section, set_record
from .gate import at_gate, gate_of
from .internals import HOOKS, IMPLEMENTATION, buffers_of, children_of, get_implementation, set_implementation
from .layers import View, pretrained
from .max_length import announce
from .names import is_longattn_name
from .rope import build, exchange
from .shared import own_configs, refuse_shared, untrack_model
from .state import Disabled, set_method, state_of
from .trained_length import window_hides

#: The managers of continuous batching that are alive, by their model.
_MANAGERS: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()


def snapshot(view: View) -> Callable[..., None]:
    """Note the entries that a change of a model's attention writes, and return a function that puts them back.

    The function takes the names of the entries to put back; without any it puts back all.
    """
    owners = (*view.configs, *view.adapters, view.state, view.inner, getattr(view.model, "generation_config", None))
    entries = [vars(x) for x in owners if x is not None]
    entries.append(vars(view.model).get("peft_config") or {})
    entries += [vars(x.module) for x in view.layers] + [children_of(m) for m in view.modules]
    turning = [m for m in view.modules if buffers_of(m)]
    entries += [entry for m in turning for entry in (vars(m), buffers_of(m))]  # frequencies may change with a pass
    hooked = [view.inner, *turning, *(m for m in view.modules if isinstance(m, nn.Embedding))]
    entries += [vars(m)[name] for m in hooked for name in HOOKS]
    noted = [(live, dict(live)) for live in entries]

    def put_back(names: tuple[str, ...] | None = None) -> None:
        for live, kept in noted:
            for name in [*live] if names is None else names:
                live.pop(name, None)
            live.update(kept if names is None else {name: kept[name] for name in names if name in kept})

    return put_back


#: The names of those entries that decide how calls are computed.
CALLS = (IMPLEMENTATION, "_longattn", "whole_config", "strength")


def _refused(base: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"the attention of {type(base).__name__} is changed while a forward pass of it runs, in another thread or in "
        "a hook: stop what generates or trains with it first, since even between two passes a text that generate() is at work "
        "on would go on under the other method"
    )


@contextmanager
def changing(model: nn.Module, beside_passes: bool = False, waits: bool = False) -> Iterator[View]:
    """Change a model's attention, while no other thread changes it and no pass begins.

    Args:
        beside_passes: allow the change while a pass runs, since it changes nothing that a pass computes.
        waits: wait for the passes of other threads: a change that gives back what ran before cannot be refused.

    Raises:
        RuntimeError: a forward pass of the model runs.
    """
    base = pretrained(model)

    def where() -> Any:
        return state_of(base) or base

    if not beside_passes and gate_of(where()).runs_here:
        raise _refused(base)  # at once: another thread may hold the lock and wait for this pass
    with at_gate(where) as gate:
        if waits:
            gate.wait()
        if gate.running and not beside_passes:
            raise _refused(base)
        view = View(base)
        if own_configs(view):
            view = View(base)
        refuse_shared(view)
        yield view
        if (state := view.state) is not None:
            state.arrange(view)


@contextmanager
def transaction(model: nn.Module, waits: bool = False) -> Iterator[View]:
    """Change a model's attention; after an exception it is as before.

    Raises:
        RuntimeError: the method is disabled, or a capture of the model is open.
    """
    with changing(model, waits=waits) as view:
        if view.state is not None and view.state.disabled is not None:
            raise RuntimeError("the model's method is disabled (disable_adapter): change it after enabling it again")
        if not waits:  # what gives back what ran before cannot be refused
            refuse_observed(view)
        put_back = snapshot(view)
        try:
            yield view
        except BaseException:
            put_back()
            raise


def refuse_observed(view: View) -> None:
    """Raise RuntimeError while a `capture` (`observer.observe`) of the model is open."""
    if view.state is not None and view.state.observed:
        raise RuntimeError(
            f"a capture of this {view.name} is open (hf_longattn.capture), which measures one attention and gives it back at "
            "its end: leave its `with` first, then change the method, and open another"
        )


def note_batching(model: nn.Module, manager: Any) -> None:
    """Note a manager of continuous batching, beside which, while it runs, the model's method is not changed."""
    _MANAGERS.setdefault(model, WeakSet()).add(manager)


def refuse_while_batching(model: nn.Module) -> None:
    """Raise RuntimeError while continuous batching of the model runs: its masks and pages are those of one attention."""
    if any(manager.is_running() for manager in _MANAGERS.get(model, ())):
        raise RuntimeError(
            f"continuous batching of this {type(model).__name__} runs, under the attention that it was started with: stop its "
            "manager (manager.stop(), or leave its context), and change the method then"
        )


def release(view: View) -> None:
    """Drop the `LayerMethod` of modules that run none any more, and with the last one all guards."""
    state = view.state
    for layer in view.layers:
        if not is_longattn_name(get_implementation(layer.module.config)):
            set_method(layer.module, None)
    if state is not None and not view.layer_methods:
        vars(view.inner).pop("_longattn", None)
        for handle in (*state.guards, *state.passes):
            handle.remove()
        untrack_model(view.model)


def remember(view: View, config: Any, implementation: str | None = None) -> Before:
    """Note on a config what it ran before a method came; None: nothing, so what transformers would pick for it.

    Whatever else ran (FlashAttention, FlexAttention, a kernel from the Hub) reads masks that ours cannot be turned into:
    layers that are left alone run transformers' pick then, and `describe` says so.
    """
    owner = next((m for m in view.modules if isinstance(m, PreTrainedModel) and m.config is config), view.model)
    pick = owner.get_correct_attn_implementation(None, is_init_check=True)
    if getattr(config, "attn_logit_softcapping", None):
        pick = "eager"  # older releases pick sdpa, which drops the cap
    known = Before(implementation or pick, "eager" if implementation == "eager" else pick, window_hides(config))
    set_record(config, before=known)
    return known


def without_method(view: View) -> list[tuple[Any, str]]:
    """The config objects that run a method, each with the implementation that it ran before."""
    running = [c for c in view.configs if is_longattn_name(get_implementation(c))]
    return [(c, (before(c) or remember(view, c)).implementation) for c in running]


def is_disabled(model: nn.Module) -> bool:
    """Tell whether `disable` has switched a model's method off."""
    return (state := state_of(model)) is not None and state.disabled is not None


def disable(model: nn.Module, rope_parameters: dict[str, Any] | None = None) -> None:
    """Let the model compute what it did before its method, until `enable`; the methods of layers and learned parts stay.

    Args:
        rope_parameters: settings of the rotary encoding to use meanwhile; None leaves it as it is.
    """
    with changing(model) as view:
        base, state, running = view.model, view.state, without_method(view)
        if state is None or state.disabled is not None or not running:
            return
        refuse_while_batching(base)
        tables = None if rope_parameters is None else exchange(base, build(base, rope_parameters))
        longer = next((x.extended_to for c, _ in running if isinstance(x := raw_section(c), LongAttnConfig)), None)
        state.disabled = Disabled([(c, get_implementation(c)) for c, _ in running], tables, longer)
        announce(view, None)
        for config, implementation in running:  # not by the property, which would switch a vision tower too
            set_implementation(config, implementation)


def enable(model: nn.Module) -> None:
    """Undo `disable`, if the method is disabled."""
    with changing(model, waits=True) as view:
        state = view.state
        if state is None or state.disabled is None:
            return
        ran, state.disabled = state.disabled, None
        for config, implementation in ran.implementations:
            set_implementation(config, implementation)
        if ran.tables is not None:
            exchange(view.model, ran.tables)
        announce(view, ran.extended_to)
