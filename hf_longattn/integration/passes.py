"""Forward passes of a model: the state of each, from its first hook to its last, and finding it from a layer."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from ..config import LongAttnConfig
from ..core.tracing import assert_later, readable
from .caches import Numbering, cache_in, record_of, values_of
from .config_records import raw_section
from .gate import at_gate
from .internals import frame_above, get_implementation, is_compiled, is_running, modules_of
from .layers import View
from .rotated_key_cache import drop_other_keys
from .shared import model_of, refuse_abroad
from .state import AttentionState, LayerMethod, method_of

_AXES = "this call's tokens are at several positions each, as those of pictures are in a model with M-RoPE, and "
COMPILED = _AXES + "a remap of rotary distances reads them where nothing is compiled: call without torch.compile"
_UNDEFINED = (
    _AXES + "{name} is not defined for them: {why}. Texts with pictures are read as before where it changes nothing, here "
    "below position {near:.0f}, and this call reaches {position}; take rerope or leaky_rerope beyond"
)
_UNKNOWN_AXES = (
    _AXES + "a remap of rotary distances needs those of all {held} keys in the KV cache, of which {known} were read under it: "
    "fill the cache anew"
)
_ENDS = _AXES + "this one's position_ids do not continue where the KV cache ends: the positions of cached keys are unknown"
_SAY = _AXES + "this one, behind pictures in the KV cache, has no position_ids: pass them"
_OTHERWISE = (
    "position_ids are counted differently from those of the keys in the KV cache: some calls skip padding, as generate() does "
    "(attention_mask.cumsum(-1) - 1), others count it, as calls without position_ids do, or start elsewhere. Every call on "
    "one cache must count in the same way: pass position_ids to all of them"
)
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

_ANY: Numbering = (True, True, True)


@dataclass(eq=False)
class ForwardContext:
    """One forward pass.

    Args:
        outer: the pass that this one runs in.
        state: of the model; None while a graph is traced.
        positions: the position_ids of the innermost model: int64 (batch or 1, q_len), or (axes, batch, q_len).
        weights: the innermost model was asked for attention weights.
        cache: the model's KV cache.
        held: the number of tokens in the cache when the pass began.
        frame: the Python frame that runs the pass; None after its end.
        whole_config: what the model ran as the pass began.
        probed: methods that modules run in place of their own, where rotations are verified.
        axes: under a remap, the call's positions if tokens or cached keys have several each (M-RoPE): int64
            (axes, batch or 1, q_len); None: one each.
        of_keys: with `axes`, the positions of the cached keys, (axes, batch, keys), and, from the first layer on, of all keys.
        longest: with `axes`, the largest position on the first axis, and the number of tokens.
    """

    outer: ForwardContext | None
    state: AttentionState | None
    positions: Tensor | None = None
    weights: bool = False
    cache: Cache | None = None
    held: int | Tensor = 0
    frame: FrameType | None = None
    whole_config: LongAttnConfig | None = None
    probed: Mapping[nn.Module, LayerMethod] | None = None
    axes: Tensor | None = None
    of_keys: Tensor | None = None
    longest: tuple[int, int] = (0, 0)
    ones: int | None = None  # see `CacheRecord`
    after: Numbering | None = None  # the numbering of the keys in the cache after the pass
    kept: dict[Any, Any] = field(default_factory=dict)  # facts that `engines` keep for all layers
    thread: int = 0  # the identifier of the one that runs it

    @property
    def runs(self) -> bool:
        """True while the pass goes on: torch calls no hook behind an interrupt, nor one that was removed meanwhile."""
        return self.frame is not None and is_running(self.frame)

    @property
    def numbers_text(self) -> bool:
        """True: its position_ids have an axis of the text's own, before those that turn."""
        return self.positions is not None and self.positions.ndim > 2 and len(self.positions) > 3

    def unchanged(self, method: LayerMethod) -> bool:
        """Tell whether, in a pass with `axes`, a layer computes the same as without its method."""
        (near, few), (position, tokens) = method.limits, self.longest
        return position < near and tokens <= few

    def note(self, behind: Numbering, tokens: Numbering, sees_cache: bool) -> None:
        """Take note of how the tokens under one of its masks are numbered.

        Args:
            behind: the numbering of the tokens that come first behind cached keys.
            tokens: the numbering of all tokens.
            sees_cache: whether any token sees cached keys.

        Raises:
            ValueError: the cached keys were numbered otherwise.
        """
        known = record_of(self.cache).get("numbering", _ANY) if sees_cache and self.cache is not None else _ANY
        if sees_cache and not any(_both(known, behind)):
            raise ValueError(_OTHERWISE)
        self.after = _both(_both(known, tokens), self.after or _ANY)


def _both(one: Numbering, other: Numbering) -> Numbering:
    return one[0] and other[0], one[1] and other[1], one[2] and other[2]


_PASS: ContextVar[ForwardContext | None] = ContextVar("longattn_pass", default=None)


def current_pass() -> ForwardContext | None:
    """The forward pass that runs in this thread; None where layers are called by themselves, or again in a backward pass."""
    forward_pass = begun = _PASS.get()
    while forward_pass is not None and not forward_pass.runs:
        forward_pass = forward_pass.outer
    if forward_pass is not begun:
        _PASS.set(forward_pass)
    return forward_pass


class LayerCall(NamedTuple):
    """One layer's call of the attention function, but for its tensors.

    `more` holds the keyword arguments that `attention_forward` does not name.
    """

    module: Any
    method: LayerMethod
    forward_pass: ForwardContext | None
    positions: Tensor | None  # the call's position_ids
    traced: bool
    dropout: float
    scaling: float | None
    softcap: float | None
    sliding_window: int | None
    more: dict[str, Any]

    @property
    def weights(self) -> bool:
        """True: attention weights are asked for, of the layer or of the model, which may not tell its layers."""
        return bool(self.more.get("output_attentions")) or (self.forward_pass is not None and self.forward_pass.weights)

    @property
    def kept(self) -> dict[Any, Any]:
        """A dict that layers of its pass share."""
        return {} if self.forward_pass is None else self.forward_pass.kept


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
    if method is not None and method.state.unverified and not traced and _PASS.get() is None:
        method = _verified(module, method)
    if traced:
        forward_pass: ForwardContext | None = None if method is None else method.state.traced
    else:
        forward_pass = _PASS.get()
        if forward_pass is None and mask is not None and (context := mask.__dict__.get("_longattn")) is not None:
            forward_pass = context.forward_pass
        if forward_pass is not None and forward_pass.probed is not None:
            method = forward_pass.probed.get(module, method)
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
        and forward_pass.frame is None
        and not traced
        and method.index >= 0
        and method.whole_config != forward_pass.whole_config
    ):
        raise RuntimeError(_RECOMPUTED)
    if forward_pass is None:  # a layer by itself, or one that is compiled by itself
        if not traced:
            refuse_abroad(module, method)
        return forward_pass, method, _given_outside() if traced and handed is None else handed
    # a layer knows better which axis is the text's, and DeepSpeed hands it the positions of a whole sequence
    given = forward_pass.positions
    if given is None or (handed is not None and (given.ndim != 2 or given.shape[-1] != handed.shape[-1])):
        given = handed
    return forward_pass, method, given


def _verified(module: Any, method: LayerMethod) -> LayerMethod | None:
    """A layer's method with its rotation verified, where a pass began with `model.forward`, which calls no hooks."""
    if (model := model_of(method.state)) is not None:
        method.state.verify(model)
    return method_of(module)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _given_outside() -> Tensor | None:
    return None if (forward_pass := current_pass()) is None else forward_pass.positions


def hook_passes(view: View, state: AttentionState) -> None:
    """From now on each forward pass knows what it was given, and runs what the model does as it begins."""
    state.remapped = any(method.rotary is not None for method in view.layer_methods)
    if not state.passes:
        inner = view.inner  # which may be called without the others
        parameters = list(inspect.signature(type(inner).forward).parameters)[1:]
        place = parameters.index("position_ids") if "position_ids" in parameters else len(parameters)
        before, behind = functools.partial(_begin, state, place), functools.partial(_end, state)
        begin = inner.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        end = inner.register_forward_hook(behind, always_call=True)
        state.passes = begin, end


def _begin(state: AttentionState, place: int, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    positions = kwargs.get("position_ids", args[place] if len(args) > place else None)
    weights = bool(kwargs.get("output_attentions"))
    if torch.compiler.is_compiling():
        if state.remapped and state.disabled is None and positions is not None and positions.ndim > 2:
            assert_later((positions == positions[:1]).all(), COMPILED)
        state.traced = ForwardContext(None, None, positions, weights)
        return
    outer = current_pass()
    cache = cache_in((*args, *kwargs.values()))
    held = 0 if cache is None else cache.get_seq_length() + 0  # a new tensor where it is one, which counts on
    forward_pass = ForwardContext(outer, state, positions, weights, cache, held, frame_above(2))
    if outer is not None and outer.state is state:  # a pass inside another
        forward_pass.probed = outer.probed
    else:
        with at_gate(lambda: vars(model).get("_longattn") or state) as gate:  # a change comes to its end first
            if (there := vars(model).get("_longattn")) is None:
                return  # it took the method out
            forward_pass.state = state = there
            _prepare(state, model)
            forward_pass.thread = threading.get_ident()
            gate.let_in(forward_pass)
    forward_pass.whole_config = state.whole_config
    state.claims.check()
    if cache is not None and record_of(cache).get("uneven"):
        if held:
            raise ValueError(_BROKEN_OFF)
        record_of(cache)["uneven"] = False
    _find_token_axes(forward_pass, state.remapped and state.disabled is None)
    if forward_pass.axes is not None:
        _check_token_axes(forward_pass, state, model)
    if cache is not None and (kept := state.rotated_keys.get(cache)) is not None:
        drop_other_keys(kept, cache)
    _PASS.set(forward_pass)


def _prepare(state: AttentionState, model: Any) -> None:
    """Before a pass: the model's rotations are verified, and its layers are planned if they are others now.

    ValueError: its configs do not say what it runs.
    """
    if state.unverified:
        state.verify(model)
    arrangement = state.arrangement or state.arrange(View(model))
    if not arrangement.is_described:
        raise ValueError(_REPLACED)
    if not arrangement.is_current:
        state.renew(model)


def _end(state: AttentionState, model: Any, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        state.traced = None
        return
    forward_pass = current_pass()
    if forward_pass is None or forward_pass.frame not in (frame_above(1), frame_above(2)):
        return  # it raised before it began, or the hook came in its midst
    _PASS.set(forward_pass.outer)
    if output is None and forward_pass.cache is not None and bool(forward_pass.cache.get_seq_length() != forward_pass.held):
        record_of(forward_pass.cache)["uneven"] = True  # it failed, and layers behind the one that did have written nothing
    cache = cache_in(values_of(output))  # None where the pass failed
    if cache is not None and forward_pass.after is not None:
        record_of(cache).update({"numbering": forward_pass.after, "ones": forward_pass.ones})
    if cache is not None and forward_pass.axes is not None and forward_pass.of_keys is not None:
        record_of(cache)["axes"] = forward_pass.of_keys
    forward_pass.frame = forward_pass.cache = forward_pass.outer = None  # masks know the pass, and may outlive it


@contextmanager
def probing(state: AttentionState, methods: Mapping[nn.Module, LayerMethod]) -> Iterator[None]:
    """While open, this thread's calls of a model's layers run methods that the layers do not have."""
    forward_pass = ForwardContext(current_pass(), state, frame=frame_above(2), probed=methods)  # of the `with`
    token = _PASS.set(forward_pass)
    try:
        yield
    finally:
        _PASS.reset(token)


def is_probing() -> bool:
    """Tell whether this thread's pass is one of `probing`."""
    return (forward_pass := _PASS.get()) is not None and forward_pass.probed is not None


def _find_token_axes(forward_pass: ForwardContext, remapped: bool) -> None:
    """Find out whether tokens of a pass, or keys in its cache, are at several positions each.

    Raises:
        ValueError: keys in the cache are, and the positions of some are not known.
    """
    positions, cache = forward_pass.positions, forward_pass.cache
    known: Tensor | None = None if cache is None else record_of(cache).get("axes")
    differ = False
    if remapped and positions is not None and positions.ndim > 2 and readable(positions):
        differ = bool((positions != positions[:1]).any())
    if known is None and not differ:
        return
    held = int(forward_pass.held)
    if cache is not None and known is not None and known.shape[-1] > held:  # cropped since
        known = record_of(cache)["axes"] = known[..., :held]
    if not remapped:  # the keys that it writes are not known then
        return
    if known is not None and known.shape[-1] != held:
        raise ValueError(_UNKNOWN_AXES.format(held=held, known=known.shape[-1]))
    if positions is None:
        raise ValueError(_SAY)
    own = (positions if positions.ndim > 2 else positions[None])[-3:]  # of four the first numbers the text
    forward_pass.axes, forward_pass.of_keys = own.expand(3, -1, -1), known
    forward_pass.longest = int(own[0].max()), held + own.shape[-1]
    if known is not None and held:
        if bool((own[0, :, 0] > known.amax((0, 2)).to(own.device) + 1).any()):  # keys were thrown away
            raise ValueError(_ENDS)
        forward_pass.longest = max(forward_pass.longest[0], int(known[0].max())), forward_pass.longest[1]


def _check_token_axes(forward_pass: ForwardContext, state: AttentionState, model: Any) -> None:
    """Before a pass whose tokens are at several positions each: whether what a method changes in it is defined, and known.

    Raises:
        ValueError: a remap is not defined for such tokens, or how the model turns them is not understood.
        NotImplementedError: some of its layers are compiled, which see one position.
    """
    methods = [method for m in modules_of(model) if (method := method_of(m)) is not None and method.state is state]
    changed = [method for method in methods if method.rotary is not None and not forward_pass.unchanged(method)]
    for method in changed:
        remap = None if method.config is None else method.config.remap
        if remap is not None and remap.why_one_axis is not None:
            near, position = method.limits[0], forward_pass.longest[0]
            raise ValueError(_UNDEFINED.format(name=remap.name, why=remap.why_one_axis, near=near, position=position))
    if changed and any(map(is_compiled, modules_of(model))):
        raise NotImplementedError(COMPILED)
    sources = [method.rotary for method in changed if method.rotary is not None]
    if any(source.axis is None and not source.still for source in sources):
        state.find_axes(model, 4 if forward_pass.numbers_text else 3)


def carry_token_axes(original: Callable[..., Any], self: Cache, *args: Any, **kwargs: Any) -> Any:
    """Let the positions of a cache's keys go where these go, when its rows are reordered, repeated or selected."""
    out = original(self, *args, **kwargs)
    if (axes := record_of(self).get("axes")) is not None:
        given = args[0] if args else next(iter(kwargs.values()))
        if isinstance(given, int):
            record_of(self)["axes"] = axes.repeat_interleave(given, 1)
        else:
            record_of(self)["axes"] = axes[:, given.to(axes.device)]
    return out
