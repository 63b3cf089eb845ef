"""What position remaps and windows share: their windows, and the checks against the model."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .base import Band
from .method import ModelFacts


def near(i: Tensor, w: int) -> Band:
    """Keys less than w away from queries at i, on both sides: the mask takes care of causality."""
    return Band(first=i - w + 1, last=i + w - 1)


def capped(last: Tensor, w: int) -> Band:
    """Keys up to `last`, all of them at distance w: the query rotated for w, keys for 0."""
    return Band(last=last, query=lambda i: torch.full_like(i, w).double(), key=lambda j: torch.zeros_like(j).double())


def known(window: int | None) -> int:
    if window is None:
        raise ValueError("give window, or put the method into a model, which fills it in by itself")
    return window


def check_window(window: int | None) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be an integer >= 1, got {window!r}")


def check_at_least_one(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
            raise ValueError(f"{name} must be >= 1, got {value!r}")


def check_remap(name: str, facts: ModelFacts, stack: bool) -> None:
    """Refuse models whose rotary distances cannot be remapped."""
    if facts.rope_type is None:
        raise ValueError(
            f"{name} remaps rotary distances, and this model shows no rotary frequencies (inv_freq): it has no rotary "
            "position encoding, or takes its rotations from a table that ends where its training did (GPT-J, CodeGen)"
        )
    if not facts.rotation_is_own and not stack:
        raise ValueError(
            f"the model scales its rotary positions already (rope_type {facts.rope_type!r}) and {name} would do it again: its "
            f"trained length is {facts.train_length} ({facts.trained}). Pass train_length= if it was trained with the "
            "scaling, stack=True if you want both, or load the model with its default rope"
        )


def bind_window(method, facts: ModelFacts, share: int, may_equal: bool = False):  # type: ignore[no-untyped-def]
    """Fill in window = trained length / share, and check that it is below the trained length."""
    if method.window is None:
        if facts.train_length is None:
            raise ValueError(f"{method.name} needs window: the model's config names no maximum length")
        return dataclasses.replace(method, window=max(facts.train_length // share, 1))
    if facts.train_length is not None and method.window >= facts.train_length + may_equal:
        raise ValueError(
            f"window {method.window} must be {'at most' if may_equal else 'below'} the trained length {facts.train_length}: "
            "beyond it are the distances that the model does not know"
        )
    return method
