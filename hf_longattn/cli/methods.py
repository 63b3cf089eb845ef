"""`hf-longattn methods`: every method by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from .common import refusing, say


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, to list its parameters; without it, all methods.")] = None,
) -> None:
    """List every method: its name, its slot, whether it needs training, and what it does; of one, NAME, its parameters.

    A method that needs training harms a pretrained model, with its default parameters, until the model is trained with it or
    it is calibrated. Methods of different slots combine: rerope+infoscale.
    """
    from ..slots.method import SLOTS
    from ..slots.registry import list_methods, method, summary_of

    if name is not None:
        with refusing("NAME"):
            return _one(name)
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


def _one(name: str) -> None:
    """Describe a method: its parameters with their defaults, and its paper."""
    from ..slots.method import thaw
    from ..slots.registry import fixed_by, method, method_class, parameters_of, summary_of

    made, kind = method(name), method_class(name)
    trained = ", needs training" * made.needs_training
    say(f"{name} ({made.slot}{trained}): {summary_of(name)}")
    said = _said(kind)
    rows = [("parameter", "default", "")]
    rows += [(p, str(thaw(getattr(made, p))), said.get(p, "")) for p in vars(made) if p in parameters_of(name)]
    _columns(rows if rows[1:] else [("It has no parameters.",)])
    fixed = [f"{key} = {value}" for key, value in fixed_by(name).items()]
    for line in [f"It is {kind.name} with {', '.join(fixed)}." * bool(fixed), f"Paper: {kind.paper}"]:
        if line:
            say(line)


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
