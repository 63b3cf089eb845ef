"""Switching a method off for a moment, so that the model computes what it did before it, and on again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .layers import pretrained
from .model import SUSPENDED, without_method
from .names import is_ours
from .rope import Tables, build, exchange


@dataclass
class Suspended:
    """What `resume` puts back."""

    implementations: list[tuple[Any, str]]
    tables: Tables | None


def suspend(model: nn.Module, rope_parameters: dict[str, Any] | None = None) -> None:
    """Switch the method off until `resume`; plans and learned parts stay. Nothing happens if it is off already.

    Args:
        rope_parameters: settings of the rotary encoding to use meanwhile; None leaves it as it is.
    """
    base = pretrained(model)
    running = without_method(base)
    if SUSPENDED in base.__dict__ or not running:
        return
    configs = [c for c, _ in running] + ([base.config] if is_ours(base.config._attn_implementation) else [])
    before = [(c, c._attn_implementation) for c in {id(c): c for c in configs}.values()]
    base.__dict__[SUSPENDED] = Suspended(
        before, None if rope_parameters is None else exchange(base, build(base, rope_parameters))
    )
    plain = {id(c): implementation for c, implementation in running}
    for c, _ in before:  # not by the property, which would switch a vision tower too
        c._attn_implementation_internal = plain.get(id(c), running[0][1])


def resume(model: nn.Module) -> None:
    """Undo `suspend`; nothing happens if the method is on."""
    base = pretrained(model)
    if (state := base.__dict__.pop(SUSPENDED, None)) is None:
        return
    for c, implementation in state.implementations:
        c._attn_implementation_internal = implementation
    if state.tables is not None:
        exchange(base, state.tables)


def is_suspended(model: PreTrainedModel) -> bool:
    return SUSPENDED in model.__dict__
