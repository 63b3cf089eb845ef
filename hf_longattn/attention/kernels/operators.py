"""Custom operators take tensors and numbers alone: the objects of a call are laid flat before one, and rebuilt behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

T = TypeVar("T")
_TYPES: dict[Any, str] = {
    **{Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", float | None: "float?", bool: "bool"}
}
_FIELDS: dict[type, dict[str, Any]] = {}


def schema(kind: type) -> str:
    """An operator's arguments that stand for an object, from its annotations; fields that begin with _ stay behind."""
    _FIELDS[kind] = fields = {n: t for n, t in get_type_hints(kind).items() if not n.startswith("_")}
    return ", ".join(f"{_TYPES[t]} {name}" if t in _TYPES else schema(t) for name, t in fields.items())


def flatten(x: Any) -> list[Any]:
    """What `schema` of its type lists."""
    out = []
    for name, kind in _FIELDS[type(x)].items():
        out += [getattr(x, name)] if kind in _TYPES else flatten(getattr(x, name))
    return out


def names(kind: type) -> list[str]:
    """Of what `flatten` gives."""
    return [leaf for name, t in _FIELDS[kind].items() for leaf in ([name] if t in _TYPES else names(t))]


def rebuild(kind: type[T], leaves: Iterator[Any]) -> T:
    """The inverse of `flatten`."""
    return kind(**{name: next(leaves) if t in _TYPES else rebuild(t, leaves) for name, t in _FIELDS[kind].items()})


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep a call's flat arguments and what it returned for the backward pass."""
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in inputs))


def saved(ctx: Any, outputs: int) -> tuple[list[Tensor], list[Any]]:
    """The outputs and the flat arguments that `save` kept."""
    tensors = ctx.saved_tensors  # once: gradient checkpointing gives them out once
    inputs = [n if x is None else x for x, n in zip(tensors[outputs:], ctx.numbers, strict=True)]
    return list(tensors[:outputs]), inputs
