"""Tokens at several positions each, as those of pictures in a model with M-RoPE, which a remap of rotary distances reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache

from ..core.geometry import AttentionLayout
from ..core.tracing import assert_later, readable
from .caches import CallNumbering, Numbering, record_of
from .forward_context import ForwardContext, TokenAxes
from .internals import is_compiled, modules_of
from .masks import ParsedMask
from .numbering import UNKNOWN, Numbered
from .state import AttentionState, method_of
from .verify import verify_axes

_AXES = "this call's tokens are at several positions each, as those of pictures are in a model with M-RoPE, and "
COMPILED = _AXES + "a remap of rotary distances reads them where nothing is compiled: call without torch.compile"
_UNDEFINED = (
    _AXES + "{name} is not defined for them: {why}. Texts with pictures are read as before where it changes nothing, here "
    "below position {near:.0f}, and this call reaches {position}; take rerope or leaky_rerope beyond"
)
_SOME_KEYS = (
    _AXES + "a remap of rotary distances needs those of all {held} keys in the KV cache, of which {known} were read under it: "
    "fill the cache anew"
)
_ENDS = _AXES + "this one's position_ids do not continue where the KV cache ends: the positions of cached keys are unknown"
_SAY = _AXES + "this one, behind pictures in the KV cache, has no position_ids: pass them"
_BEFORE = (
    "position_ids in a picture lie before those of the token with which its text starts, and a remap has no distance for "
    "them: put text before the picture, or take a method without a remap"
)
UNSEEN = (
    "the model's `forward` was run, or a layer by itself. This model does not tell its layers their position_ids, which are "
    "read where the model itself is called: call the model, model(...)"
)


def find_token_axes(forward_pass: ForwardContext, remapped: bool) -> None:
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
        raise ValueError(_SOME_KEYS.format(held=held, known=known.shape[-1]))
    if positions is None:
        raise ValueError(_SAY)
    own = (positions if positions.ndim > 2 else positions[None])[-3:]  # of four the first numbers the text
    forward_pass.axes = axes = TokenAxes(own.expand(3, -1, -1), known, int(own[0].max()), held + own.shape[-1])
    if known is not None and held:
        if bool((own[0, :, 0] > known.amax((0, 2)).to(own.device) + 1).any()):  # keys were thrown away
            raise ValueError(_ENDS)
        axes.last = max(axes.last, int(known[0].max()))


def check_token_axes(forward_pass: ForwardContext, state: AttentionState, model: Any) -> None:
    """Check, before a pass whose tokens are at several positions each, that what a method changes in it is defined, and known.

    Raises:
        ValueError: a remap is not defined for such tokens, or how the model turns them is not understood.
        NotImplementedError: some of its layers are compiled, which see one position.
    """
    methods = [method for m in modules_of(model) if (method := method_of(m)) is not None and method.state is state]
    changed = [method for method in methods if method.rotary is not None and not forward_pass.unchanged(method)]
    for method in changed:
        remap = None if method.config is None else method.config.remap
        if remap is not None and remap.why_not_by_axis is not None:
            assert forward_pass.axes is not None
            near, last = method.limits[0], forward_pass.axes.last
            raise ValueError(_UNDEFINED.format(name=remap.name, why=remap.why_not_by_axis, near=near, position=last))
    if changed and any(map(is_compiled, modules_of(model))):
        raise NotImplementedError(COMPILED)
    sources = [method.rotary for method in changed if method.rotary is not None]
    if any(source.axis is None and not source.still for source in sources):
        verify_axes(state, model, 4 if forward_pass.numbers_text else 3)


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


def by_axis(parsed: ParsedMask, rows: AttentionLayout, forward_pass: ForwardContext, kv_len: int) -> AttentionLayout:
    """The rows of a text with pictures, whose tokens are at several positions each; those of cached keys the pass knows."""
    axes = forward_pass.axes
    assert axes is not None
    held = axes.count - axes.tokens.shape[2]
    if axes.keys is None or axes.keys.shape[2] == held:
        known = _of_text(parsed, forward_pass, kv_len, held) if axes.keys is None else axes.keys
        batch = max(known.shape[1], axes.tokens.shape[1])
        axes.keys = torch.cat([x.expand(3, batch, -1).to(axes.tokens.device) for x in (known, axes.tokens)], -1)
    whole, index = axes.keys.to(rows.index.device), rows.bounds
    batch = max(whole.shape[1], len(rows.index))

    def at(which: Tensor) -> Tensor:  # (batch or 1, n)
        which = which.clamp(0, whole.shape[2] - 1).expand(batch, -1)
        return whole.expand(-1, batch, -1).gather(2, which.expand(len(whole), -1, -1))

    query = at(index.query) - at(index.start)[:1]
    key = at(rows.key_indices(kv_len)[:, 0]) - at(rows.key_starts(kv_len))[:1]
    if bool(((query < 0).any(0) & rows.real_rows(kv_len)).any()):
        raise ValueError(_BEFORE)
    return rows.by_axis(query.clamp(min=0), key.clamp(min=0))


def _of_text(parsed: ParsedMask, forward_pass: ForwardContext, kv_len: int, held: int) -> Tensor:
    """Return the positions of a text's cached keys before its first picture, (1, batch, keys)."""
    assert forward_pass.axes is not None
    call = Numbered(parsed, forward_pass.axes.tokens[0], kv_len)
    if bool((parsed.first != held).any()):
        raise ValueError(UNKNOWN)
    if not held:
        return call.keys[None, :, :0]
    if not bool(call.known.all()) or bool((call.keys[:, 0] != 0).any()):
        raise ValueError(UNKNOWN)
    first = cast("Numbering", tuple(torch.stack(call.numbering_of_first).tolist()))
    forward_pass.note(CallNumbering(first, (True, True, True), sees_cache=True))
    return call.cached[None, :, :held].clamp(min=0)


def one_axis(parsed: ParsedMask, position_ids: Tensor, kv_len: int, remapped: bool) -> Tensor:
    """The position_ids (batch or 1, tokens) of a model that may have several axes of them (M-RoPE).

    Four axes are those of text and three that turn. Of fewer the first counts where all agree and it continues the cache, on
    which a remap insists; in and behind pictures, whose tokens are at several positions each, tokens are counted.
    """
    if position_ids.ndim == 2:
        return position_ids
    first = position_ids[0]
    if position_ids.shape[0] > 3:
        return first
    agree = (position_ids == first).all()
    if remapped:  # pictures come as `ForwardContext.axes`, or not at all
        if not readable(position_ids):
            assert_later(agree, COMPILED)
        elif not bool(agree):
            raise ValueError(UNSEEN)
        return first
    agree = agree & Numbered(parsed, first, kv_len).known.all()
    counted = torch.arange(first.shape[-1], device=first.device) + parsed.first.to(first.device)
    return torch.where(agree, first, counted)
