"""Settings: a model as it is to be measured, in one short string or one entry of a YAML file.

    METHOD[:key=value[:key=value...]][@ROPE[:factor]]

    unmodified                            the model as it is
    scale_invariant:tau=100:decay=0.5     a method and its parameters
    infoscale+cosscale                    several, in different slots
    @yarn:2                               YaRN for twice the trained length, no method
    infoscale:stack=true@yarn:2           both

Commas separate settings, colons parameters. Values are JSON (`true`, `0.5`), anything else is a word; lists need a file.
A YAML file maps names to entries with the fields of `Setting`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import read_text
from ..config import LongAttnConfig
from ..slots.registry import did_you_mean

UNMODIFIED = "unmodified"
#: Position encodings by name, and the fewest and most numbers they take.
ROPES = {"yarn": (1, 1), "ntk": (1, 1), "linear": (1, 1), "prope": (1, 2), "nope": (0, 0), "cope": (0, 1)}
PLAIN = "plain"


@dataclass(frozen=True)
class Setting:
    """One way to run a model.

    Args:
        name: what tables and files call it.
        method: a preset's name, with `parameters`; or the slots written out, as in a saved `longattn` section; None for none.
        rope: "yarn:2" and the like ("prope:0.5", with a new base "prope:0.5:1e6"); None for the model's own.
        adapter: a directory with a LoRA adapter, which brings the attention that it records, or that a config.json in its
            directory names.
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

    @property
    def config(self) -> LongAttnConfig | None:
        """What `apply` gets."""
        if self.method is None:
            return None
        method = self.method if isinstance(self.method, str) else LongAttnConfig.from_dict(self.method)
        config = LongAttnConfig.of(method, **self.parameters)
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
    def parse(cls, text: str) -> Setting:
        """A setting from its string.

        Raises:
            ValueError: unknown method, parameter or position encoding; the message says what is near.
        """
        what, at, encoding = text.strip().partition("@")
        name, *pairs = what.split(":")
        if name in ("", UNMODIFIED):
            if pairs or (not name and not at):
                raise ValueError(f"{text!r} names no method; write {UNMODIFIED}, a method, or @yarn:2")
            method = None
        else:
            method = name
        parameters = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"{pair!r} in {text!r} is not key=value")
            parameters[key] = _value(value)
        return cls(text.strip() or UNMODIFIED, method, parameters, encoding if at and encoding != PLAIN else None)


def parse_settings(
    methods: Sequence[str],
    ropes: Sequence[str] = (),
    file: Path | None = None,
    adapters: Sequence[str] = (),
    train_length: int | None = None,
) -> list[Setting]:
    """The settings of a command line, the unmodified model first: every method without an @ crossed with every rope.

    Args:
        methods: strings of settings, several in one separated by commas.
        ropes: "plain", "yarn:2", ...; none means the model's own.
        file: YAML, added behind.
        adapters: NAME=DIRECTORY each, added last.
        train_length: for all that name none of their own.

    Raises:
        ValueError: a setting is wrong, or two share a name.
    """
    encodings = [r for text in ropes for r in text.split(",")] or [PLAIN]
    names = [m for text in methods for m in text.split(",")] or [UNMODIFIED]
    texts = [n if "@" in n or e == PLAIN else f"{'' if n == UNMODIFIED else n}@{e}" for e in encodings for n in names]
    settings = [Setting.parse(text) for text in texts] + ([] if file is None else read_settings(file))
    for text in adapters:
        name, equals, directory = text.partition("=")
        if not equals:
            raise ValueError(f"an adapter is given as NAME=DIRECTORY, got {text!r}")
        settings.append(Setting(name, adapter=directory))
    result = [Setting(UNMODIFIED)]
    for setting in settings:
        if any(setting.to_dict() == other.to_dict() for other in result):
            continue
        if any(setting.name == other.name for other in result):
            raise ValueError(f"two different settings are called {setting.name!r}")
        result.append(setting)
    return [dataclasses.replace(s, train_length=s.train_length or train_length) for s in result]


def read_settings(file: Path) -> list[Setting]:
    """The settings of a YAML file: a mapping from names to entries; relative paths start at the file."""
    yaml = _yaml()
    try:
        text = read_text(file)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} must map names to settings")
    names = [key.value for key, _ in yaml.compose(text, Loader=yaml.SafeLoader).value]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{file} has two settings called {twice[0]!r}, and YAML would keep the last: rename one")
    out = []
    for name, entry in data.items():
        entry = {} if entry is None else entry
        known = {f.name for f in dataclasses.fields(Setting)} - {"name"}
        if not isinstance(entry, dict) or set(entry) - known:
            raise ValueError(f"{file}: {name!r} must be a mapping with keys among {', '.join(sorted(known))}; got {entry!r}")
        if isinstance(entry.get("adapter"), str):
            entry = entry | {"adapter": str(file.parent / entry["adapter"])}
        if isinstance(entry.get("model"), str) and (folder := file.parent / entry["model"]).is_dir():
            entry = entry | {"model": str(folder)}
        out.append(Setting(str(name), **entry))
    return out


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


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ImportError('settings in a file need pyyaml: pip install "hf_longattn[cli]"') from None
    return yaml
