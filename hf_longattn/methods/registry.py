"""Methods by name. A method's file, and torch with it, is imported when the method is first asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from .method import SLOTS, Method

#: Where each method is: its file here, and its class there.
METHODS: dict[str, str] = {
    "adaptive_temperature": "adaptive_temperature.AdaptiveTemperature",
    "alibi": "alibi.Alibi",
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
    "yarn_temperature": "yarn_temperature.YarnTemperature",
}
#: Further names: a method, and the parameters that it then starts from.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ssmax": ("logn", {}),
    "softmax_plus": ("logn", {}),  # ln n / ln n_tr: Su Jianlin, as in "Information Entropy Invariance", Table 6
    "log_length": ("logn", {"scale": 1.0, "clamp": False}),  # ln n, as there: no identity at any length
}
_loaded: dict[str, type[Method]] = {}


def register(*methods: type[Method]) -> None:
    """Make methods available by name to `LongAttnConfig.preset` and `from_dict`.

    Raises:
        ValueError: a name is taken, or a slot unknown.
    """
    for method in methods:
        if method.slot not in SLOTS:
            raise ValueError(f"{method.__name__}.slot is {method.slot!r}; the slots are {', '.join(SLOTS)}")
        if method.name in method_names() and method_class(method.name) is not method:
            raise ValueError(f"two methods are called {method.name!r}")
        _loaded[method.name] = method


def method_names() -> tuple[str, ...]:
    """Every name of a method, presets included."""
    return tuple(dict.fromkeys((*METHODS, *PRESETS, *_loaded)))


def method_class(name: str) -> type[Method]:
    """The class behind a name; ValueError if there is none."""
    name = PRESETS[name][0] if name in PRESETS else name
    if name in _loaded:  # before any import, which Dynamo would not trace
        return _loaded[name]
    if name not in METHODS:
        known = sorted(method_names())
        raise ValueError(f"unknown method {name!r}; {did_you_mean(name, known)}known methods: {', '.join(known)}")
    file, _, cls = METHODS[name].partition(".")
    _loaded[name] = getattr(import_module(f".{file}", __package__), cls)
    return _loaded[name]


def preset_parameters(name: str) -> Mapping[str, Any]:
    """What a name sets beside its method."""
    return PRESETS[name][1] if name in PRESETS else {}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint to put before the list of what is known: the nearest, if one is near."""
    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""
