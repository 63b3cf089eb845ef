"""The base class of methods: a frozen dataclass of checked parameters, as plain data. No tensors, no models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from torch import nn

#: The slots of a config, in the order in which they act.
SLOTS = ("positions", "score", "temperature", "logit_map", "visibility", "sink", "output_norm")
#: The largest integer of a tensor.
LARGEST = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts that a method may need to know about the model it is put into.

    Args:
        train_length: the longest text of its training; None: its config names none.
        train_length_source: where that number is from, in words.
        assumed: what was taken for granted where its settings allow another reading, in words; else None.
        rotation_is_own: it was trained with its rotation, including any scaling.
        own_temperature: a factor on logits that the model has by itself (YaRN's, Llama 4's), in words; else None.
        rope_type: of its rotary encoding, as Transformers names it; None: no rotary frequencies were found.
        head_dim, value_dim: how wide a head's queries and keys are, and its values.
        qk_norm: it normalises queries and keys.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    train_length: int | None
    train_length_source: str = ""
    assumed: str | None = None
    rotation_is_own: bool = True
    own_temperature: str | None = None
    rope_type: str | None = None
    qk_norm: bool = False


@dataclass(frozen=True)
class Heads:
    """The query heads of a layer that this process computes, where heads are split across processes.

    Args:
        mean: the mean of a tensor over these processes, with its gradient.
    """

    first: int
    count: int
    of: int
    mean: Callable[[Any], Any]

    def own(self, values: Any) -> Any:
        """The part of a sequence or tensor that belongs to these heads; it may hold less than one entry for each head, or be
        one number for all.
        """
        if getattr(values, "ndim", 1) == 0:
            return values
        size = len(values)
        return values[self.first * size // self.of : -(-(self.first + self.count) * size // self.of)]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One published change to one stage of attention: its parameters, validated on construction.

    Subclasses set `slot`, `name`, `summary` (what it does, in a few words) and `paper` (authors, year, title, arXiv number),
    declare their parameters as fields, raise ValueError in `validate`, and implement the formula that their slot asks for (see
    `hf_longattn/methods/`).
    """

    slot: ClassVar[str]
    name: ClassVar[str]
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    #: Parameters that are one number, or one for each layer and head.
    by_head: ClassVar[tuple[str, ...]] = ()
    #: Parameters that are one number, or one for each layer, each a number or one for each key head.
    by_layer: ClassVar[tuple[str, ...]] = ()
    #: Whether its slot calls what `module` gives.
    learns: ClassVar[bool] = False
    #: Parameters that are a number of tokens, which may be given as "4k".
    lengths: ClassVar[tuple[str, ...]] = ("window", "train_length", "chunk", "local", "shift")

    def __post_init__(self) -> None:
        for f in fields(self):  # JSON gives lists; tuples keep the dataclass hashable
            given = getattr(self, f.name)
            object.__setattr__(self, f.name, as_length(given) if f.name in self.lengths else freeze(given))
            value, kinds = getattr(self, f.name), _kinds_of(type(self))[f.name]
            if value is None and f.default is not None and type(None) not in kinds:
                raise ValueError(f"{self.name}: {f.name} must not be None; leave it out for its default, {f.default!r}")
            if other := next((x for x in numbers(value) if not isinstance(x, (int, float, str, NoneType))), None):
                raise ValueError(f"{self.name}: {f.name} must be numbers, words or nests of them, got {type(other).__name__}")
            if any(type(x) is int and not -LARGEST <= x <= LARGEST for x in numbers(value)):
                raise ValueError(
                    f"{self.name}: {f.name} holds an integer that no tensor can, above {LARGEST} in size: write a smaller one"
                )
            if kinds and not (type(value) in kinds or (type(value) is int and float in kinds)):
                message = " or ".join(_KINDS[kind] for kind in kinds)
                raise ValueError(f"{self.name}: {f.name} must be {message}, got {value!r}")
        try:
            self.validate()
        except TypeError as error:  # of a comparison, somewhere in a nest
            raise ValueError(f"{self.name}: a parameter has the wrong type ({error}): {self.to_dict()}") from None

    def validate(self) -> None:
        """Raise ValueError for invalid parameters; it names the parameter and what to do."""

    def bind(self, facts: ModelFacts) -> Self:
        """Fill in every default that depends on the model, and check the method against it."""
        for name in self.by_head:
            _check_by_head(name, getattr(self, name), facts)
        for name in self.by_layer:
            _check_by_layer(name, getattr(self, name), facts)
        return self

    def filled(self, parameter: str) -> int:
        """A length that `bind` fills in; ValueError where it is not given and no model did."""
        value: int | None = getattr(self, parameter)
        if value is None:
            raise ValueError(f"{self.name} needs {parameter}: give it, or put the method into a model, which fills it in")
        return value

    def for_layer(self, layer: int) -> Self:
        """Reduce parameters given per layer to those of `layer`."""
        given = {name: getattr(self, name) for name in (*self.by_head, *self.by_layer)}
        nests = {k: v for k, v in given.items() if isinstance(v, tuple) and (k in self.by_layer or isinstance(v[0], tuple))}
        return dataclasses.replace(self, **{name: value[layer] for name, value in nests.items()}) if nests else self

    def for_heads(self, heads: Heads) -> Self:
        """Reduce parameters given per head, or per key head, to those of `heads`."""
        given = {name: getattr(self, name) for name in (*self.by_head, *self.by_layer)}
        rows = {name: heads.own(value) for name, value in given.items() if isinstance(value, tuple)}
        return dataclasses.replace(self, **rows) if rows else self

    @property
    def needs_training(self) -> bool:
        """True if these parameters harm a pretrained model until it is trained with them or they are calibrated."""
        return False

    @property
    def uses_train_length(self) -> bool:
        """True if it depends on the length that the model was trained at."""
        return hasattr(self, "train_length")

    @property
    def identity_below(self) -> float:
        """Length in tokens below which the method changes nothing: every position lies below it.

        0: it changes every text, or this is not known.
        """
        return 0

    @property
    def head_dependent(self) -> bool:
        """True if heads differ or are combined, so that a head computed on its own must know its index."""
        return any(isinstance(getattr(self, name), tuple) for name in (*self.by_head, *self.by_layer))

    def module(self, facts: ModelFacts) -> nn.Module | None:
        """The method's learned parameters, or None: of a temperature a module from factor to factor, of a logit map from its
        tables to others, of a sink from logits to logits, of an output norm whatever its `normalise` takes.
        """
        return None

    def trial(self, facts: ModelFacts) -> Iterable[tuple[str, Any, Any]]:
        """Call the functions that its slot asks for on tiny tensors.

        Yields:
            the name of a function, its result, and a tensor of the shape and the dtype that this should have.
        """
        return ()

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} | {f.name: thaw(getattr(self, f.name)) for f in fields(self)}


def require_positive(**values: float | None) -> None:
    """Raise ValueError for any given value that is not a finite number above zero (None is allowed)."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def require_in(name: str, value: float, low: float, high: float) -> None:
    if not (_is_number(value) and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value!r}")


def require_at_least(least: float, **values: float | None) -> None:
    """Raise ValueError for any given value below `least`, and for NaN (None is allowed)."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be >= {least:g}, got {value!r}")


def _check_by_head(name: str, value: Any, facts: ModelFacts) -> None:
    """Raise ValueError unless a parameter is a number or a (layers, heads) nest of numbers."""
    if not isinstance(value, tuple):
        return
    widths = {len(row) if isinstance(row, tuple) else 0 for row in value}
    if (len(value), widths) != (facts.num_layers, {facts.num_heads}):
        got = f"rows of length {sorted(widths)}" if 0 not in widths else "entries, some of which are single numbers"
        raise ValueError(
            f"{name} must be one number or one per layer and head, shape ({facts.num_layers}, {facts.num_heads}); got "
            f"{len(value)} {got}"
        )


def _check_by_layer(name: str, value: Any, facts: ModelFacts) -> None:
    """Raise ValueError unless a parameter is a number, or one for each layer, each a number or one for each key head."""
    if not isinstance(value, tuple):
        return
    widths = {len(row) for row in value if isinstance(row, tuple)}
    if len(value) != facts.num_layers or widths - {facts.num_kv_heads}:
        raise ValueError(
            f"{name} must be one number, or one for each of {facts.num_layers} layers, each a number or one for each of "
            f"{facts.num_kv_heads} key heads; got {len(value)}" + (f", some with {sorted(widths)}" if widths else "")
        )


def numbers(value: Any) -> Iterable[float]:
    """All numbers in a number or a nest of tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from numbers(item)
    else:
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a word", NoneType: "None"}
_kinds: dict[type, dict[str, tuple[type, ...]]] = {}


def _kinds_of(method: type[Method]) -> dict[str, tuple[type, ...]]:
    """The types that each parameter may be of; of what is no plain type (nests), which is left to `validate`, none."""
    if method not in _kinds:  # a dict, which Dynamo reads, where it would trace into functools.cache
        hints = get_type_hints(method)
        union = {name: get_args(h) if get_origin(h) in (Union, UnionType) else (h,) for name, h in hints.items()}
        _kinds[method] = {f.name: kinds if _KINDS.keys() >= set(kinds := union[f.name]) else () for f in fields(method)}
    return _kinds[method]


def length_of(value: int | str) -> int:
    """A number of tokens; "32k" is 32 * 1024, "1M" 1024 * 1024.

    Raises:
        ValueError: it is neither.
    """
    text = str(freeze(value)).strip().lower()
    unit = {"k": 1024, "m": 1024 * 1024}.get(text[-1:], 1)
    number = text if unit == 1 else text[:-1]
    digits = number.isascii() and number.isdecimal() and len(number) <= len(str(LARGEST))
    if isinstance(value, bool) or not digits or not 1 <= int(number) * unit <= LARGEST:
        raise ValueError(f"{repr(value)[:40]} is not a length; write 32768, 32k or 1M")
    return int(number) * unit


def as_length(value: Any) -> Any:
    """A length given as "32k" as a number of tokens; anything else as it is, for checks that name the parameter."""
    if not isinstance(value, str):
        return freeze(value)
    try:
        return length_of(value)
    except ValueError:
        return value


def freeze(value: Any) -> Any:
    """A parameter as plain data that can be hashed, from JSON, NumPy or torch."""
    if hasattr(value, "tolist"):  # numbers and arrays of numpy and torch
        value = value.tolist()
    if value == "inf":  # JSON has no infinity
        return math.inf
    return tuple(freeze(v) for v in value) if isinstance(value, (list, tuple)) else value


def thaw(value: Any) -> Any:
    """A parameter as JSON can hold it."""
    if value == math.inf:
        return "inf"
    return [thaw(v) for v in value] if isinstance(value, tuple) else value
