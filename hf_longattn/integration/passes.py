"""Forward passes of a model: what one was given is known from its beginning to its end, whatever its layers hand on."""

from __future__ import annotations

import functools
import inspect
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..attention.tracing import readable
from .caches import cache_in, values_of
from .layers import innermost, layers_of
from .state import AttentionState, plan_of
from .verify import verify_at_first_call

_AXES = (
    "this call's tokens are at several positions each, as those of pictures are in a model with M-RoPE, and a remap of rotary "
    "distances knows one: give it text alone, or take a method that leaves the positions as they are"
)

#: How positions may count, and did in all calls so far: by cache index, from the start of the text, by visible tokens.
Numbering: TypeAlias = tuple[bool, bool, bool]
#: The entry of a cache's __dict__ that says it of its keys.
NOTE = "longattn_numbering"


@dataclass(eq=False)
class Pass:
    """One forward pass.

    Args:
        outer: the one that it runs in, of another model.
        cache: the KV cache that its model was given.
        positions: the position_ids that its innermost model was given: int64 (batch or 1, q_len), or (axes, batch, q_len).
    """

    outer: Pass | None
    cache: Cache | None
    positions: Tensor | None
    after: Numbering | None = None  # how the keys are numbered in the cache that it leaves


_PASS: ContextVar[Pass | None] = ContextVar("longattn_pass", default=None)


def current_pass() -> Pass | None:
    """The forward pass that runs in this thread; None where layers are called by themselves, or again in a backward pass."""
    return _PASS.get()


def watch(model: PreTrainedModel, state: AttentionState) -> None:
    """From now on forward passes and changes of the model's attention take turns, and the first pass verifies rotations.

    While a model is built it has no weights to verify anything with; its first forward pass has.
    """
    sources = {plan.rotary for x in layers_of(model) if (plan := plan_of(x.module)) is not None}
    state.remapped = any(source is not None for source in sources)
    state.unverified = any(source is not None and not source.verified for source in sources)
    if not state.passes:
        inner = innermost(model)  # which may be called without the others
        parameters = list(inspect.signature(type(inner).forward).parameters)[1:]
        place = parameters.index("position_ids") if "position_ids" in parameters else len(parameters)
        before, behind = functools.partial(_begin, state, place), functools.partial(_end, state)
        begin = inner.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        end = inner.register_forward_hook(behind, always_call=True)
        state.passes = begin, end


def _begin(state: AttentionState, place: int, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    positions = kwargs.get("position_ids", args[place] if len(args) > place else None)
    if state.remapped and positions is not None and positions.ndim > 2 and state.disabled is None:
        _check_axes(positions)
    if torch.compiler.is_compiling():
        state.traced = Pass(None, None, positions)
        return
    try:
        if state.unverified:
            with state.gate.alone():
                verify_at_first_call(state, model)
    finally:  # `_end` follows also what is raised here
        state.gate.enter(sys._getframe(1))
        _PASS.set(Pass(_PASS.get(), cache_in((*args, *kwargs.values())), positions))


def _end(state: AttentionState, model: Any, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        state.traced = None
        return
    if (now := _PASS.get()) is not None:
        _PASS.set(now.outer)
        cache = cache_in(values_of(output))  # None where the pass failed
        if cache is not None and now.after is not None:
            cache.__dict__[NOTE] = now.after
    state.gate.leave()


def _check_axes(positions: Tensor) -> None:
    one = (positions == positions[:1]).all()
    if torch.compiler.is_compiling():
        torch._assert_async(one, _AXES)
    elif readable(positions) and not bool(one):
        raise ValueError(_AXES)
