"""Methods by name. A method's file, and torch with it, is imported when the method is first asked for.

A method of this package registers by its line in METHODS; one from elsewhere by `register`, or by its package's entry point.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .method import SLOTS, Method, ModelFacts

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The group of entry points by which other packages bring methods: each a method's name and its class.
GROUP = "hf_longattn.methods"
#: Names of transformers' own attention functions.
STOCK = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
#: What a setting without a method is called.
UNMODIFIED = "unmodified"
#: Names that mean something where a method's name may stand.
RESERVED = (*STOCK, "longattn", UNMODIFIED)
#: Words of a config beside its slots, which a parameter would not be reached under.
OF_CONFIGS = ("layers", "backend", "extended_to", "version", "parts", "train_length_source")
#: Position encodings, which are no methods, as `hf_longattn.rope` has them; and the fewest and most numbers they take.
ROPES = {"yarn": (1, 1), "ntk": (1, 1), "linear": (1, 1), "prope": (1, 2), "nope": (0, 0), "cope": (0, 1)}
#: The model that a method is tried on as it is registered.
TRIAL = ModelFacts(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    value_dim=8,
    train_length=16,
    train_length_source="a trial",
    rope_type="default",
)

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
    "string_remap": "string_remap.StringRemap",
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
_elsewhere: dict[str, EntryPoint] | None = None
#: Called with the name of every method that comes later, before it is there; ValueError: the name is taken.
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

    A class of the same module and name takes the place of the one before, so that a cell of a notebook may run twice; a model
    that runs the one before keeps it until the method is applied again.

    An installed package brings one by an entry point of the group "hf_longattn.methods", and is imported when the name is
    first used. A command takes a module that registers one by `--import MODULE`.

    Args:
        method: a frozen dataclass, a subclass of one of the slots' classes in `hf_longattn.slots.base`, that can be made
            without arguments.

    Returns:
        The same class.

    Raises:
        ValueError: it is not a method or no dataclass, its name is taken (by a method, or by an attention of transformers) or
            not a word, its slot is unknown, or a function that its slot asks for raises on tiny tensors, or gives other shapes
            or dtypes than the slot says, NaN or infinity, or intervals that overlap, leave gaps or show other distances than
            `distance`. The class is named.
    """
    _check_trial(method, _check_class(method))
    if method.name not in list_methods():
        for hear in LISTENERS:
            hear(method.name)
    _loaded[method.name] = method
    return method


def _check_class(method: Any) -> str:
    """Return how messages call a method; ValueError for what is no method, has no name or slot of its own, or no dataclass."""
    bases: tuple[type[Method], ...] = import_module(".base", __package__).BASES
    base = next((x for x in bases if isinstance(method, type) and issubclass(method, x)), None)
    if base is None:
        raise ValueError(
            f"{method!r} is no method: a frozen dataclass on one of the classes of hf_longattn.slots.base, "
            f"{', '.join(x.__name__ for x in bases)}. What fits none of them has no slot"
        )
    what = f"{method.__module__}.{method.__qualname__}"
    if getattr(method, "name", None) is None:
        raise ValueError(f'{what} has no name: give the class one, name: ClassVar[str] = "my_method"')
    if not isinstance(name := method.name, str) or not name.isidentifier():
        raise ValueError(f"{what}.name is {name!r}: letters, digits and underscores make a method's name")
    if name in RESERVED:
        whose = "transformers' own attention" if name in STOCK else "something else where a method's name may stand"
        raise ValueError(f"{what} is called {name!r}, which names {whose}: choose another name")
    if method.slot != base.slot:
        raise ValueError(f"{what}.slot is {method.slot!r}, and a {base.__name__} fills {base.slot!r}: leave slot out")
    if name in list_methods() and (name not in elsewhere() or name in _loaded):
        there = method_class(name)
        if name in PRESETS or (there.__module__, there.__qualname__) != (method.__module__, method.__qualname__):
            raise ValueError(
                f"two methods are called {name!r}: {what}, and {there.__module__}.{there.__qualname__}, which was there "
                "before: choose another name"
            )
    if missing := getattr(method, "__abstractmethods__", None):
        raise ValueError(f"{what} lacks {', '.join(sorted(missing))}, which its slot asks for")
    written = {k for k, kind in inspect.get_annotations(method).items() if "ClassVar" not in str(kind)}
    if lost := sorted(written - {f.name for f in fields(method)}):
        raise ValueError(
            f"{what} is no dataclass, so {', '.join(lost)} would be no parameter: decorate it with "
            "@dataclass(frozen=True, kw_only=True), below @hf_longattn.register"
        )
    parameters = {f.name for f in fields(method)}
    annotations = [(k, kind) for x in base.__mro__ for k, kind in inspect.get_annotations(x).items()]
    if constant := sorted(parameters & {k for k, kind in annotations if "ClassVar" in str(kind)}):
        raise ValueError(f"{what}: {', '.join(constant)} would be a parameter: annotate it as ClassVar[...]")
    if taken := sorted(parameters & {*SLOTS, *OF_CONFIGS}):
        raise ValueError(f"{what} has a parameter {', '.join(taken)}, which is a word of every config: call it otherwise")
    for list_of in ("by_head", "by_layer"):
        if not isinstance(names := getattr(method, list_of), tuple) or not parameters.issuperset(names):
            known = ", ".join(sorted(parameters)) or "none"
            raise ValueError(f"{what}.{list_of} is {names!r}, and names parameters in a tuple; it has: {known}")
    return what


def _check_trial(method: type[Method], what: str) -> None:
    """Raise ValueError for a method that cannot be made, or whose functions fail on tiny tensors."""
    try:
        made = method()
        hash(made)
        json.dumps(made.to_dict())
    except (TypeError, ValueError, NameError) as error:
        raise ValueError(
            f"{what}() cannot be made: {error}. Parameters have defaults, and are plain data: numbers, words, nests of them"
        ) from error
    for facts in (TRIAL, replace(TRIAL, train_length=1 << 17)):
        try:
            made = made.bind(facts)
            break
        except (ValueError, NotImplementedError):
            continue
    else:
        return  # its defaults do not fit every model
    _check_module(made, what)
    import_module(".base", __package__).try_out(made, facts, what)


def _check_module(made: Method, what: str) -> None:
    """Raise ValueError for a method whose learned parameters cannot be made, learned, saved or loaded."""
    try:
        part = made.module(TRIAL)
    except Exception as error:
        raise ValueError(f"{what}.module() cannot be made for a tiny model: {str(error) or type(error).__name__}") from error
    if part is not None:
        import_module(".learned", __package__).check_part(part, made, f"{what}.module()")


@functools.lru_cache(maxsize=256)
def check_bound(method: Method, facts: ModelFacts) -> None:
    """Raise ValueError for a method of one's own that is not registered, or whose functions fail under its parameters.

    Args:
        method: bound to the facts.
    """
    if method.name in METHODS and method_class(method.name) is type(method):
        return
    kind, there = type(method), _loaded.get(method.name)
    if there is None or (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is not the method registered as {method.name!r}, so that nothing saved "
            "with it could be loaded: hf_longattn.register it first"
        )
    for own in dict.fromkeys(method.for_layer(n) for n in range(facts.num_layers)):
        import_module(".base", __package__).try_out(own, facts, f"{method.name} with these parameters")


def elsewhere() -> dict[str, EntryPoint]:
    """Methods of other packages, by name; one whose name is taken is left out, with a warning."""
    global _elsewhere
    if _elsewhere is None:  # once: Dynamo would not trace it
        from importlib.metadata import entry_points

        _elsewhere = {}
        for entry in entry_points(group=GROUP):
            if entry.name in (*METHODS, *PRESETS, *_elsewhere):
                warnings.warn(f"{entry.value} is left out: there is a method called {entry.name!r} already")
            else:
                _elsewhere[entry.name] = entry
    return _elsewhere


def modules_of(methods: Iterable[Method]) -> tuple[str, ...]:
    """The modules that register these methods and must be imported by hand: neither the package's nor of an entry point."""
    own = {type(m).__module__ for m in methods if m.name not in METHODS and m.name not in elsewhere()}
    return tuple(sorted(own))


def list_methods(slot: str | None = None) -> list[str]:
    """The names of all methods, your own among them, in alphabetical order.

        >>> hf_longattn.list_methods("score")
        ['cosscale']

    Args:
        slot: of one slot alone: "positions", "score", "temperature", "logit_map", "visibility", "sink" or "output_norm".

    Raises:
        ValueError: there is no such slot.
    """
    if slot is not None and slot not in SLOTS:
        raise ValueError(f"there is no slot {slot!r}; {did_you_mean(slot, SLOTS)}the slots are {', '.join(SLOTS)}")
    names = sorted({*METHODS, *PRESETS, *_loaded, *elsewhere()})
    return names if slot is None else [name for name in names if method_class(name).slot == slot]


def method_class(name: str) -> type[Method]:
    """The class behind a name; ValueError if there is none."""
    name = PRESETS[name].method if name in PRESETS else name
    if name in _loaded:  # before any import, which Dynamo would not trace
        return _loaded[name]
    if (entry := elsewhere().get(name)) is not None:
        try:
            found = register(entry.load())
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"the method {name!r}, {entry.value} of an installed package, cannot be used: {error}") from error
        if found.name != name:
            raise ValueError(f"{entry.value}.name is {found.name!r}, and its package calls it {name!r}")
        return found
    if name not in METHODS:
        hint = f"; {said}" if (said := meant(name)) else f". {IF_YOURS}; "
        raise ValueError(f"unknown method {name!r}{hint}known methods: {', '.join(list_methods())}")
    file, _, cls = METHODS[name].partition(".")
    _loaded[name] = getattr(import_module(f"..methods.{file}", __package__), cls)
    return _loaded[name]


def summary_of(name: str) -> str:
    """Say in a few words what the method of a name does; of one without any, nothing."""
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


def meant(name: str) -> str:
    """Guess what was meant by the name of no method."""
    if name == UNMODIFIED:
        return (
            "it is a setting, the model without a method: hf_longattn.remove(model) takes a method out, and a recipe has "
            "method=null; "
        )
    if name in STOCK:
        return (
            f"it is transformers' own attention: hf_longattn.remove(model) takes a method out, and "
            f"model.set_attn_implementation({name!r}) asks for this one; "
        )
    if name.lower() in ROPES:
        beyond = ", and the method yarn_beyond is YaRN beyond the trained length alone" if name.lower() == "yarn" else ""
        return (
            f"{name.lower()} is a position encoding: hf_longattn.rope.{name.lower()}(config, ...) before the model is loaded, "
            f"@{name.lower()} in a setting or in a recipe's method{beyond}; "
        )
    return did_you_mean(name, list_methods())


#: The way out for a name that is no method here.
IF_YOURS = "If it is one of your own, import the module that registers it first (in a command: --import MODULE)"


def from_elsewhere(name: str) -> str:
    """Explain the name of no method in a saved file: it was a method where the file was made."""
    known = ", ".join(list_methods())
    return f"{name!r} is no method here. {IF_YOURS}; {did_you_mean(name, list_methods())}known methods: {known}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint that names the closest known name, if one is close; large letters and hyphens do not count."""
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""
