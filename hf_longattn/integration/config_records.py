"""The record of a method that a config object keeps, and what `config.longattn` shows of it."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from ..config import LongAttnConfig
from .internals import get_implementation


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


class NameOf(str):
    """The name of a model's attention, and its method: TRL loads a reference model by the name, which so gets both."""

    __slots__ = ("method",)

    method: LongAttnConfig

    def __new__(cls, name: str, method: LongAttnConfig) -> NameOf:
        self = super().__new__(cls, name)
        self.method = method
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return NameOf, (str(self), self.method)


class Before(NamedTuple):
    """The attention that a config ran before its method; kept on the config, where the mask function sees it too."""

    implementation: str  # what `remove` brings back
    base: str  # what runs the layers that we leave alone: sdpa or eager, the two that a mask of ours can be turned into
    windows: bool = True  # whether layers with a window are such: see `trained_length.window_hides`


class ConfigRecord(NamedTuple):
    """The record of a method, kept with a config object.

    Args:
        section: what `config.longattn` shows: the `LongAttnConfig` that a model runs, or what a user wrote.
        before: what ran before.
        saved: it came with a checkpoint of ours.
        named: the name that `config._attn_implementation` gives while the model runs the method of `section`.
    """

    section: Any = None
    before: Before | None = None
    saved: bool = False
    named: NameOf | None = None


def record_in(config: Any) -> ConfigRecord:
    """Return the record of a config. One that was read before this package was imported has its section by its plain name."""
    of = vars(config)
    return of.get("_longattn") or ConfigRecord(of.get("longattn"))


def before(config: Any) -> Before | None:
    """Return what a config ran before its method; None: there is no config, or no method came."""
    return None if config is None else record_in(config).before


def set_record(config: Any, **changes: Any) -> None:
    """Change a config's record: put another in its place."""
    if "section" in changes:
        section, name = changes["section"], get_implementation(config)
        changes["named"] = NameOf(name, section) if name is not None and isinstance(section, LongAttnConfig) else None
    vars(config)["_longattn"] = record_in(config)._replace(**changes)


def raw_section(config: Any) -> Any:
    """Return what is behind `config.longattn`: a user's dict, or the `LongAttnConfig` of a model that runs a method."""
    return record_in(config).section
