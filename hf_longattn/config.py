"""The description of modified softmax attention, as plain data: no tensors, no models.

A `LongAttnConfig` has seven independent slots, applied in this order to every attention call:

    positions -> score -> temperature -> logit_map -> visibility -> softmax with sink -> output_norm

Each slot holds one `Method` (a frozen dataclass in `hf_longattn.methods`) or None, which leaves that
stage as the model has it.

A config is written in one of two ways: as the dict of its slots (`to_dict`: JSON, YAML), or as a text, `split_text`:

    METHOD[+METHOD...][:key=value[:key=value...]][@ROPE[:number...]]
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from .slots.method import SLOTS, Heads, Method, ModelFacts, as_length, freeze, thaw
from .slots.method import length_of as length_of
from .slots.registry import (
    check_bound,
    did_you_mean,
    fixed_by,
    from_elsewhere,
    list_methods,
    method,
    method_class,
    parameters_of,
)

if TYPE_CHECKING:
    from .slots.base import KeyIntervals, LogitMap, OutputNorm, Positions, Score, Sink, Temperature, Visibility

#: All but the first and the last are files in core/kernels, in the order in which "auto" asks them.
BACKENDS = ("auto", "fused", "triton", "tiled", "reference")
FORMAT_VERSION = 1

#: The name that stands for "whatever the config says", for combinations that have no name of their own.
CUSTOM = "longattn"
#: Before the name in a checkpoint, which so says which package it needs.
PREFIX = "hf_longattn."
#: Before the class names in a strict checkpoint's config, which every other engine dispatches on and then refuses.
TRIPWIRE = "LongAttn"
#: Parameters that are given beside any method.
OF_EVERY = ("layers", "backend", "train_length")
NO_PARTS = "each part is a config with a method and without parts; layers in no part stay as they are"


@dataclass(frozen=True, kw_only=True)
class LongAttnConfig:
    """A complete description of modified attention. Frozen and hashable; `to_dict` is JSON.

    Args:
        positions, score, temperature, logit_map, visibility, sink, output_norm: a `Method` for that slot, its
            dict form (`{"name": ..., parameters}`), or None.
        layers: "full_attention" (every causal layer that sees all earlier keys), "all" (sliding-window
            layers too), or a sequence of layer indices.
        backend: "auto", or one of `BACKENDS` to insist on it.
        train_length: the length that the model was trained at, in tokens, for all methods; by default read from its config.
            In a config that a model runs it is that number, and `train_length_source` says where it is from.
        extended_to: the length in tokens that a model's configs announce while it runs this (`extend`); None: their own.
        parts: in place of methods here, configs for different layers, or what `parse` takes. Each names its `layers`, and one
            that does not takes all others. The whole takes layers, backend and train_length from them.

    Raises:
        ValueError: a parameter is invalid, a method sits in a slot that is not its own, or parts do not go together.
    """

    positions: Positions | None = None
    score: Score | None = None
    temperature: Temperature | None = None
    logit_map: LogitMap | None = None
    visibility: Visibility | None = None
    sink: Sink | None = None
    output_norm: OutputNorm | None = None
    layers: str | tuple[int, ...] = "full_attention"
    backend: str = "auto"
    train_length: int | None = None
    train_length_source: str = field(default="", repr=False, compare=False)
    extended_to: int | None = field(default=None, repr=False, compare=False)  # nothing that is computed depends on it
    version: int = field(default=FORMAT_VERSION, repr=False)
    parts: tuple[LongAttnConfig, ...] = ()
    _methods: ClassVar[tuple[Method, ...]] = ()

    def __post_init__(self) -> None:
        if self.version != FORMAT_VERSION:
            raise ValueError(
                f"this longattn section has format version {self.version!r}; this hf_longattn reads version "
                f"{FORMAT_VERSION}: install the release that wrote it"
            )
        parts = (self.parts,) if isinstance(self.parts, (str, Mapping, LongAttnConfig)) else tuple(self.parts or ())
        if not all(isinstance(part, (str, Mapping, LongAttnConfig)) for part in parts):
            raise ValueError(NO_PARTS)
        object.__setattr__(self, "parts", tuple(map(LongAttnConfig.parse, parts)))
        for slot in SLOTS:
            object.__setattr__(self, slot, _method_in(slot, getattr(self, slot)))
        object.__setattr__(self, "layers", _layers(self.layers))
        if self.parts:
            self._take_from_parts()
        filled = dict.fromkeys(m for x in self.each for slot in SLOTS if (m := getattr(x, slot)) is not None)
        object.__setattr__(self, "_methods", tuple(filled))  # asked for at every layer of every pass
        for name in ("train_length", "extended_to"):
            length = as_length(getattr(self, name))
            object.__setattr__(self, name, length)
            if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
                raise ValueError(f"{name} must be an integer >= 1, got {length!r}")
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}; choose one of {', '.join(BACKENDS)}")
        if not self.parts:
            self._check_together()

    def _take_from_parts(self) -> None:
        """Set what a whole has of its parts. ValueError: they do not go together, or the whole says what they do not."""
        if filled := [slot for slot in SLOTS if getattr(self, slot) is not None]:
            raise ValueError(f"{filled[0]} is filled beside parts: a method of several layers goes into each of their parts")
        if any(x.parts or not x.methods for x in self.parts):
            raise ValueError(NO_PARTS)
        named = [i for x in self.parts if not isinstance(x.layers, str) for i in x.layers]
        if twice := sorted({i for i in named if named.count(i) > 1}):
            raise ValueError(f"layers {twice} are in more than one part: write into one what they run")
        if len(others := [x.name for x in self.parts if isinstance(x.layers, str)]) > 1:
            raise ValueError(
                f"{' and '.join(others)} would each take all layers that no part names: give one of them layers=, or write "
                f"{'+'.join(others)!r} for all of them in every layer"
            )
        backends = {x.backend for x in self.parts}
        lengths = [(x.train_length, x.train_length_source) for x in self.parts if x.train_length]
        if len({length for length, _ in lengths}) > 1:
            given = " and ".join(f"{x.train_length} for {x.name}" for x in self.parts if x.train_length)
            raise ValueError(
                f"train_length is one for the model, and the parts differ in it, {given}: give it to one part alone"
            )
        if reads := {x.extended_to for x in (*self.parts, self)} - {None}:
            if len(set(map(as_length, reads))) > 1:
                raise ValueError("extended_to is one for the model, and the parts differ in it")
            object.__setattr__(self, "extended_to", reads.pop())
            object.__setattr__(self, "parts", tuple(dataclasses.replace(x, extended_to=None) for x in self.parts))
        length, source = lengths[0] if lengths else (None, "")
        of_them = {
            "layers": ("full_attention", "all" if others else tuple(sorted(named))),
            "backend": ("auto", backends.pop() if len(backends) == 1 else "auto"),
            "train_length": (None, length),
        }
        for name, (default, value) in of_them.items():
            if (said := getattr(self, name)) not in (default, value):
                raise ValueError(f"{name}={said!r} is said of a whole whose parts say {value!r}: leave it to them")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "train_length_source", source)

    def _check_together(self) -> None:
        """Raise ValueError for methods of one layer that exclude each other."""
        if len(remaps := [m.name for m in self.key_intervals if m.remaps]) > 1:
            raise ValueError(f"{' and '.join(remaps)} clash: both say at which distance far keys are seen")
        if self.score is not None and (own := self._own_temperature):
            raise ValueError(
                f"{self.score.name} normalises queries and keys: {own} would do nothing; give attention_factor=1.0"
            )

    @property
    def each(self) -> tuple[LongAttnConfig, ...]:
        """The configs of single layers that it is made of: its parts, or itself as the only one."""
        return self.parts or (self,)

    def of_layer(self, layer: int) -> LongAttnConfig | None:
        """The one of `each` for the layer of a number: the one that lists it, else the one whose `layers` is a word.

        Whether "full_attention" covers that layer only the model knows.
        """
        named = (x for x in self.each if not isinstance(x.layers, str) and layer in x.layers)
        return next(named, next((x for x in self.each if isinstance(x.layers, str)), None))

    @property
    def methods(self) -> tuple[Method, ...]:
        """The filled slots, in the order in which they act; of parts the methods of all."""
        return self._methods

    @property
    def strength(self) -> float | None:
        """The strength of the logit map; None where parts may differ in it."""
        return None if self.parts else getattr(self.logit_map, "strength", 1.0)

    @property
    def key_intervals(self) -> tuple[KeyIntervals, ...]:
        """The methods that split the keys of a row into intervals: remaps and windows."""
        return tuple(m for m in self._methods if m.slot in ("positions", "visibility"))  # type: ignore[misc]

    @property
    def remap(self) -> KeyIntervals | None:
        """The one that changes rotary distances."""
        return next((m for m in self.key_intervals if m.remaps), None)

    @property
    def _own_temperature(self) -> str | None:
        """That of a method on the keys' distances, in words."""
        return next((m.own_temperature for m in self.key_intervals if m.own_temperature), None)

    @property
    def identity_below(self) -> float:
        """The number of tokens up to which the config changes nothing in a text (see `Method.identity_below`)."""
        return min((m.identity_below for m in self.methods), default=math.inf)

    @property
    def uses_train_length(self) -> bool:
        """True if a method depends on the length that the model was trained at."""
        return any(m.uses_train_length for m in self.methods)

    @property
    def name(self) -> str:
        """The method names joined by "+", in slot order, of parts by "|" between them; "longattn" when no slot is filled."""
        return "|".join(dict.fromkeys("+".join(m.name for m in x._methods) for x in self.each)) or CUSTOM

    @classmethod
    def preset(cls, name: str, **parameters: Any) -> LongAttnConfig:
        """A config by name: one method, or several joined by "+" ("infoscale+cosscale"), with parameters here or in the text.

        Parameters go to the one method that has them; `layers`, `backend` and `extended_to` to the config, `train_length` to
        the config and to every method that has it.

        Raises:
            ValueError: unknown name or parameter, two methods for one slot, or a parameter that two of
                the methods share (then write the slots out).
        """
        name, parameters = read_name(name, parameters)
        common: dict[str, Any] = {k: parameters.pop(k) for k in ("layers", "backend", "extended_to") if k in parameters}
        by_slot: dict[str, str] = {}
        for part in () if name == CUSTOM else name.split("+"):
            if (other := by_slot.get(slot := method_class(part).slot)) is not None:
                raise ValueError(f"{other} and {part} clash: both fill the slot {slot!r}")
            by_slot[slot] = part
        own: dict[str, dict[str, Any]] = {part: {} for part in by_slot.values()}
        if (length := parameters.pop("train_length", None)) is not None:
            common["train_length"] = length
            for part in (p for p in own if "train_length" in parameters_of(p)):
                own[part]["train_length"] = length
        for key, value in parameters.items():
            owners = [part for part in own if key in parameters_of(part)]
            if not owners:
                known = sorted({*OF_EVERY, *(k for part in own for k in parameters_of(part))})
                hint = did_you_mean(key, known)
                raise ValueError(f"{name} has no parameter {key!r}; {hint}it has: {', '.join(known)}")
            if len(owners) > 1:
                slot = method_class(owners[0]).slot
                raise ValueError(
                    f"{key!r} is a parameter of {' and of '.join(owners)}: write the slots out, e.g. {{{slot!r}: "
                    f"{{'name': {owners[0]!r}, {key!r}: ...}}, ...}}"
                )
            own[owners[0]][key] = value
        return cls(**{slot: method(part, **own[part]) for slot, part in by_slot.items()}, **common)  # type: ignore[arg-type]

    @classmethod
    def parse(
        cls,
        what: str | Mapping[str, Any] | LongAttnConfig | list[Any] | tuple[Any, ...],
        section: Mapping[str, Any] | LongAttnConfig | None = None,
    ) -> LongAttnConfig:
        """The config that is meant by any way to write one, and by what stands beside it.

        Args:
            what: a name with or without parameters ("rerope+infoscale", "rerope:window=4096"), the dict of its slots as
                `to_dict` gives it, a config, or a list of these for different layers, as `parts`.
            section: parameters of what is named; or, as in a checkpoint, all slots written out, which must be of the methods
                that are named ("longattn" stands for any).

        Raises:
            ValueError: the two disagree, or either is invalid.
            TypeError: it is nothing of these.
        """
        if isinstance(what, (list, tuple)):
            if not what:
                raise ValueError("an empty list names no method; hf_longattn.remove(model) takes a method out")
            what = cls(parts=tuple(what))
        if isinstance(what, Mapping):
            what = cls._of_slots(what)
        if isinstance(what, LongAttnConfig):
            return what.replace(**section) if section else what  # type: ignore[arg-type]
        name, parameters = read_name(what)
        if isinstance(section, Mapping) and "name" in section:
            if section["name"] != name:
                raise ValueError(f"{what!r} is named, and its parameters are for {section['name']!r}: leave one of them out")
            section = {key: value for key, value in section.items() if key != "name"}
        if isinstance(section, LongAttnConfig):
            config = section
        elif not section:
            return cls.preset(what)
        elif not isinstance(section, Mapping):
            raise ValueError(
                f"longattn must be a dict, of parameters beside a method's name or of all slots as to_dict writes them, got "
                f"{section!r}"
            )
        elif name == CUSTOM or is_whole(section):
            config = cls._of_slots(section)
        else:
            return cls.preset(what, **section)
        stated = {} if name == CUSTOM else {method_class(part).name: fixed_by(part) for part in name.split("+")}
        other = bool(stated) and stated.keys() != {m.name for m in config.methods}
        other |= any(getattr(m, key) != value for m in config.methods for key, value in stated.get(m.name, {}).items())
        if other or (parameters and config.replace(**parameters) != config):
            raise ValueError(
                f"attn_implementation names {what!r} but the longattn section describes {config.name!r}: use "
                f"attn_implementation={CUSTOM!r} to take the section as it is, or hf_longattn.apply(model, ...) to change it"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `parse` gives back an equal config."""
        out: dict[str, Any] = {"version": self.version}
        out |= {"parts": [x.to_dict() for x in self.parts]} if self.parts else {}
        for slot in SLOTS:
            if (method := getattr(self, slot)) is not None:
                out[slot] = method.to_dict()
        out |= {"layers": thaw(self.layers), "backend": self.backend}
        if self.train_length is not None:
            out |= {"train_length": self.train_length, "train_length_source": self.train_length_source}
        return out if self.extended_to is None else out | {"extended_to": self.extended_to}

    @classmethod
    def _of_slots(cls, data: Mapping[str, Any]) -> LongAttnConfig:
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            hint = did_you_mean(unknown[0], known)
            raise ValueError(f"unknown key(s) in longattn: {', '.join(unknown)}; {hint}known: {', '.join(sorted(known))}")
        return cls(**data)

    def replace(self, **changes: Any) -> LongAttnConfig:
        """A copy with some parameters changed, each given to the one method (or the config) that has it; see `preset`. Of
        parts every one that has a parameter gets it.
        """
        if self.parts:
            return self._with_parts(changes)
        by_slot: dict[str, dict[str, Any]] = {}  # parameters of one method are checked together
        if "train_length" in changes:
            changes = {"train_length_source": ""} | changes
            by_slot = {m.slot: {"train_length": changes["train_length"]} for m in self.methods if hasattr(m, "train_length")}
        self = dataclasses.replace(self, **{f.name: changes.pop(f.name) for f in fields(self) if f.name in changes})
        for key, value in changes.items():
            owners = [m for m in self.methods if key in {f.name for f in fields(m)}]
            if len(owners) != 1:
                hint = did_you_mean(key, {*OF_EVERY, *(f.name for m in self.methods for f in fields(m))})
                raise ValueError(
                    f"{key!r} is a parameter of {' and of '.join(m.name for m in owners) or 'no method in ' + self.name}"
                    + (f"; {hint.strip()}" if hint and not owners else "")
                )
            by_slot.setdefault(owners[0].slot, {})[key] = value
        return dataclasses.replace(self, **{s: dataclasses.replace(getattr(self, s), **own) for s, own in by_slot.items()})

    def _with_parts(self, changes: dict[str, Any]) -> LongAttnConfig:
        """A copy with each parameter changed in every part that has it."""
        length, parts = changes.pop("extended_to", self.extended_to), list(self.parts)
        for key, value in changes.items():
            has = [key in ("backend", "train_length") or any(hasattr(m, key) for m in x.methods) for x in parts]
            if not any(has):
                raise ValueError(f"no part of {self.name} has a parameter {key!r}: give the whole list of configs anew")
            parts = [x.replace(**{key: value}) if own else x for x, own in zip(parts, has, strict=True)]
        return LongAttnConfig(parts=tuple(parts), extended_to=length)

    def bind(self, facts: ModelFacts) -> LongAttnConfig:
        """Fill in what depends on the model and check everything against it.

        Args:
            facts: of the model, by this config's own train_length if it has one.
        """
        if self.parts:
            return LongAttnConfig(parts=tuple(x.bind(facts) for x in self.parts))._extended(self.extended_to)
        if not isinstance(self.layers, str) and self.layers[-1] >= facts.num_layers:
            raise ValueError(f"layers names layer {self.layers[-1]}, but the model has layers 0 to {facts.num_layers - 1}")
        own = self._own_temperature
        both = dataclasses.replace(facts, own_temperature=own or facts.own_temperature)
        bound: dict[str, Any] = {m.slot: m.bind(both) for m in self.methods}
        for m in bound.values():
            check_bound(m, both)
        if own and facts.own_temperature:
            raise ValueError(
                f"the model has a temperature of its own ({facts.own_temperature}); {own} on top of it sharpens twice: give "
                "attention_factor=1.0"
            )
        if self.uses_train_length:
            source = self.train_length_source or facts.train_length_source
            bound |= {"train_length": facts.train_length, "train_length_source": source}
        return dataclasses.replace(self, **bound)._extended(self.extended_to)

    def _extended(self, length: int | None) -> LongAttnConfig:
        """A bound config that says how long a text is to be read; ValueError where it does not reach that far."""
        if length is not None and not self.key_intervals:
            raise ValueError(f"{self.name} extends nothing: extended_to={length} belongs to a position remap or a window")
        if length is not None and length > self.reach:
            raise ValueError(
                f"{self.name} with these parameters reaches {self.reach:.0f} tokens, not {length}: beyond that it shows "
                f"distances that the model does not know. {self._farther()}, or use rerope, which has no limit"
            )
        return dataclasses.replace(self, extended_to=length)

    def _farther(self) -> str:
        """Say which parameters take the methods that limit the reach farther."""
        limiting = [m for m in self.key_intervals if m.remaps and m.reach(self.train_length or 0) == self.reach]
        names = {f.name for m in limiting for f in dataclasses.fields(m)}
        ways = [f"raise {name}" for name in ("stretch", "group", "factor", "shift") if name in names]
        ways += ["lower window"] * ("window" in names)
        said = " or ".join(ways) or "change its parameters"
        return said[0].upper() + said[1:]

    @property
    def reach(self) -> float:
        """The longest text that a bound config lets a model read; 0 where no method takes it beyond its trained length."""
        if not self.key_intervals:
            return 0
        length = self.train_length
        reaches = [m.reach(length) for m in self.key_intervals if m.remaps and length is not None]
        return min((n for n in reaches if n is not None), default=math.inf)

    def for_layer(self, layer: int) -> LongAttnConfig:
        """The config as layer `layer` uses it: of parameters per layer that layer's, of parts the one that takes it."""
        if self.parts:
            return (self.of_layer(layer) or NO_METHOD).for_layer(layer)
        return dataclasses.replace(self, **{m.slot: m.for_layer(layer) for m in self.methods})  # type: ignore[arg-type]

    def for_heads(self, heads: Heads) -> LongAttnConfig:
        """The config of one layer as some of its heads use it: parameters per head are reduced to theirs."""
        return dataclasses.replace(self, **{m.slot: m.for_heads(heads) for m in self.methods})  # type: ignore[arg-type]


#: Characters of a list of numbers that is written out.
LONG = 80
#: What Python prints for what JSON writes otherwise.
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def split_text(text: str) -> tuple[str, dict[str, Any], str]:
    """The names, the parameters and the position encoding of a text in the grammar above; what is not there is empty.

    Values are JSON ("true", "0.5", "[0, 2]"), anything else is a word.

    Raises:
        ValueError: a parameter is no key=value, or is given twice.
    """
    what, _, rope = text.strip().removeprefix(PREFIX).partition("@")
    name, *pairs = names_in(what), *(part.strip() for part in what.split(":")[1:])
    if "+" in name and "" in name.split("+"):
        raise ValueError(f"a name is missing beside '+' in {text!r}")
    if "=" in name:
        raise ValueError(f"{name!r} is no method's name: parameters follow it by colons, rerope:window=4096:stack=true")
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} in {text!r} is not key=value")
        if key in parameters:
            raise ValueError(f"{key} is given twice in {text!r}: leave one of them out")
        try:
            parameters[key] = json.loads(_PYTHONS.get(value, value))
        except json.JSONDecodeError:
            first, plus, more = value.partition("+")
            if plus:
                raise ValueError(
                    f"parameters stand behind all names: {name}+{more}:{key}={first} in place of {text!r}"
                ) from None
            if re.search(r",\s*\w+=", value):
                by_colons = re.sub(r",\s*(?=\w+=)", ":", text)
                raise ValueError(f"parameters stand between colons: {by_colons} in place of {text!r}") from None
            parameters[key] = value
    return name, parameters, rope


def written(methods: Sequence[Method], only: Iterable[str] | None = None) -> str:
    """Methods of one layer as a text in the grammar above, with all their parameters or `only` these.

    A parameter of several methods is left out where each has its default. Where they do not, no text can say it: each method
    gets one of its own, with ", " between them. A long list of numbers is shown by its length.
    """
    said = [(m, k, v) for m in methods for k, v in m.to_dict().items() if k != "name" and (only is None or k in only)]
    count = Counter(k for _, k, _ in said)
    shared = {
        k for k, n in count.items() if n > 1 and not (k == "train_length" and len({v for _, x, v in said if x == k}) == 1)
    }
    defaults = {m: {f.name: thaw(freeze(f.default)) for f in fields(m)} for m in methods}
    if any(k in shared and v != defaults[m][k] for m, k, v in said):
        return ", ".join(written([m], only) for m in methods)
    pairs = {k: word(v) for _, k, v in said if k not in shared and v is not None}
    return ":".join(["+".join(m.name for m in methods), *(f"{k}={v}" for k, v in pairs.items())])


def word(value: Any) -> str:
    """A value as a text in the grammar above holds it; of a long list its length."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"<{len(value)} values>" if isinstance(value, list) and len(text) > LONG else text


def names_in(text: str) -> str:
    """The names of methods in a text in the grammar above, joined by "+", without what stands behind them."""
    return "+".join(part.strip() for part in text.partition("@")[0].partition(":")[0].split("+"))


def listed(value: Any) -> list[Any]:
    """The parts of a text with commas, but for those in brackets ("rerope:layers=[0, 2],logn"); one thing as a list of it."""
    if not isinstance(value, str):
        value = freeze(value)
        return list(value) if isinstance(value, Iterable) and not isinstance(value, Mapping) else [value]
    parts, depth = [""], 0
    for character in value:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [stripped for part in parts if (stripped := part.strip())]


def is_whole(section: Mapping[str, Any]) -> bool:
    """Tell whether a dict describes a whole config, as `to_dict` gives it, and not parameters of what is named beside it."""
    return bool({"version", "parts", *SLOTS} & section.keys())


def read_name(text: Any, beside: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The names of methods that a text holds, and the parameters that it and what stands beside it give.

    Raises:
        ValueError: a parameter is no key=value, or has another value beside the text; or there is a position encoding, which
            is not of the attention.
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        got = repr(text) if text is None or isinstance(text, (int, float)) else f"an object of type {type(text).__name__}"
        out = "; hf_longattn.remove(model) takes a method out" * (text is None)
        raise TypeError(f'a method is given by its name ("scale_invariant") or as a LongAttnConfig, got {got}{out}')
    name, said, rope = split_text(text)
    if rope:
        raise ValueError(f"{text!r} changes the position encoding: leave out @{rope}, and see hf_longattn.rope")
    beside = beside or {}
    for key in (key for key in said if key in beside and freeze(said[key]) != freeze(beside[key])):
        raise ValueError(
            f"{key} is given twice: {said[key]!r} in {text!r} and {beside[key]!r} beside it: leave one of them out"
        )
    return name, {**said, **beside}


def _method_in(slot: str, value: Any) -> Method | None:
    """Make the method of a slot from a method, its dict form, or None."""
    if isinstance(value, Mapping):
        if not isinstance(value.get("name"), str):
            raise ValueError(f"{slot} is given as a dict without a 'name', which is a word")
        if value["name"] not in list_methods():
            raise ValueError(from_elsewhere(value["name"]))
        value = method(**value)
    if value is not None and not isinstance(value, Method):
        raise ValueError(f"{slot} must be a method, its dict form or None, got {value!r}")
    if value is not None and value.slot != slot:
        raise ValueError(f"{value.name} fills the slot {value.slot!r}, not {slot!r}")
    return value


def _layers(layers: Any) -> str | tuple[int, ...]:
    """A word, or indices in order."""
    layers = freeze(layers)
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        if layers not in ("full_attention", "all"):
            raise ValueError(f"layers must be 'full_attention', 'all' or a list of indices, got {layers!r}")
        return str(layers)
    return layer_numbers(layers)


def layer_numbers(layers: Any) -> tuple[int, ...]:
    """Numbers of layers, in order and each once; ValueError where there is none, or anything else."""
    layers = freeze(layers)
    numbers = freeze(tuple(layers)) if isinstance(layers, Iterable) and not isinstance(layers, str) else ()  # a set, too
    if not numbers or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in numbers):
        raise ValueError(f"layers must be a non-empty list of layer indices >= 0, got {list(numbers) or layers!r}")
    return tuple(sorted(set(numbers)))


#: The config under which attention is the model's own.
NO_METHOD = LongAttnConfig()
