"""The attention state of a model: all that is kept about it, and how it is put back.

Each of these has its part of it as `_longattn`:

    the innermost model around the attention    its `AttentionState`
    each attention module                       its `LayerPlan`, which leads there, unless it came from another model; in vLLM
                                                its `ServedLayer`
    a config                                    its `ConfigRecord`
    the mask of a pass                          its `MaskContext`, which leads to the pass
    a KV cache                                  its `CacheRecord`

Beside these, where other packages look for it: `module.longattn`, an attention module's learned parts, by which state_dicts
name them; `config.longattn_lengths`, which is saved (see `max_length`); `model.longattn_adapters`, the configs of adapters
that PEFT notes nowhere on the model. Copies and pickles of a model take all this along; models that share their attention
modules share it. What a model made of the keys in a cache (`AttentionState.rotated_keys`) goes with the cache.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from ..config import LongAttnConfig
from ..core.call import Call
from ..core.tables import TableCache
from .device_checks import Claims
from .gate import at_gate, gate_of, share_gate
from .internals import HOOKS, IMPLEMENTATION, buffers_of, children_of, get_implementation, is_replica, set_implementation
from .layers import View, pretrained
from .max_length import announce
from .names import Before, before, is_longattn_name, raw_section, record_in, set_record
from .rope import RotaryTables, build, exchange
from .rotated_key_cache import LayerKeys
from .rotation import RotarySource
from .trained_length import window_hides

#: What a model's tables may take: those of 32 layers with 32 heads each, for 128k tokens.
TABLE_BYTES = 2 << 30


class Section(dict[str, Any]):
    """The dict behind `config.longattn` of a model that runs it, read-only: an entry written there would be saved, not run."""

    def __init__(self, shown: dict[str, Any]) -> None:
        super().__init__({k: self._part(v) for k, v in shown.items()})

    @staticmethod
    def _part(value: Any) -> Any:
        if isinstance(value, list):
            return [Section._part(x) for x in value]
        return Section(value) if isinstance(value, dict) else value

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "config.longattn was read when the method was put into the model: change it with hf_longattn.update(model, ...), "
            "or, for a model that is yet to be built, assign a whole dict: config.longattn = {...}"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(eq=False)
class AttentionState:
    """The state of a model as a whole; its layers' plans lead here."""

    tables: TableCache = field(default_factory=lambda: TableCache(TABLE_BYTES))
    strength: Tensor | None = None  # of the logit map once it is other than 1: compiled graphs read it when they run
    whole_config: LongAttnConfig | None = None  # what the model runs
    arrangement: Arrangement | None = None  # of its layers when they were planned; copies have none, until their first pass
    layers: tuple[int, ...] = ()  # the numbers of `View.candidates`, as they were when the method came
    unverified: bool = False  # whether a rotation is yet to be verified, at the first call
    # methods that modules which import this one define: `planning` puts them in as it is imported
    verify: ClassVar[Callable[[AttentionState, Any], None]]
    renew: ClassVar[Callable[[AttentionState, Any], None]]
    find_axes: ClassVar[Callable[[AttentionState, Any, int], None]]

    passes: tuple[RemovableHandle, ...] = ()  # hooks around a forward pass: see `passes.hook_passes`
    traced: Any = None  # the `ForwardContext` that a graph is traced through
    group: Any = None  # of the processes that share each of its sequences: see `engines.ulysses`; copies have none
    remapped: bool = False  # whether a remap of rotary distances acts in some layer
    alone: bool = False  # see `orphaned`
    guards: tuple[RemovableHandle, ...] = ()  # hooks that refuse calls: see `guards`
    disabled: tuple[list[tuple[Any, str]], RotaryTables | None, int | None] | None = (
        None  # what `enable` puts back, in that order
    )
    claims: Claims = field(default_factory=Claims)
    method_ids: dict[Hashable, object] = field(default_factory=dict)  # those of all layers: see `LayerPlan.method_id`
    # beside each KV cache, by the number of the layer; copies have none
    rotated_keys: WeakKeyDictionary[Cache, dict[int, LayerKeys]] = field(default_factory=WeakKeyDictionary)

    def set_running(self, view: View, config: LongAttnConfig) -> None:
        """Let the configs of a model and its language model hold what it runs, and compiled graphs its strength."""
        for c in (*view.method_configs, view.model.config):
            set_record(c, section=config)
        self.whole_config = config
        self.layers = tuple(x.index for x in view.candidates)
        share_gate(self, view.model)
        vars(view.inner)["_longattn"] = self
        value = config.strength
        if value is None:
            self.strength = None
        elif value != 1 or self.strength is not None:
            self.strength = torch.tensor(value, dtype=torch.float64, device="cpu")

    def arrange(self, view: View) -> Arrangement:
        """Note how a model's layers lie now and what its configs describe, with which forward passes compare it."""
        plans = [(x.module, plan) for x in view.layers if (plan := plan_of(x.module)) is not None and plan.state is self]
        described = list({id(m.config): (m.config, plan.whole_config) for m, plan in plans}.values())
        arrangement = Arrangement(described, *(_places_of(view) if is_settled(view) else ()))
        if not is_replica(view.model):
            self.arrangement = arrangement
        return arrangement

    @property
    def orphaned(self) -> bool:
        """True: it belongs to layers alone, which were copied out of their model, or outlived it."""
        return self.alone or any(handle.hooks_dict_ref() is None for handle in self.passes)

    def __getstate__(self) -> dict[str, Any]:
        own = vars(self) | {"arrangement": None, "group": None, "rotated_keys": None}
        return own | ({"alone": True, "passes": (), "guards": ()} if self.orphaned else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, rotated_keys=WeakKeyDictionary())


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The plan of one attention module, made when the method was put into the model."""

    state: AttentionState
    whole_config: Any  # the model's `LongAttnConfig` that it was made from: the very object that the model's config holds
    config: LongAttnConfig | None  # this layer's, or None if it is left alone
    reason: str = ""  # why it is left alone, or not remapped
    windowed: bool = False
    heads: int = 0
    rotary: RotarySource | None = None  # how the layer rotates, where its config remaps that
    observer: Callable[[Call], None] | None = None  # sees every call of this layer: see `observer`
    index: int = -1  # the number of the layer that it was made for; -1: one that no method goes into

    @functools.cached_property
    def identity_below(self) -> float:
        """The number of tokens up to which a layer computes the same as before its method; 0: never."""
        return min(self.limits)

    @functools.cached_property
    def limits(self) -> tuple[float, float]:
        """The position below which, and the number of tokens up to which, a layer computes the same as before its method.

        Remaps and windows go by positions, all else by tokens.
        """
        if self.observer is not None or self.config is None or self.config.backend != "auto":
            return 0, 0
        intervals = self.config.key_intervals
        others = [m.identity_below for m in self.config.methods if m not in intervals]
        return min((m.identity_below for m in intervals), default=math.inf), min(others, default=math.inf)

    @functools.cached_property
    def method_id(self) -> object:
        """The object that stands for config and rotation in `Call.method_id`: layers where both are equal share it."""
        return self.state.method_ids.setdefault((self.config, self.rotary), object())


class Arrangement(NamedTuple):
    """A model's configs and the places of its layers, as they were when it was planned: each pass compares them, in a few
    steps, with what they are then.

    Args:
        described: the config of each attention module, and the `LongAttnConfig` that its record held.
        children: the tables of children (`children_of`) of the modules from the innermost model to its attention, which
            change with them; None where its layers are others than those that its method was put into.
        held: what these tables held.
        attention: the `vars` of each attention module, which change with it.
        numbers: the `layer_idx` that each had.
    """

    described: list[tuple[Any, Any]]
    children: list[Any] | None = None
    held: list[tuple[Any, ...]] | None = None
    attention: Sequence[dict[str, Any]] = ()
    numbers: Sequence[int | None] = ()

    @property
    def is_described(self) -> bool:
        """True: all configs still hold what was planned; those that run no method need not."""
        return all(raw_section(c) is held or not is_longattn_name(get_implementation(c)) for c, held in self.described)

    @property
    def is_current(self) -> bool:
        """True: the model's layers are those that were planned, at their places and with their numbers."""
        if self.children is None or [x.get("layer_idx") for x in self.attention] != self.numbers:
            return False
        return [tuple(x.values()) for x in self.children] == self.held


def plan_of(module: nn.Module) -> LayerPlan | None:
    """The plan of an attention module, if it has one."""
    plan = module.__dict__.get("_longattn")
    return plan if isinstance(plan, LayerPlan) else None


def set_plan(module: nn.Module, plan: LayerPlan | None) -> None:
    module.__dict__.pop("_longattn", None)
    if plan is not None:
        module.__dict__["_longattn"] = plan


def state_of(model: nn.Module) -> AttentionState | None:
    """The state of a model, or of one that it is a part of; None before any method came."""
    own = (vars(m).get("_longattn") for m in model.modules())
    found = next((state for state in own if isinstance(state, AttentionState)), None)
    return found or next((plan.state for m in model.modules() if (plan := plan_of(m)) is not None), None)


def is_settled(view: View) -> bool:
    """Tell whether a model's layers are those that its method was put into, by their numbers, and all configs say so.

    Not so where some were copied, moved or dropped since, came from another model, or were put under another head.
    """
    plans = [plan_of(x.module) for x in view.candidates]
    numbers = tuple(None if plan is None or plan.state is not view.state else plan.index for plan in plans)
    if view.state is None or not plans or numbers != view.state.layers or numbers != tuple(x.index for x in view.candidates):
        return False
    return all(plans[0] is not None and raw_section(c) is plans[0].whole_config for c in view.method_configs)


def _places_of(view: View) -> tuple[list[Any], list[tuple[Any, ...]], list[dict[str, Any]], list[int | None]]:
    """The fields of an `Arrangement` behind `described`."""
    attention = [x.module for x in view.candidates]
    inside = {x for module in attention for x in module.modules()}
    around = [m for m in view.inner.modules() if m not in inside and not inside.isdisjoint(m.modules())]
    children, own = [children_of(m) for m in around], [vars(x) for x in attention]
    return children, [tuple(x.values()) for x in children], own, [x.get("layer_idx") for x in own]


def snapshot(view: View) -> Callable[..., None]:
    """Note the entries that a change of a model's attention writes; returns the function that puts them back, all of them or
    only those of the names that it is given.
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
    """A change of a model's attention, beside which no other thread changes it and no pass begins.

    Args:
        beside_passes: it changes nothing that a pass which runs computes.
        waits: it gives back what was, which cannot be refused: it waits for the passes of other threads.

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
    """A change, after an exception in which the model is as it was. RuntimeError: the method is disabled."""
    with changing(model, waits=waits) as view:
        if view.state is not None and view.state.disabled is not None:
            raise RuntimeError("the model's method is disabled (disable_adapter): change it after enabling it again")
        put_back = snapshot(view)
        try:
            yield view
        except BaseException:
            put_back()
            raise


#: Models that run a method, to find those that were built on one config object.
_MODELS: WeakSet[nn.Module] = WeakSet()
_MODELS_LOCK = threading.Lock()


def track_model(model: nn.Module) -> None:
    """Note that a model runs a method."""
    with _MODELS_LOCK:
        _MODELS.add(model)


def model_of(state: AttentionState) -> nn.Module | None:
    """The model that a state belongs to; None of a copy."""
    with _MODELS_LOCK:
        models = list(_MODELS)
    return next((m for m in models if state_of(m) is state), None)


def refuse_abroad(module: nn.Module, plan: LayerPlan) -> None:
    """ValueError: outside of any pass, a layer is called that was copied or taken out of the model that its plan is from."""
    whole = model_of(plan.state) if plan.state.passes else None
    if plan.state.orphaned or (whole is not None and module not in set(whole.modules())):
        raise ValueError(
            f"a layer is called that was copied or taken out of a model under {plan.whole_config.name}, by a model that runs "
            "no method, whose masks do not fit it: put a method into all of that one, hf_longattn.apply(model, ...), or take "
            "the layer's out, hf_longattn.remove(model)"
        )


def outermost(state: AttentionState, inner: nn.Module) -> nn.Module:
    """The model that a state belongs to, of which only the innermost is known; of a copy that one."""
    whole = model_of(state)
    return inner if whole is None or inner not in set(whole.modules()) else whole


def refuse_shared(view: View) -> None:
    """ValueError: a model's layers are some of those of another one under a method, and neither is a part of the other."""
    mine, modules = {x.module for x in view.candidates}, set(view.modules)
    with _MODELS_LOCK:
        models = [m for m in _MODELS if m not in modules]
    for other in models:
        if mine.isdisjoint(inside := set(other.modules())) or view.model in inside:
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
    if not any(isinstance(raw_section(c), LongAttnConfig) for c in mine):  # no model runs a method under one of them
        return False
    with _MODELS_LOCK:
        others = [other for other in _MODELS if modules.isdisjoint(other.modules())]
    shared = {id(getattr(m, "config", None)) for other in others for m in other.modules()}
    if shared.isdisjoint(map(id, mine)):
        return False
    memo: dict[int, Any] = {}
    copies = {id(c): copy.deepcopy(c, memo) for c in mine}
    for c in mine:  # plans know their config by identity
        vars(copies[id(c)])["_longattn"] = record_in(c)
    for module in modules:
        vars(module).update({k: copies[id(v)] for k, v in vars(module).items() if id(v) in copies})
    return True


def release(view: View) -> None:
    """Drop the plans of modules that no longer run a method, and with the last plan all guards."""
    state = view.state
    for layer in view.layers:
        if not is_longattn_name(get_implementation(layer.module.config)):
            set_plan(layer.module, None)
    if state is not None and not view.plans:
        vars(view.inner).pop("_longattn", None)
        for handle in (*state.guards, *state.passes):
            handle.remove()
        with _MODELS_LOCK:
            _MODELS.discard(view.model)


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
    """Let the model compute what it did before its method, until `enable`; plans and learned parts stay.

    Args:
        rope_parameters: settings of the rotary encoding to use meanwhile; None leaves it as it is.
    """
    with changing(model) as view:
        base, state, running = view.model, view.state, without_method(view)
        if state is None or state.disabled is not None or not running:
            return
        tables = None if rope_parameters is None else exchange(base, build(base, rope_parameters))
        longer = next((x.extended_to for c, _ in running if isinstance(x := raw_section(c), LongAttnConfig)), None)
        state.disabled = [(c, get_implementation(c)) for c, _ in running], tables, longer
        announce(view, None)
        for config, implementation in running:  # not by the property, which would switch a vision tower too
            set_implementation(config, implementation)


def enable(model: nn.Module) -> None:
    """Undo `disable`, if the method is disabled."""
    with changing(model, waits=True) as view:
        state = view.state
        if state is None or state.disabled is None:
            return
        implementations, tables, longer = state.disabled
        state.disabled = None
        for config, implementation in implementations:
            set_implementation(config, implementation)
        if tables is not None:
            exchange(view.model, tables)
        announce(view, longer)
