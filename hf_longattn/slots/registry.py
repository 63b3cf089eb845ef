"""Methods by name. A method's file, and torch with it, is imported when the method is first asked for.

A method of this package registers by its line in METHODS; one from elsewhere by `register`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from .method import SLOTS, Method

#: Where each method is: its file here, and its class there.
METHODS: dict[str, str] = {
    "adaptive_temperature": "adaptive_temperature.AdaptiveTemperature",
    "alibi": "alibi.Alibi",
    "attention_sink": "attention_sink.AttentionSink",
    "cosscale": "cosscale.CosScale",
    "dual_chunk": "dual_chunk.DualChunk",
    "infoscale": "infoscale.InfoScale",
    "leaky_rerope": "rerope.LeakyReRope",
    "lm_infinite": "windows.LmInfinite",
    "logn": "logn.LogN",
    "output_layer_norm": "output_norm.OutputLayerNorm",
    "output_standardise": "output_norm.OutputStandardise",
    "rerope": "rerope.ReRope",
    "scale_invariant": "scale_invariant.ScaleInvariant",
    "self_extend": "self_extend.SelfExtend",
    "streaming": "windows.Streaming",
    "string": "string.String",
    "windowed": "windows.Windowed",
    "yarn_beyond": "yarn_beyond.YarnBeyond",
    "yarn_temperature": "yarn_temperature.YarnTemperature",
}


class Preset(NamedTuple):
    """A further name for a method: parameters that the name fixes, others that it starts from, and what differs in words."""

    method: str
    fixed: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}
    summary: str = ""


_PLAIN = {"learned": False, "exponent": 1.0}
PRESETS = {
    "ssmax": Preset("logn"),
    # ln n / ln n_tr: Su Jianlin, as in "Information Entropy Invariance", Table 6; there too ln n, no identity at any length
    "softmax_plus": Preset("logn", _PLAIN | {"scale": None}, summary="ln n / ln n_tr"),
    "log_length": Preset("logn", _PLAIN | {"scale": 1.0}, {"clamp": False}, "ln n"),
}
_loaded: dict[str, type[Method]] = {}
#: Called with the name of every method that comes later.
LISTENERS: list[Callable[[str], object]] = []
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Make a method of your own available by name.

    Its `name` then works wherever a method's does: `apply`, `attn_implementation=`, combinations ("mine+cosscale"), the
    commands, and checkpoints, which save the name and its parameters; load these after registering it. As a decorator:

        @hf_longattn.register
        @dataclass(frozen=True, kw_only=True)
        class Mine(LengthTemperature):
            ...

    Args:
        method: a frozen dataclass, a subclass of one of the slots' classes in `hf_longattn.slots.base`, that can be made
            without arguments.

    Returns:
        The same class.

    Raises:
        ValueError: it is not a method, its name is taken or not a word, or its slot is unknown.
    """
    if not (isinstance(method, type) and issubclass(method, Method)) or not is_dataclass(method):
        raise ValueError(f"{method!r} is no method: a frozen dataclass on one of the classes of hf_longattn.slots.base")
    if method.slot not in SLOTS:
        raise ValueError(f"{method.__name__}.slot is {method.slot!r}; the slots are {', '.join(SLOTS)}")
    if not method.name.isidentifier():
        raise ValueError(f"{method.__name__}.name is {method.name!r}: letters, digits and underscores make a method's name")
    if method.name in method_names() and method_class(method.name) is not method:
        raise ValueError(f"two methods are called {method.name!r}")
    if missing := getattr(method, "__abstractmethods__", None):
        raise ValueError(f"{method.__name__} lacks {', '.join(sorted(missing))}, which its slot asks for")
    new = method.name not in method_names()
    _loaded[method.name] = method
    for hear in LISTENERS if new else ():
        hear(method.name)
    return method


def method_names() -> tuple[str, ...]:
    """Every name of a method, presets included."""
    return tuple(dict.fromkeys((*METHODS, *PRESETS, *_loaded)))


def method_class(name: str) -> type[Method]:
    """The class behind a name; ValueError if there is none."""
    name = PRESETS[name].method if name in PRESETS else name
    if name in _loaded:  # before any import, which Dynamo would not trace
        return _loaded[name]
    if name not in METHODS:
        known = sorted(method_names())
        raise ValueError(f"unknown method {name!r}; {did_you_mean(name, known)}known methods: {', '.join(known)}")
    file, _, cls = METHODS[name].partition(".")
    _loaded[name] = getattr(import_module(f"..methods.{file}", __package__), cls)
    return _loaded[name]


def summary_of(name: str) -> str:
    """What the method of a name does, in a few words; of one without any, nothing."""
    return (PRESETS[name].summary if name in PRESETS else "") or method_class(name).summary


def fixed_by(name: str) -> Mapping[str, Any]:
    """The parameters that a name fixes."""
    return PRESETS[name].fixed if name in PRESETS else {}


def parameters_of(name: str) -> set[str]:
    """The parameters that may be given under a name."""
    return {f.name for f in fields(method_class(name))} - fixed_by(name).keys()


def method(name: str, **parameters: Any) -> Method:
    """The method of that name; ValueError for a parameter that it does not have."""
    if unknown := sorted(parameters.keys() - (known := parameters_of(name))):
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"{name} has no parameter {', '.join(unknown)}; {hint}it has: {', '.join(sorted(known))}")
    preset = PRESETS.get(name, Preset(name))
    return method_class(name)(**{**preset.defaults, **preset.fixed, **parameters})


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint that names the closest known name, if one is close."""
    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""
