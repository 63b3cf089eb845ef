"""Settings: a model as it is to be measured, in one short text, or one entry of a YAML file.

    unmodified                            the model as it is
    scale_invariant:tau=100:decay=0.5     a method and its parameters (`config.split_text`)
    infoscale+cosscale                    several, in different slots
    @yarn:2                               YaRN for twice the trained length, no method
    infoscale:stack=true@yarn:2           both

Commas separate settings. A YAML file maps names to texts, or to mappings: `method`, such a text or the slots written out,
`adapter`, `model` and `train_length`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..config import LongAttnConfig, listed, split_text
from ..files import read_text
from ..slots.method import as_length
from ..slots.registry import ROPES, did_you_mean
from ..slots.registry import UNMODIFIED as UNMODIFIED

PLAIN = "plain"


@dataclass(frozen=True)
class Setting:
    """One way to run a model.

    Args:
        name: what tables and files call it.
        method: a preset's name, with `parameters`; or the slots written out, as in a saved `longattn` section; None for none.
        rope: "yarn:2" and the like ("prope:0.5", with a new base "prope:0.5:1e6"); None for the model's own.
        adapter: a directory with a LoRA adapter, which brings the attention that it records, or that a config.json in its
            directory names; `method` runs in place of that.
        model: another checkpoint in place of the command's, for weights that were trained under the method.
        train_length: the length that the model was trained at; None: read from its config.
    """

    name: str
    method: str | Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    rope: str | None = None
    adapter: str | None = None
    model: str | None = None
    train_length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "train_length", as_length(self.train_length))
        kinds: dict[str, Any] = {"method": (str, Mapping), "parameters": Mapping, "rope": str, "adapter": str, "model": str}
        kinds["train_length"] = int
        for name, kind in kinds.items():
            if ((value := getattr(self, name)) is not None or name == "parameters") and not isinstance(value, kind):
                raise ValueError(f"setting {self.name!r}: {name} cannot be {value!r}")
        if isinstance(self.method, Mapping) and self.parameters:
            raise ValueError(f"setting {self.name!r}: parameters belong in the slots, where the method is written out")
        if self.parameters and self.method is None:
            raise ValueError(f"setting {self.name!r} has parameters but no method")
        LongAttnConfig(train_length=self.train_length)
        self.config  # noqa: B018  both raise
        if self.rope is not None:
            parse_rope(self.rope)
        if self.adapter is not None and not Path(self.adapter).is_dir():
            raise ValueError(f"setting {self.name!r}: the adapter {self.adapter!r} is not a directory")

    @functools.cached_property
    def config(self) -> LongAttnConfig | None:
        """The config that `apply` gets."""
        if self.method is None:
            return None
        config = LongAttnConfig.parse(self.method, self.parameters)
        return config if config.train_length else dataclasses.replace(config, train_length=self.train_length)

    @property
    def unmodified(self) -> bool:
        return self.method is None and self.rope is None and self.adapter is None and self.model is None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without what is not set; equal dicts mean the same measurement, whatever the name."""
        left_out = {"name"} if self.method or self.rope else {"name", "train_length"}  # nothing depends on it
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items() if v not in (None, {})}

    @classmethod
    def parse(cls, text: str, name: str | None = None) -> Self:
        """A setting from its text, by which it is called unless it gets a name.

        Raises:
            ValueError: unknown method, parameter or position encoding; the message says what is near.
        """
        method, parameters, rope = split_text(text)
        if method in ("", UNMODIFIED):
            if parameters or (not method and not rope):
                raise ValueError(f"{text!r} names no method; write {UNMODIFIED}, a method, or @yarn:2")
            method = ""
        rope = "" if rope == PLAIN else rope
        return cls(name=name or text.strip(), method=method or None, parameters=parameters, rope=rope or None)

    @classmethod
    def entry(cls, name: str, entry: Any) -> Self:
        """A setting from what stands under its name in a file: a text, None, or a mapping (see above).

        Raises:
            ValueError: as `parse`, or it is nothing of these.
        """
        entry = entry if isinstance(entry, Mapping) else {"method": entry}
        known = {f.name for f in dataclasses.fields(cls)} - {"name", "parameters", "rope"}
        if unknown := sorted(map(str, entry.keys() - known)):
            hint = did_you_mean(unknown[0], known)
            raise ValueError(f"{name!r} has no {unknown[0]!r}; {hint}it has: {', '.join(sorted(known))}")
        method, others = entry.get("method"), {k: v for k, v in entry.items() if k != "method"}
        if isinstance(method, str):
            return dataclasses.replace(cls.parse(method, name), **others)
        return cls(name=name, method=method, **others)


def parse_settings(
    method: Sequence[str] | None = None,
    rope: Sequence[str] | None = None,
    settings: Path | None = None,
    adapter: Sequence[str] | None = None,
    train_length: int | None = None,
) -> list[Setting]:
    """The settings of a command line, by its options, the unmodified model first: every method without an @ is crossed with
    every rope.

    Args:
        method: strings of settings, several in one separated by commas.
        rope: "plain", "yarn:2", ...; none means the model's own.
        settings: YAML, whose settings come next.
        adapter: a directory or NAME=DIRECTORY each, which come last; without a name it is called as its directory.
        train_length: for all that name none of their own.

    Raises:
        ValueError: a setting is wrong, or two share a name.
    """
    encodings = [r for text in rope or () for r in listed(text)] or [PLAIN]
    names = [m for text in method or () for m in listed(text)] or [UNMODIFIED]
    texts = [n if "@" in n or e == PLAIN else f"{'' if n == UNMODIFIED else n}@{e}" for e in encodings for n in names]
    found = [Setting.parse(text) for text in texts] + ([] if settings is None else read_settings(settings))
    for text in adapter or ():
        name, equals, directory = text.partition("=")
        if not equals or Path(text).is_dir():
            name, directory = Path(text).resolve().name, text
        if not name:
            raise ValueError(f"{text!r} gives the adapter no name: NAME={directory}, or {directory} alone")
        found.append(Setting(name, adapter=directory))
    return [dataclasses.replace(s, train_length=s.train_length or train_length) for s in settings_of(found)]


def setting_of(given: str | Setting) -> Setting:
    """A setting, or that of a string. ValueError: it is wrong; TypeError: it is neither."""
    if isinstance(given, str):
        return Setting.parse(given)
    if not isinstance(given, Setting):
        raise TypeError(
            f'a setting is a text ("rerope:window=512") or a hf_longattn.evaluation.Setting(name, method=...), got {given!r}'
        )
    return given


def settings_of(given: Sequence[str | Setting]) -> list[Setting]:
    """Settings, or their strings, each measurement once: the unmodified model first.

    Raises:
        ValueError: a setting is wrong, or two share a name.
    """
    result = [Setting(UNMODIFIED)]
    for setting in map(setting_of, given):
        if setting.unmodified:
            result[0] = dataclasses.replace(result[0], train_length=setting.train_length or result[0].train_length)
        elif all(setting.to_dict() != other.to_dict() for other in result):
            if any(setting.name == other.name for other in result):
                way = f": give the adapter another name, as NAME={setting.adapter}" if setting.adapter else ""
                raise ValueError(f"two different settings are called {setting.name!r}{way}")
            result.append(setting)
    return result


def read_settings(file: Path) -> list[Setting]:
    """The settings of a YAML file: a mapping from names to entries; relative paths start at the file."""
    try:
        import yaml
    except ImportError:
        raise ImportError('settings in a file need pyyaml: pip install "hf_longattn[cli]"') from None
    if not file.is_file():
        raise ValueError(f"{file} is not a file: --settings names one in YAML, and a method goes behind --method")
    try:
        loader = yaml.SafeLoader(read_text(file))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{file} must map names to settings")
        keys = [key for key, _ in node.value]
        for key in keys:
            key.tag = "tag:yaml.org,2002:str"  # a setting may be called on, no or 1
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    names = [key.value for key in keys]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{file} has two settings called {twice[0]!r}, and YAML would keep the last: rename one")
    settings = []
    for name, entry in data.items():
        try:
            setting = Setting.entry(name, _beside(file, entry))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        settings.append(setting)
    return settings


def _beside(file: Path, entry: Any) -> Any:
    """An entry of a file whose folders are found from where the file is."""
    if not isinstance(entry, Mapping):
        return entry
    folders = {key: file.parent / entry[key] for key in ("adapter", "model") if isinstance(entry.get(key), str)}
    return {**entry, **{key: str(path) for key, path in folders.items() if key == "adapter" or path.is_dir()}}


def parse_rope(text: str) -> tuple[str, list[float]]:
    """The name of a position encoding and its numbers; ValueError if there is none of that name or with so many."""
    name, *numbers = text.split(":")
    if name not in ROPES:
        hint = did_you_mean(name, ROPES)
        raise ValueError(f"unknown position encoding {text!r}; {hint}known: {PLAIN}, {', '.join(ROPES)}")
    fewest, most = ROPES[name]
    try:
        values = [float(n) for n in numbers]
    except ValueError:
        values = []
    if not fewest <= len(values) <= most or len(values) < len(numbers):
        raise ValueError(f"{text!r}: {name} takes {'no number' if not most else f'one number, as in {name}:2'}")
    return name, values
