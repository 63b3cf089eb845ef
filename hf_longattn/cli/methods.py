"""`hf-longattn methods`: every method by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from .common import refusing, say

if TYPE_CHECKING:
    from ..slots.method import Method


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One method, or several that are combined, with parameters or without: rerope:window=4096, rerope+infoscale. "
            "Without it, all methods."
        ),
    ] = None,
) -> None:
    """List every method: its name, its slot, whether it needs training, and what it does; of NAME the parameters too.

    A method that needs training harms a pretrained model, with these parameters, until the model is trained with it or it is
    calibrated. The list says that of default parameters. Methods of different slots combine: rerope+infoscale.
    """
    from ..slots.method import SLOTS
    from ..slots.registry import list_methods, method, summary_of

    if name is not None:
        with refusing("NAME"):
            return _some(name)
    known = {name: method(name) for name in list_methods()}
    rows = [("name", "slot", "training", "what it does")]
    for name in sorted(known, key=lambda n: (SLOTS.index(known[n].slot), n)):
        rows.append((name, known[name].slot, "needed" if known[name].needs_training else "-", summary_of(name)))
    _columns(rows)


def _columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows, all cells but the last as wide as the widest of their column."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]) - 1)]
    for row in rows:
        line = "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        say(line.rstrip())


def _some(text: str) -> None:
    """Describe the methods of a text, and say whether a pretrained model takes them together without training."""
    from ..config import CUSTOM, LongAttnConfig, read_name
    from ..slots.registry import method_class

    config, names = LongAttnConfig.preset(text), read_name(text)[0].split("+")
    if names == [CUSTOM]:
        raise ValueError(f"{CUSTOM!r} stands for the method that a checkpoint records: give one by its name")
    made = {m.slot: m for m in config.methods}
    for name in sorted(names, key=lambda name: [*made].index(method_class(name).slot)):
        _one(name, made[method_class(name).slot])
    untrained = " and ".join(m.name for m in config.methods if m.needs_training)
    harm = f"needed for {untrained}: a model that was not trained with these parameters has higher losses"
    say(f"Training: {harm if untrained else f'not needed with these parameters{_switches(config.methods)}'}.")


def _switches(methods: Sequence[Method]) -> str:
    """Name the parameters, true or false, whose other value alone would need training."""
    from ..config import word

    flags = [(m, f.name) for m in methods for f in fields(m) if isinstance(getattr(m, f.name), bool)]
    needed = [name for m, name in flags if replace(m, **{name: not getattr(m, name)}).needs_training]
    said = [f"{name}={word(not getattr(m, name))}" for m, name in flags if name in needed]
    return f", but with {' or '.join(dict.fromkeys(said))}" if said else ""


def _one(name: str, made: Method) -> None:
    """Describe a method: its parameters with their values, and its paper."""
    from ..config import word
    from ..slots.method import thaw
    from ..slots.registry import fixed_by, method, parameters_of, summary_of

    kind, default = type(made), method(name)
    say(f"{name} ({made.slot}): {summary_of(name)}")
    said = _said(kind)
    rows = [("parameter", "value", "")]
    for p in (p for p in vars(made) if p in parameters_of(name)):
        values = (thaw(getattr(x, p)) for x in (made, default))
        value, usual = ("None" if v is None else word(v) for v in values)  # as the docstrings call it
        rows.append((p, value if value == usual else f"{value} (default {usual})", said.get(p, "")))
    _columns(rows if rows[1:] else [("It has no parameters.",)])
    fixed = [f"{key}={word(value)}" for key, value in fixed_by(name).items()]
    if fixed:
        say(f"It is {kind.name} with {', '.join(fixed)}.")
    if kind.paper:
        say(f"Paper: {kind.paper}")


def _said(kind: type) -> dict[str, str]:
    """By parameter, what the docstrings of a method and of what it is made from say of it."""
    said: dict[str, str] = {}
    for cls in kind.__mro__:
        _, _, listed = (inspect.cleandoc(cls.__dict__.get("__doc__") or "")).partition("Args:\n")
        for names, text in re.findall(r"^    (\w[\w, ]*): (.+(?:\n {5,}.+)*)", listed, re.MULTILINE):
            if not text.startswith("see `"):  # another class's, which comes later
                own = {name.strip(): " ".join(text.split()) for name in names.split(",")}
                said = own | said
    return said
