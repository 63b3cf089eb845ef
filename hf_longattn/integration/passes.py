"""Forward passes of a model: begun and ended by hooks, and found from a layer."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache

from ..core.tracing import assert_later
from .caches import cache_in, known_of, record_of, values_of
from .config_records import raw_section
from .forward_context import PASS, ForwardContext, current_pass
from .gate import gate_of
from .internals import frame_above, get_implementation
from .layers import View
from .names import refuse_taken
from .rotated_key_cache import drop_other_keys
from .shared import model_of, refuse_stray_layer
from .state import AttentionState, LayerMethod, method_of
from .token_axes import COMPILED, check_token_axes, find_token_axes
from .verify import check_by_few_tokens, check_reached, verify_at_first_call

#: Gives a model's layers their methods anew.
Renew: TypeAlias = Callable[[AttentionState, Any], None]
_BROKEN_OFF = (
    "an earlier call on this KV cache was refused, or broke off, when some layers had written their keys to it and others had "
    "not, and cropping does not bring them together: give the whole text and a new cache, or this one emptied"
)
_REPLACED = (
    "config.longattn was changed after the method was put into the model; use hf_longattn.apply(model, ...) or "
    "hf_longattn.update(model, ...)"
)
_RECOMPUTED = (
    "a backward pass computes layers again (gradient checkpointing), and the model's method was changed since their forward "
    "pass: change it after backward()"
)


def find_pass(
    module: Any, mask: Tensor | None, handed: Tensor | None, traced: bool
) -> tuple[ForwardContext | None, LayerMethod, Tensor | None]:
    """The forward pass that a layer is called in, if there is one, the layer's method in it, and the call's position_ids.

    Args:
        mask: the layer's, which knows its pass where a backward pass computes the layer again.
        handed: the position_ids that the layer got: the model may have made them itself.

    Raises:
        ValueError: the module has no method, or config.longattn was replaced behind its back.
        RuntimeError: a backward pass computes the layer again, and the model runs another method than in the forward pass.
    """
    method: LayerMethod | None = module.__dict__.get("_longattn")  # as `method_of`; a call costs as much as a small product
    if method is not None and method.state.unverified and not traced and PASS.get() is None:
        method = _verified(module, method)
    if traced:
        forward_pass: ForwardContext | None = None if method is None else method.state.traced
    else:
        forward_pass = PASS.get()
        if forward_pass is None and mask is not None and (context := mask.__dict__.get("_longattn")) is not None:
            forward_pass = context.forward_pass
        if forward_pass is not None:
            if forward_pass.probed is not None:
                method = forward_pass.probed.get(module, method)
            if method is not None and method.config is not None:
                forward_pass.reached.add(module)
    if method is None:
        raise ValueError(
            f"attention {get_implementation(module.config)!r} applies to 0 layers here: {type(module).__name__} was never "
            "prepared for it. Put it into the model with hf_longattn.apply(model, ...), or with attn_implementation= on a "
            "causal language model"
        )
    # within a pass it was compared as that began
    if (traced or forward_pass is None) and method.whole_config is not raw_section(module.config):
        raise ValueError(_REPLACED)
    if (
        forward_pass is not None
        and forward_pass.frame is None  # it has ended: a backward pass computes the layer again
        and not traced
        and method.index >= 0
        and method.whole_config != forward_pass.whole_config
    ):
        raise RuntimeError(_RECOMPUTED)
    if forward_pass is None:  # a layer by itself, or one that is compiled by itself
        if not traced:
            refuse_stray_layer(module, method)
        return None, method, _given_outside() if traced and handed is None else handed
    # a layer knows better which axis is the text's, and DeepSpeed hands it the positions of a whole sequence
    given = forward_pass.positions
    if given is None or (handed is not None and (given.ndim != 2 or given.shape[-1] != handed.shape[-1])):
        given = handed
    return forward_pass, method, given


def _verified(module: Any, method: LayerMethod) -> LayerMethod | None:
    """A layer's method with its rotation verified, where a pass began with `model.forward`, which calls no hooks."""
    if (model := model_of(method.state)) is not None:
        verify_at_first_call(method.state, model)
    return method_of(module)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _given_outside() -> Tensor | None:
    """The position_ids of the pass around a layer that is compiled by itself, read outside of its graph."""
    return None if (forward_pass := current_pass()) is None else forward_pass.positions


def hook_passes(view: View, state: AttentionState, renew: Renew) -> None:
    """Let each forward pass from now on know what it was given, and run what the model runs as it begins."""
    state.remapped = any(method.rotary is not None for method in view.layer_methods)
    if not state.passes:
        inner = view.inner  # which may be called without the others
        parameters = list(inspect.signature(type(inner).forward).parameters)[1:]
        place = parameters.index("position_ids") if "position_ids" in parameters else len(parameters)
        before, behind = functools.partial(_begin, state, renew, place), functools.partial(_end, state)
        begin = inner.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        end = inner.register_forward_hook(behind, always_call=True)
        state.passes = begin, end


def _begin(state: AttentionState, renew: Renew, place: int, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    positions = kwargs.get("position_ids", args[place] if len(args) > place else None)
    weights, cache = bool(kwargs.get("output_attentions")), cache_in((*args, *kwargs.values()))
    if known_of(cache).get("uneven"):
        _refuse_broken_off(cache)
    if torch.compiler.is_compiling():
        if state.unverified:
            verify_at_first_call(state, model)
        if state.arrangement is not None and state.arrangement.runs_other_forwards and state.disabled is None:
            check_by_few_tokens(state, model)
        if state.remapped and state.disabled is None:
            if cache is not None and "axes" in known_of(cache):
                _refuse_pictures(cache)
            if positions is not None and positions.ndim > 2:
                assert_later((positions == positions[:1]).all(), COMPILED)
        state.traced = ForwardContext(None, None, positions, weights, cache)
        return
    outer = current_pass()
    held = 0 if cache is None else cache.get_seq_length() + 0  # a new tensor where it is one, which counts on
    forward_pass = ForwardContext(outer, state, positions, weights, cache, held, frame_above(2))
    if outer is not None and outer.state is state:  # a pass inside another
        forward_pass.probed = outer.probed
    else:
        own = vars(model)
        while True:  # as `at_gate`, in fewer calls
            whose = own.get("_longattn")
            gate = gate_of(whose or state)
            with gate.lock:  # a change comes to its end first
                there = own.get("_longattn")
                if there is not whose and gate_of(there or state) is not gate:
                    continue
                if there is None:
                    return  # it took the method out
                forward_pass.state = state = there
                _prepare(state, renew, model)
                forward_pass.thread = threading.get_ident()
                gate.let_in(forward_pass)
                break
    forward_pass.whole_config = state.whole_config
    state.claims.check()
    if "axes" in known_of(cache) or (positions is not None and positions.ndim > 2):
        find_token_axes(forward_pass, state.remapped and state.disabled is None)
        if forward_pass.axes is not None:
            check_token_axes(forward_pass, state, model)
    if cache is not None and (kept := state.rotated_keys.get(cache)) is not None:
        drop_other_keys(kept, cache)
    PASS.set(forward_pass)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_broken_off(cache: Cache) -> None:
    """Raise ValueError for a cache of which some layers hold more tokens than others, unless it was emptied."""
    if cache.get_seq_length():
        raise ValueError(_BROKEN_OFF)
    record_of(cache)["uneven"] = False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_pictures(cache: Cache) -> None:
    """Raise NotImplementedError for a cache of keys that are at several positions each, unless it was emptied."""
    if cache.get_seq_length():
        raise NotImplementedError(COMPILED)
    del record_of(cache)["axes"]


def _prepare(state: AttentionState, renew: Renew, model: Any) -> None:
    """Before a pass: the model's layers get their methods anew if they are others now, and its rotations are verified.

    Raises:
        ValueError: its configs do not say what it runs.
        RuntimeError: another package's attention would run.
    """
    arrangement = state.arrangement or state.arrange(View(model))
    if not arrangement.is_described:
        raise ValueError(_REPLACED)
    for config, _ in arrangement.described:
        refuse_taken(get_implementation(config))
    if not arrangement.is_current:
        renew(state, model)
    if state.unverified:
        verify_at_first_call(state, model)


def _end(state: AttentionState, model: Any, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        state.traced = None
        return
    forward_pass, frames = PASS.get(), (frame_above(1), frame_above(2))
    if forward_pass is None or forward_pass.frame not in frames:
        forward_pass = current_pass()
        if forward_pass is None or forward_pass.frame not in frames:
            return  # it raised before it began, or the hook came in its midst
    PASS.set(forward_pass.outer)
    if output is None and forward_pass.cache is not None and bool(forward_pass.cache.get_seq_length() != forward_pass.held):
        record_of(forward_pass.cache)["uneven"] = True  # it failed, and layers behind the one that did have written nothing
    cache = cache_in(values_of(output))  # None where the pass failed
    if cache is not None:
        record = record_of(cache)
        if forward_pass.after is not None:
            record["numbering"], record["ones"] = forward_pass.after, forward_pass.ones
        if forward_pass.axes is not None and forward_pass.axes.keys is not None:
            record["axes"] = forward_pass.axes.keys
    forward_pass.frame = forward_pass.cache = forward_pass.outer = None  # masks know the pass, and may outlive it
    forward_pass.layouts.clear()
    if output is not None and forward_pass.probed is None and state.disabled is None:
        check_reached(state, model, forward_pass.reached)
