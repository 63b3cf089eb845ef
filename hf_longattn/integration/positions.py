"""Distances are differences of position_ids, as the rotary encoding sees them; this is where the two are brought together.

Position_ids of the tokens of a call are known, as the model was given them: not all models hand them on to their layers.
Those of earlier tokens, whose keys come out of the KV cache, are not: they count as cache indices do, from the first index or
from the start of the text, or as the 2-D mask does (generate's cumsum - 1, which skips padding inside a text). The call's own
first token tells which; one that fits none is refused, and so is one that fits otherwise than the calls before it did, of
which the cache keeps a note.

`rows_under` is asked by each layer. It reads the mask (`masks.read_mask`), and `_with_positions` gives its rows the positions:
`_decoding` for one token in few steps, `_Numbered` beside cache indices for any call, `_traced` inside graphs, `_by_axis` for
pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..core.geometry import FAR, AttentionLayout, Columns
from ..core.kernels.kernel import FEW_QUERIES
from ..core.tracing import assert_later, readable, sent
from .caches import Numbering, record_of
from .masks import (
    BOTH_WAYS,
    MaskContext,
    ParsedMask,
    context_of,
    existing_context,
    is_layout_mask,
    read_mask,
    read_own_mask,
    shows_the_future,
)
from .passes import COMPILED, ForwardContext, LayerCall

_NO_MASK = "no attention mask arrived, so what each token sees and where it stands is unknown. "
_PARALLEL = "Context parallelism takes the mask away and sets is_causal; it is not supported"
_ALONE = (
    "A layer that is called by itself needs the mask that transformers' create_causal_mask makes. Where a model was called, "
    "it reads in both directions (is_decoder=False), and every method is one of causal attention; or it runs no method, and "
    "its layers are also those of one that does: give it layers of its own (copy.deepcopy)"
)
_UNSEEN = (
    "the model's `forward` was run, or a layer by itself. This model does not tell its layers their position_ids, which are "
    "read where the model itself is called: call the model, model(...)"
)
_JUMP = (
    "position_ids jump forward, and without a 2-D attention mask or a cache transformers reads that as the start of a new "
    "document. For one document with skipped positions pass attention_mask=torch.ones_like(input_ids) and use_cache=False; "
    "packed documents each count from 0"
)
_RESET = (
    "position_ids go back within a sequence, so that a token sees earlier ones at positions not before its own. If these are "
    "packed documents, they see each other: transformers tells them apart only with use_cache=False and no 2-D attention mask"
    ", and never in models that make their masks without position_ids (gpt-oss): give each document a row of its own there"
)
_UNKNOWN = (
    "position_ids do not continue where the KV cache ends: the positions of cached keys are unknown. They are known where "
    "they count as cache indices do or, as generate() makes them, as attention_mask.cumsum(-1) - 1; otherwise pass all tokens "
    "in one call. Or the cache holds more tokens than the prompt: crop it (cache.crop) before the call, or give the whole "
    "text; this call has added to it, so fill a new one"
)
_OWN_MASK = (
    "a 4-D mask over a KV cache does not show where a text starts, from which positions in and behind pictures are counted: "
    "pass a 2-D mask"
)
_BEFORE = (
    "position_ids in a picture lie before those of the token with which its text starts: a remap does not know such pictures"
)
_SHARD = (
    "position_ids start at {off} although nothing comes before, and several processes run: this looks like one process's part "
    "of a sequence that context or sequence parallelism has split, and each part would attend to itself alone. hf_longattn "
    "does not support that; if the text is whole, let its position_ids start at 0, which changes no distance"
)
_PACKED = (
    "cu_seq_lens or seq_idx tells packed documents apart, which flash attention reads, and the mask shows them as one text: "
    "each would see those before it. Pass position_ids that count from 0 in each document, as DataCollatorWithFlattening "
    "makes them, no attention mask, and use_cache=False"
)
_LATE = (
    "position_ids of an earlier call did not continue where its KV cache ended, and what was computed since is wrong: the "
    "positions of cached keys were unknown. On a GPU this is noticed a call later, since decoding does not wait for it"
)
_TRACED = (
    "position_ids jump, go back, or do not continue the KV cache, which a compiled call cannot follow: call without compile"
)


def rows_under(mask: Tensor | None, layer_call: LayerCall, q_len: int, kv_len: int) -> MaskContext:
    """Return the rows that a layer sees, in the context that it shares with layers called alike.

    Raises:
        NotImplementedError: there is no mask.
        ValueError: the mask or the positions have no meaning, or those of cached keys are unknown.
    """
    positions, method, forward_pass = layer_call.positions, layer_call.method, layer_call.forward_pass
    if mask is None:
        raise NotImplementedError(_NO_MASK + (_PARALLEL if layer_call.more.get("is_causal") else _ALONE))
    if positions is None and forward_pass is None and method.state.passes and not layer_call.traced:
        raise ValueError(_UNSEEN)
    context: MaskContext | None = None if layer_call.traced else existing_context(mask)
    if context is not None and context.rows is not None and context.kv_len == kv_len and context.positions is positions:
        return context
    remapped = method.state.remapped and (forward_pass is None or forward_pass.probed is None)
    if shows_the_future(mask):
        raise ValueError(BOTH_WAYS.format("is_decoder=False or a like flag: its mask shows later tokens"))
    if not is_layout_mask(mask):  # the user's own, who may write to it, or to position_ids, before the next call
        if not layer_call.traced:
            mask.__dict__["_longattn"] = MaskContext(forward_pass=forward_pass)
        seen = read_own_mask(mask, q_len, kv_len)
        if forward_pass is not None and forward_pass.axes is not None:
            if seen.counted is not None:
                raise ValueError(_OWN_MASK)
            return MaskContext().keep(_by_axis(seen, seen.rows, forward_pass, kv_len), positions, kv_len)
        rows = _with_positions(seen, positions, kv_len, remapped, forward_pass, own_mask=True)
        if seen.counted is not None and method.config is not None:
            refuse_unknown_start(method.config, rows, positions)
        return MaskContext().keep(rows, positions, kv_len)
    seen = read_mask(mask, kv_len)
    context = MaskContext() if layer_call.traced or not readable(mask) else context_of(mask)
    context.forward_pass, context.q_len = forward_pass, q_len
    known = context.rows is not None and context.positions is positions
    rows = (
        context.rows
        if known and context.rows is not None
        else _with_positions(seen, positions, kv_len, remapped, forward_pass)
    )
    if not layer_call.traced:
        _refuse_packed(rows, layer_call.more)
    return context.keep(rows, positions, kv_len)


def _refuse_packed(rows: AttentionLayout, more: Mapping[str, Any]) -> None:
    """ValueError: what an attention function is given tells documents apart that the mask does not."""
    ends, numbers = more.get("cu_seq_lens_q"), more.get("seq_idx")
    if numbers is not None:
        told = sum(len(row.unique()) for row in numbers)
    elif ends is not None:
        told = int((ends.diff() > 0).sum())
    else:
        return
    if told > sum(len(row.unique()) for row in rows.columns.start):
        raise ValueError(_PACKED)


def _with_positions(
    seen: ParsedMask,
    position_ids: Tensor | None,
    kv_len: int,
    remapped: bool,
    forward_pass: ForwardContext | None,
    own_mask: bool = False,
) -> AttentionLayout:
    """The rows with the positions that position_ids say: the same ones where these count as cache indices do.

    Args:
        seen: what was read off the mask.
        remapped: whether some layer remaps rotary distances, for which pictures cannot be counted as tokens.
        forward_pass: the pass that takes note of how its tokens are numbered.
        own_mask: whether the mask is the user's, who may draft a tree of tokens: the cache then keeps one path of it.
    """
    several = None if forward_pass is None or forward_pass.axes is None else forward_pass
    if several is not None and not several.numbers_text:
        return _by_axis(seen, seen.rows, several, kv_len)
    if position_ids is None:
        return seen.rows
    if position_ids.device != seen.rows.index.device and readable(position_ids):
        position_ids = _on_host(seen, position_ids, kv_len, forward_pass)
    position_ids = _one_axis(seen, position_ids, kv_len, remapped)
    if not readable(seen.rows.index):
        return _traced(seen, position_ids, kv_len)
    rows, first, tokens, sees_cache = _resolve(seen, position_ids, kv_len, forward_pass)
    if forward_pass is not None:
        forward_pass.note(first, first if own_mask and not any(tokens) else tokens, sees_cache)
    return rows if several is None else _by_axis(seen, rows, several, kv_len)


def _on_host(seen: ParsedMask, position_ids: Tensor, kv_len: int, forward_pass: ForwardContext | None) -> Tensor:
    """position_ids where the rows are: read, but for few tokens behind a cache, which are what continues it.

    That they are, the device confirms while the host goes on.
    """
    kept, rows = {} if forward_pass is None else forward_pass.kept, seen.rows
    given, known = kept.get("position_ids", (None, None))
    expected = _continued(seen, position_ids, kv_len, forward_pass)
    if given is position_ids and (expected is None or torch.equal(known, expected)):
        return known
    if expected is None:
        known = position_ids.to(rows.index.device)
    else:
        assert forward_pass is not None
        assert forward_pass.state is not None
        known, first = expected, int(expected[0, 0])
        shared = bool((expected == first).all())
        holds = (position_ids == (first if shared else sent(expected, position_ids.device))).all()
        forward_pass.state.claims.claim(holds, _LATE)
    kept["position_ids"] = position_ids, known
    return known


def _continued(seen: ParsedMask, position_ids: Tensor, kv_len: int, forward_pass: ForwardContext | None) -> Tensor | None:
    """The position_ids of few tokens that continue a cache as it was numbered, (batch, q_len); None: they may be any."""
    if (
        forward_pass is None
        or forward_pass.state is None
        or forward_pass.cache is None
        or forward_pass.axes is not None
        or _several_processes()
    ):
        return None
    rows, counted = seen.rows, seen.counted
    numbering, q_len = record_of(forward_pass.cache).get("numbering"), rows.index.shape[1]
    if not numbering or not any(numbering) or q_len > FEW_QUERIES or position_ids.shape[1:] != (q_len,):
        return None
    by_index, by_start, _ = numbering
    query, key_start, start, _, _ = rows.columns
    begins = record_of(forward_pass.cache).get("ones") is not None or bool((start >= seen.first).any())
    if begins or not bool(rows.tokens(kv_len).all()):
        return None
    if counted is None or by_index or by_start:
        return query if by_index else query - start
    return counted.gather(1, (query - key_start).expand(len(counted), -1))


def _from_zero(seen: ParsedMask, position_ids: Tensor, forward_pass: ForwardContext | None) -> Tensor:
    """The position_ids, but those of texts that begin behind an empty prompt, which generate() counts from 1, less 1."""
    held, ones = _from_one(seen, forward_pass)
    if forward_pass is None or not held:
        return position_ids
    at = seen.rows.columns
    if ones is None:
        begins = (at.query == at.start) & (at.start >= held) & (at.low <= at.high) & (_own(seen, position_ids) == 1)
        ones = int(at.start.where(begins, FAR).min())
        if ones == FAR:
            return position_ids
    forward_pass.ones = ones
    return position_ids - (at.start[:, -1:] >= ones).to(position_ids.device, position_ids.dtype)


def _from_one(seen: ParsedMask, forward_pass: ForwardContext | None) -> tuple[int, int | None]:
    """Return the number of tokens that a pass's cache held as it began, and from which on texts count from 1, if any do."""
    if forward_pass is None or forward_pass.cache is None:
        return 0, None
    # a static cache counts on the device
    held = forward_pass.held if isinstance(forward_pass.held, int) else int(seen.first.max())
    return held, None if not held else record_of(forward_pass.cache).get("ones")


def _by_axis(seen: ParsedMask, rows: AttentionLayout, forward_pass: ForwardContext, kv_len: int) -> AttentionLayout:
    """The rows of a text with pictures, whose tokens are at several positions each; those of cached keys the pass knows."""
    assert forward_pass.axes is not None
    held = forward_pass.longest[1] - forward_pass.axes.shape[2]
    if forward_pass.of_keys is None or forward_pass.of_keys.shape[2] == held:
        known = _of_text(seen, forward_pass, kv_len, held) if forward_pass.of_keys is None else forward_pass.of_keys
        batch = max(known.shape[1], forward_pass.axes.shape[1])
        forward_pass.of_keys = torch.cat(
            [x.expand(3, batch, -1).to(forward_pass.axes.device) for x in (known, forward_pass.axes)], -1
        )
    whole, index = forward_pass.of_keys.to(rows.index.device), rows.columns
    batch = max(whole.shape[1], len(rows.index))

    def at(which: Tensor) -> Tensor:  # (batch or 1, n)
        which = which.clamp(0, whole.shape[2] - 1).expand(batch, -1)
        return whole.expand(-1, batch, -1).gather(2, which.expand(len(whole), -1, -1))

    query = at(index.query) - at(index.start)[:1]
    key = at(rows.key_indices(kv_len)[:, 0]) - at(rows.key_starts(kv_len))[:1]
    if bool(((query < 0).any(0) & rows.tokens(kv_len)).any()):
        raise ValueError(_BEFORE)
    return rows.by_axis(query.clamp(min=0), key.clamp(min=0))


def _of_text(seen: ParsedMask, forward_pass: ForwardContext, kv_len: int, held: int) -> Tensor:
    """Return the positions of a text's cached keys before its first picture, (1, batch, keys)."""
    assert forward_pass.axes is not None
    call = _Numbered(seen, forward_pass.axes[0], kv_len)
    if bool((seen.first != held).any()):
        raise ValueError(_UNKNOWN)
    if not held:
        return call.keys[None, :, :0]
    if not bool(call.known.all()) or bool((call.keys[:, 0] != 0).any()):
        raise ValueError(_UNKNOWN)
    forward_pass.note(cast("Numbering", tuple(torch.stack(call.behind).tolist())), (True, True, True), True)
    return call.cached[None, :, :held].clamp(min=0)


def _one_axis(seen: ParsedMask, position_ids: Tensor, kv_len: int, remapped: bool) -> Tensor:
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
            raise ValueError(_UNSEEN)
        return first
    agree = agree & _Numbered(seen, first, kv_len).known.all()
    counted = torch.arange(first.shape[-1], device=first.device) + seen.first.to(first.device)
    return torch.where(agree, first, counted)


def _own(seen: ParsedMask, position_ids: Tensor) -> Tensor:
    """The positions of a call's queries, which may be some of its tokens, (batch or 1, q_len)."""
    query = seen.rows.columns.query
    if position_ids.shape[1] == query.shape[1]:
        return position_ids.to(query.device)
    column = (query - seen.first).clamp(0, position_ids.shape[1] - 1)
    batch = max(len(column), len(position_ids))
    return position_ids.to(query.device).expand(batch, -1).gather(1, column.expand(batch, -1))


class _Numbered:
    """The position_ids of a call beside its cache indices, from which follows how its tokens are numbered.

    Of each query, (batch, q_len): its position and cache_index; start, the cache index where its sequence starts; origin, the
    position there; real, whether it is no padding. Of the first real token, (batch, 1): offset, its position less its cache
    index; text_start, its start; by_index, by_start, by_count, whether it is numbered so. keys: the cache indices of keys,
    (batch, kv_len); first: that of the call's first token, (batch, 1).
    """

    def __init__(self, seen: ParsedMask, position_ids: Tensor, kv_len: int) -> None:
        rows, counted, first = seen
        index = rows.index
        batch = max(index.shape[0], position_ids.shape[0])
        self.rows, self.counted, self.position = rows, counted, _own(seen, position_ids).expand(batch, -1)
        self.tokens = position_ids.to(index.device).expand(batch, -1)  # of the whole call
        index = index.expand(batch, -1, -1)
        self.cache_index, _, self.start, _, _ = Columns(*index.unbind(-1))
        self.first = first.expand(batch, -1)
        self.keys = rows.key_indices(kv_len)[:, 0].expand(batch, -1)
        self.real = rows.tokens(kv_len).expand(batch, -1)  # padding may be at any position
        self.all_padding = ~self.real.any(-1, keepdim=True)
        which = self.real.int().argmax(-1, keepdim=True)  # the first real token
        self.offset = (self.position - self.cache_index).gather(1, which)
        self.text_start = self.start.gather(1, which)
        self.by_index, self.by_start = self.offset == 0, self.offset == -self.text_start
        self.by_count = torch.zeros_like(self.by_index)
        if counted is not None:
            column = (self.cache_index.gather(1, which) - self.keys[:, :1]).clamp(0, kv_len - 1)
            self.by_count = counted.expand(batch, -1).gather(1, column) == self.position.gather(1, which)
        self.sees_cache, self.origin = self._sees_cache(), self._origin()

    def _sees_cache(self) -> Tensor:
        """True where a token sees keys of earlier calls, (batch, 1)."""
        if self.rows.allowed is None or self.rows.hides_tokens:
            low, high = self.rows.columns.low, self.rows.columns.high
            return ((low < self.first) & (low <= high) & self.real).any(-1, keepdim=True)
        earlier = self.rows.visible(self.keys.shape[1]).any(1) & (self.keys < self.first)[:, None]
        return (earlier.any(-1) & self.real).any(-1, keepdim=True)

    @property
    def known(self) -> Tensor:
        """True where the positions of all visible keys are known, (batch, 1)."""
        return self.by_index | self.by_start | self.by_count | self.all_padding | ~self.sees_cache

    @property
    def regular(self) -> Tensor:
        """True where all positions differ as cache indices do, (batch, 1)."""
        even = ((self.position - self.origin == self.cache_index - self.start) | ~self.real).all(-1, keepdim=True)
        return self.all_padding | (even & (self.by_index | self.by_start | ~self.sees_cache))

    @property
    def behind(self) -> list[Tensor]:
        """The numbering of the tokens that come first behind cached keys, if any does, as bools on the device."""
        by_count = self.by_start if self.counted is None else self.by_count
        return [(fits | ~self.sees_cache).all() for fits in (self.by_index, self.by_start, by_count)]

    @property
    def all(self) -> list[Tensor]:
        """The numbering of all tokens, as bools on the device."""
        from_start = self.cache_index - self.start
        count = from_start
        if self.counted is not None:
            column = (self.cache_index - self.keys[:, :1]).clamp(0, self.keys.shape[1] - 1)
            count = self.counted.expand(len(column), -1).gather(1, column)
        return [((self.position == at) | ~self.real).all() for at in (self.cache_index, from_start, count)]

    @property
    def next(self) -> Tensor:
        """True where a row is that of the next token after the row before, (batch, q_len - 1)."""
        return self.cache_index.diff() == 1

    def _origin(self) -> Tensor:
        """The position at which each token's sequence starts, at a token of this call or at a cached one, (batch, q_len)."""
        cached = torch.where(self.by_index, self.text_start, 0)
        inside = (self.start - self.first).clamp(0, self.tokens.shape[1] - 1)
        return torch.where(self.start >= self.first, self.tokens.gather(1, inside), cached)

    @property
    def cached(self) -> Tensor:
        """The positions of keys that are in the cache, (batch, kv_len)."""
        counted = self.keys if self.counted is None else self.counted
        return torch.where(self.by_index, self.keys, torch.where(self.by_start, self.keys - self.text_start, counted))

    def explicit(self) -> AttentionLayout:
        """The rows with positions written out, counted from the start of each sequence."""
        tokens = self.tokens.shape[1]
        own = (self.keys >= self.first) & (self.keys < self.first + tokens)
        column = (self.keys - self.first).clamp(0, tokens - 1)
        keys = torch.where(own, self.tokens.gather(1, column), self.cached)
        if tokens == self.position.shape[1]:
            row = torch.where(own, column, 0)
        else:  # of the rows that are left, the last one whose sequence starts no later
            row = (torch.searchsorted(self.start.contiguous(), self.keys.contiguous(), right=True) - 1).clamp(min=0)
        start = self.origin.gather(1, row)
        keys = (keys - start).clamp(min=0)
        if self.rows.hides_tokens:  # hidden ones take the position before theirs: then they never fall
            keys = keys.where(self.real, 0).cummax(-1).values
        return self.rows.at((self.position - self.origin).clamp(min=0), keys)

    @property
    def falls(self) -> Tensor:
        """True where a token of a call without a cache stands not after all visible ones before it, (batch, q_len)."""
        p = (self.position - self.origin).where(self.real, -1)
        before = torch.nn.functional.pad(p.cummax(-1).values, (1, 0), value=-1)[:, : p.shape[1]]
        return (p <= before) & self.real


def _resolve(
    seen: ParsedMask, position_ids: Tensor, kv_len: int, forward_pass: ForwardContext | None
) -> tuple[AttentionLayout, Numbering, Numbering, bool]:
    """The rows with the call's positions; then what `ForwardContext.note` takes: the numbering of the tokens that come first
    behind cached keys, that of all tokens, and whether any sees cached keys.

    Raises:
        ValueError: the positions have no meaning, or those of cached keys are unknown.
    """
    rows = seen.rows
    one = rows.index.shape[1] == 1 and rows.allowed is None and not _several_processes()
    if one and (numbered := _decoding(seen, _own(seen, position_ids), forward_pass)) is not None:
        return rows, *numbered
    call = _Numbered(seen, _from_zero(seen, position_ids, forward_pass), kv_len)
    step, pair = call.position.diff(), call.next & call.real[:, 1:] & call.real[:, :-1]
    same = call.start[:, 1:] == call.start[:, :-1]
    new_document = (step > 1) & pair & ~same if rows.allowed is None else pair[:, :0]
    unsplit = call.sees_cache | call.by_index | call.by_start | call.by_count | call.all_padding | (not _several_processes())
    usual = call.regular.all() & unsplit.all() & ~new_document.any()  # read from the device at once, with what is noted
    usual, sees_cache, *found = torch.stack([usual, call.sees_cache.any(), *call.behind, *call.all]).tolist()
    if not usual:
        if bool(new_document.any()):
            raise ValueError(_JUMP)
        if not bool(unsplit.all()):
            raise ValueError(_SHARD.format(off=int(call.offset.max())))
        if not bool(call.known.all()):
            raise ValueError(_UNKNOWN)
        rows = call.explicit()
        if bool(_goes_back(call, rows, kv_len).any()):
            raise ValueError(_RESET)
    return rows, cast("Numbering", tuple(found[:3])), cast("Numbering", tuple(found[3:])), sees_cache


def _decoding(seen: ParsedMask, p: Tensor, forward_pass: ForwardContext | None) -> tuple[Numbering, Numbering, bool] | None:
    """What `_resolve` returns behind the rows, of calls of one token, in few steps; None: they are to be looked at closer.

    Args:
        p: the positions of the tokens, int64 (batch or 1, 1).
    """
    index, batch = seen.rows.index, max(len(seen.rows.index), len(p))
    read = torch.cat([index[:, 0].expand(batch, -1), p.expand(batch, -1)], -1).tolist()
    held, ones = _from_one(seen, forward_pass)
    if held and ones is None:
        ones = next((own for own, _, start, low, _, at in read if at == 1 and own == start == low >= held), None)
    if forward_pass is not None:
        forward_pass.ones = ones
    since = FAR if ones is None else ones
    real = [  # by cache index, from the start, sees no other key
        (at == own, at - (start >= since) == own - start, low == own) for own, _, start, low, high, at in read if low <= high
    ]
    if not all(map(any, real)):
        return None
    by_index, by_start, alone = (all(one[n] for one in real) for n in range(3))
    behind_index, behind_start = (all(one[n] or one[2] for one in real) for n in range(2))
    return (behind_index, behind_start, behind_start), (by_index, by_start, by_start), not alone


def _goes_back(call: _Numbered, out: AttentionLayout, kv_len: int) -> Tensor:
    """Mark tokens that see earlier ones at positions not before their own; `out`: the call's rows with positions."""
    rows = call.rows
    if rows.allowed is None:
        same = call.start[:, 1:] == call.start[:, :-1]
        return (call.position.diff() <= 0) & call.next & call.real[:, 1:] & call.real[:, :-1] & same
    if rows.hides_tokens:
        return call.falls
    assert out.query_ids is not None
    assert out.key_ids is not None
    earlier = rows.visible(kv_len).any(1) & (call.keys[:, None] < call.cache_index[..., None]) & call.real[..., None]
    return earlier & (out.key_ids[:, None] >= out.query_ids[..., None])


def _traced(seen: ParsedMask, position_ids: Tensor, kv_len: int) -> AttentionLayout:
    """Place rows where no tensor may be read: explicit positions where the mask has holes, and a check while it runs."""
    rows, call = seen.rows, _Numbered(seen, position_ids, kv_len)
    fits = call.regular if rows.allowed is None else call.known
    assert_later(fits.all() & ~call.falls.any() if rows.hides_tokens else fits.all(), _TRACED)
    return rows if rows.allowed is None else call.explicit()


def refuse_unknown_start(config: LongAttnConfig, rows: AttentionLayout, position_ids: Tensor | None) -> None:
    """Raise where a 4-D mask over a KV cache leaves open whether its first keys are padding or before a window."""
    sinks = config.logit_map is not None and config.logit_map.sink_tokens > 0
    if not (sinks or config.remap is not None) or torch.compiler.is_compiling():
        return
    cache_index, start = rows.columns.query, rows.columns.start
    from_cache = torch.ones_like(start, dtype=torch.bool)
    if position_ids is not None:  # of one axis or several
        from_cache = (position_ids[..., -start.shape[1] :] == cache_index).reshape(-1, *start.shape).all(0)
    late = from_cache & (start > 0) & rows.tokens(int(cache_index.max()) + 1)
    moves = (start != start[:, -1:]) | (cache_index.shape[1] == 1)  # padding stays where it is, a window goes on
    if bool((late & moves).any()):
        raise ValueError(
            f"{config.name} counts from the start of a text, and this 4-D mask over a KV cache does not show it: its first "
            "keys may be padding or lie before a window. Pass a 2-D mask, or position_ids that count visible tokens only"
        )


def _several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
