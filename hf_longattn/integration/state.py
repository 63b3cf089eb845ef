"""The attention state of a model: all that is kept about it, and how it is put back.

Each of these has its part of it as `_longattn`:

    the innermost model around the attention    its `AttentionState`
    each attention module                       its `LayerMethod`, which leads there, unless it came from another model;
                                                in vLLM its `ServedLayer`
    a config                                    its `ConfigRecord`
    the mask of a pass                          its `MaskContext`, which leads to the pass
    a KV cache                                  its `CacheRecord`

Beside these, where other packages look for it: `module.longattn`, an attention module's learned parts, by which state_dicts
name them; `config.longattn_lengths`, which is saved (see `max_length`); `model.longattn_adapters`, the configs of adapters
that PEFT notes nowhere on the model; of a manager of continuous batching `longattn`, the method that it was started under.
Copies and pickles of a model take all this along; models that share their attention modules share it. What a model made of the
keys in a cache (`AttentionState.rotated_keys`) goes with the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from ..config import LongAttnConfig
from ..core.call import Call
from ..core.tables import TableCache
from .config_records import raw_section, set_record
from .device_checks import Claims
from .gate import share_gate
from .internals import children_of, get_implementation, is_replica, modules_of
from .layers import View
from .names import is_longattn_name, register_combination
from .rope import RotaryTables
from .rotated_key_cache import LayerKeys
from .rotation import RotarySource

#: What a model's tables may take: those of 32 layers with 32 heads each, for 128k tokens.
TABLE_BYTES = 2 << 30


class Disabled(NamedTuple):
    """The settings that `changes.disable` took from a model, and `enable` gives back.

    Args:
        implementations: the attention of each config.
        tables: of its rotation; None: that stays.
        extended_to: the length that its configs announced; None: their own.
    """

    implementations: list[tuple[Any, str | None]]
    tables: RotaryTables | None
    extended_to: int | None


@dataclass(eq=False)
class AttentionState:
    """The state of a model as a whole; the methods of its layers lead here."""

    tables: TableCache = field(default_factory=lambda: TableCache(TABLE_BYTES))
    strength: Tensor | None = None  # of the logit map once it is other than 1: compiled graphs read it when they run
    whole_config: LongAttnConfig | None = None  # what the model runs
    arrangement: Arrangement | None = None  # of its layers when its method came; copies have none, until their first pass
    layers: tuple[int, ...] = ()  # the numbers of `View.candidates`, as they were when the method came
    unverified: bool = False  # whether a rotation is yet to be verified, at the first call
    passes: tuple[RemovableHandle, ...] = ()  # hooks around a forward pass: see `passes.hook_passes`
    traced: Any = None  # the `ForwardContext` that a graph is traced through
    group: Any = None  # of the processes that share each of its sequences: see `engines.ulysses`; copies have none
    remapped: bool = False  # whether a remap of rotary distances acts in some layer
    alone: bool = False  # see `orphaned`
    guards: tuple[RemovableHandle, ...] = ()  # hooks that refuse calls: see `guards`
    disabled: Disabled | None = None  # what `enable` puts back
    observed: bool = False  # whether a capture is open (see `observer`); not of copies
    checked: Any = None  # modules, and the forward functions that they had when `verify.check_reached` saw nothing wrong
    claims: Claims = field(default_factory=Claims)
    method_ids: dict[Hashable, object] = field(default_factory=dict)  # those of all layers: see `LayerMethod.method_id`
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
        methods = [
            (x.module, method) for x in view.layers if (method := method_of(x.module)) is not None and method.state is self
        ]
        described = list({id(m.config): (m.config, method.whole_config) for m, method in methods}.values())
        arrangement = _arrangement(view, described)
        if not is_replica(view.model):
            self.arrangement, self.checked = arrangement, None
        return arrangement

    @property
    def orphaned(self) -> bool:
        """True: it belongs to layers alone, which were copied out of their model, or outlived it."""
        return self.alone or any(handle.hooks_dict_ref() is None for handle in self.passes)

    def __getstate__(self) -> dict[str, Any]:
        own = vars(self) | {"arrangement": None, "group": None, "rotated_keys": None, "checked": None, "observed": False}
        return own | ({"alone": True, "passes": (), "guards": ()} if self.orphaned else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, rotated_keys=WeakKeyDictionary())
        if self.whole_config is not None:  # this process may not have met its name
            register_combination(self.whole_config.name)


@dataclass(frozen=True, eq=False)
class LayerMethod:
    """The method of one attention module, made when a method was put into the model."""

    state: AttentionState
    whole_config: Any  # the model's `LongAttnConfig` that it was made from: the very object that the model's config holds
    config: LongAttnConfig | None  # this layer's, or None if it is left alone
    reason: str = ""  # why it is left alone, or not remapped
    windowed: bool = False
    heads: int = 0
    rotary: RotarySource | None = None  # how the layer rotates, where its config remaps that
    observer: Callable[[Call, Tensor], None] | None = None  # sees every call of this layer and its output: see `observer`
    index: int = -1  # the number of the layer that it was made for; -1: one that no method goes into

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the observer: no capture looks at a copy."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"observer": None}

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
        """The object that stands for config and rotation in `Call.method_id`: layers with equal methods share it."""
        return self.state.method_ids.setdefault((self.config, self.rotary, self.heads, self.windowed), object())


class Arrangement(NamedTuple):
    """A model's configs and the places of its layers when its method came; each pass compares them with what they are then.

    Args:
        described: the config of each attention module, and the `LongAttnConfig` that its record held.
        children: the live child tables (`children_of`) of the modules from the innermost model to its attention, and of the
            parents of rotary modules which a remap turns by. None where layers or rotary modules were already others than
            those that the method was put into.
        held: what these tables held.
        attention: the `vars` of each attention module, which change with it.
        numbers: the `layer_idx` that each had.
        forwards: each attention module, and the forward function of its class.
    """

    described: list[tuple[Any, Any]]
    children: list[Any] | None = None
    held: list[tuple[Any, ...]] | None = None
    attention: Sequence[dict[str, Any]] = ()
    numbers: Sequence[int | None] = ()
    forwards: Sequence[tuple[nn.Module, Callable[..., Any]]] = ()

    @property
    def is_described(self) -> bool:
        """True: all configs still hold what they did; those that run no method need not."""
        for config, held in self.described:
            if raw_section(config) is not held and is_longattn_name(get_implementation(config)):
                return False
        return True

    @property
    def is_current(self) -> bool:
        """True: the model's layers are the same, at their places and with their numbers."""
        if self.children is None or [x.get("layer_idx") for x in self.attention] != self.numbers:
            return False
        return [tuple(x.values()) for x in self.children] == self.held

    @property
    def runs_other_forwards(self) -> bool:
        """True: an attention module, or its class, has got another forward function since."""
        return any(type(x).forward is not forward or "forward" in x.__dict__ for x, forward in self.forwards)


def method_of(module: nn.Module) -> LayerMethod | None:
    """The method of an attention module, if it has one."""
    method = module.__dict__.get("_longattn")
    return method if isinstance(method, LayerMethod) else None


def set_method(module: nn.Module, method: LayerMethod | None) -> None:
    module.__dict__.pop("_longattn", None)
    if method is not None:
        module.__dict__["_longattn"] = method


def state_of(model: nn.Module) -> AttentionState | None:
    """The state of a model, or of one that it is a part of; None before any method came."""
    own = (vars(m).get("_longattn") for m in modules_of(model))
    found = next((state for state in own if isinstance(state, AttentionState)), None)
    return found or next((method.state for m in modules_of(model) if (method := method_of(m)) is not None), None)


def is_settled(view: View) -> bool:
    """Tell whether a model's layers are those that its method was put into, by their numbers, and all configs say so.

    Not so where some were copied, moved or dropped since, came from another model, or were put under another head; or where
    another rotary module is in the place of one that a remap turns by.
    """
    methods = [method_of(x.module) for x in view.candidates]
    numbers = tuple(None if method is None or method.state is not view.state else method.index for method in methods)
    if view.state is None or not methods or numbers != view.state.layers or numbers != tuple(x.index for x in view.candidates):
        return False
    turning = _turning(view)
    if not turning.issubset(view.modules) and not is_replica(view.model):  # which turns by copies
        return False
    return all(methods[0] is not None and raw_section(c) is methods[0].whole_config for c in view.method_configs)


def _turning(view: View) -> set[nn.Module]:
    """The rotary modules that remaps of a model's layers turn by."""
    methods = (method_of(x.module) for x in view.candidates)
    return {method.rotary.module for method in methods if method is not None and method.rotary is not None}


def _arrangement(view: View, described: list[tuple[Any, Any]]) -> Arrangement:
    """The `Arrangement` of a model as it is now."""
    if not is_settled(view):
        return Arrangement(described)
    attention = [x.module for x in view.candidates]
    inside = {x for module in attention for x in modules_of(module)}
    turning = _turning(view)
    around = [
        m
        for m in modules_of(view.inner)
        if (m not in inside and not inside.isdisjoint(modules_of(m))) or not turning.isdisjoint(children_of(m).values())
    ]
    children, own = [children_of(m) for m in around], [vars(x) for x in attention]
    return Arrangement(
        described,
        children=children,
        held=[tuple(x.values()) for x in children],
        attention=own,
        numbers=[x.get("layer_idx") for x in own],
        forwards=[(x, type(x).forward) for x in attention],
    )
