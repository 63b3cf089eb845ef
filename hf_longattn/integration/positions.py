"""Distances are differences of position_ids, as the rotary encoding sees them; this is where the two are brought together.

Position_ids of the tokens of a call are known. Those of earlier tokens, whose keys come out of the KV cache, are not: they
count as cache indices do, from the first index or from the start of the text, or as the 2-D mask does (generate's
cumsum - 1, which skips padding inside a text). The call's own first token tells which; one that fits none is refused, and
so is one that fits otherwise than the calls before it did, of which the cache keeps a note.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from transformers import Cache

from ..attention.geometry import FAR, Columns, Rows
from ..attention.tracing import readable
from ..config import LongAttnConfig
from .masks import is_carrier

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
    "in one call"
)
_OTHERWISE = (
    "position_ids are counted differently from those of the keys in the KV cache: some calls skip padding, as generate() does "
    "(attention_mask.cumsum(-1) - 1), others count it, as calls without position_ids do, or start elsewhere. Every call on "
    "one cache must count in the same way: pass position_ids to all of them"
)
_SHARD = (
    "position_ids start at {off} although nothing comes before, and several processes run: this looks like one process's part "
    "of a sequence that context or sequence parallelism has split, and each part would attend to itself alone. hf_longattn "
    "does not support that; if the text is whole, let its position_ids start at 0, which changes no distance"
)
_TRACED = (
    "position_ids jump, go back, or do not continue the KV cache, which a compiled call cannot follow: call without compile"
)

#: How positions may count, and did in all calls so far: by cache index, from the start of the text, by visible tokens.
Numbering: TypeAlias = tuple[bool, bool, bool]
_ANY: Numbering = (True, True, True)


class _Found(NamedTuple):
    """How the tokens of a call are numbered: those that come first behind cached keys (if any does), and all of them."""

    behind: Numbering
    all: Numbering
    sees_cache: bool


#: The entry of a cache's __dict__ that says it of its keys.
_NOTE = "longattn_numbering"


@dataclass
class _Pass:
    """A forward pass: how the keys in the cache that it was given are numbered, and those of the cache that it leaves."""

    outer: _Pass | None
    cache: Cache | None
    after: Numbering | None = None

    def note(self, found: _Found) -> None:
        """What one of the masks of the pass showed. ValueError: the cached keys were numbered otherwise."""
        known = self.cache.__dict__.get(_NOTE, _ANY) if found.sees_cache and self.cache is not None else _ANY
        if found.sees_cache and not any(_both(known, found.behind)):
            raise ValueError(_OTHERWISE)
        self.after = _both(_both(known, found.all), self.after or _ANY)


def _both(one: Numbering, other: Numbering) -> Numbering:
    return one[0] and other[0], one[1] and other[1], one[2] and other[2]


_PASS: ContextVar[_Pass | None] = ContextVar("longattn_pass", default=None)


def begin_pass(cache: Cache | None) -> None:
    """A forward pass begins, of a model that was given this KV cache."""
    _PASS.set(_Pass(_PASS.get(), cache))


def end_pass(cache: Cache | None) -> None:
    """It ends, and returns this one; None where it failed, or has none."""
    if (now := _PASS.get()) is None:
        return
    _PASS.set(now.outer)
    if cache is not None and now.after is not None:
        cache.__dict__[_NOTE] = now.after


def with_positions(rows: Rows, counted: Tensor | None, mask: Tensor, position_ids: Tensor | None, kv_len: int) -> Rows:
    """The rows with the positions that position_ids say: the same ones where these count as cache indices do.

    Args:
        counted: (batch, kv_len), the positions of keys if they count visible tokens; None if that is as cache indices do.
        mask: the attention mask that the rows were read from; one of ours carries the answer from layer to layer.
        position_ids: (batch or 1, at least q_len), or None: nothing else than cache indices is known.

    Raises:
        ValueError: positions have no meaning, or those of cached keys are unknown.
    """
    if position_ids is None or position_ids.ndim != 2:
        return rows
    if not readable(rows.index):
        return _traced(rows, counted, position_ids, kv_len)
    if not is_carrier(mask):  # the user's own, who may write to it, or to position_ids, before the next call
        return _resolve(rows, counted, position_ids, kv_len)[0]
    kept: tuple[Tensor, Rows] | None = mask.__dict__.get("longattn_positions")
    if kept is None or kept[0] is not position_ids:
        out, found = _resolve(rows, counted, position_ids, kv_len)
        if (now := _PASS.get()) is not None:
            now.note(found)
        mask.__dict__["longattn_positions"] = kept = position_ids, out
    return kept[1]


class _Numbered:
    """What position_ids say about a call, as tensors: p, cache_index and start (batch, q_len), keys (batch, kv_len)."""

    def __init__(self, rows: Rows, counted: Tensor | None, position_ids: Tensor, kv_len: int) -> None:
        index = rows.index
        p = position_ids[:, -index.shape[1] :].to(index.device)
        batch = max(index.shape[0], p.shape[0])
        self.rows, self.counted, self.p = rows, counted, p.expand(batch, -1)
        index = index.expand(batch, -1, -1)
        self.cache_index, _, self.start, _, _ = Columns(*index.unbind(-1))
        self.first = self.cache_index[:, :1]
        self.keys = rows.key_indices(kv_len)[:, 0].expand(batch, -1)
        self.real = rows.tokens(kv_len).expand(batch, -1)  # padding may be at any position
        self.none_real = ~self.real.any(-1, keepdim=True)
        # the first token of the call that is none, and how far its position is from its cache index
        which = self.real.int().argmax(-1, keepdim=True)
        self.off = (self.p - self.cache_index).gather(1, which)
        self.lead = self.start.gather(1, which)
        self.by_index, self.by_start = self.off == 0, self.off == -self.lead
        self.by_count = torch.zeros_like(self.by_index)
        if counted is not None:
            column = (self.cache_index.gather(1, which) - self.keys[:, :1]).clamp(0, kv_len - 1)
            self.by_count = counted.expand(batch, -1).gather(1, column) == self.p.gather(1, which)
        self.sees_cache, self.origin = self._sees_cache(), self._origin()

    def _sees_cache(self) -> Tensor:
        """Whether a token sees keys of earlier calls, (batch, 1)."""
        if self.rows.allowed is None or self.rows.hides_tokens:
            low, high = self.rows.columns.low, self.rows.columns.high
            return ((low < self.first) & (low <= high) & self.real).any(-1, keepdim=True)
        earlier = self.rows.visible(self.keys.shape[1]).any(1) & (self.keys < self.first)[:, None]
        return (earlier.any(-1) & self.real).any(-1, keepdim=True)

    @property
    def known(self) -> Tensor:
        """Whether the positions of all visible keys are known, (batch, 1)."""
        return self.by_index | self.by_start | self.by_count | self.none_real | ~self.sees_cache

    @property
    def regular(self) -> Tensor:
        """Whether all positions differ as cache indices do, (batch, 1)."""
        even = ((self.p - self.origin == self.cache_index - self.start) | ~self.real).all(-1, keepdim=True)
        return self.none_real | (even & (self.by_index | self.by_start | ~self.sees_cache))

    @property
    def behind(self) -> list[Tensor]:
        """`_Found.behind`, unread."""
        by_count = self.by_start if self.counted is None else self.by_count
        return [(fits | ~self.sees_cache).all() for fits in (self.by_index, self.by_start, by_count)]

    @property
    def all(self) -> list[Tensor]:
        """`_Found.all`, unread."""
        from_start = self.cache_index - self.start
        count = from_start
        if self.counted is not None:
            column = (self.cache_index - self.keys[:, :1]).clamp(0, self.keys.shape[1] - 1)
            count = self.counted.expand(len(column), -1).gather(1, column)
        return [((self.p == at) | ~self.real).all() for at in (self.cache_index, from_start, count)]

    def _origin(self) -> Tensor:
        """The position at which each token's sequence starts, at a token of this call or at a cached one, (batch, q_len)."""
        cached = torch.where(self.by_index, self.lead, 0)
        inside = (self.start - self.first).clamp(0, self.p.shape[1] - 1)
        return torch.where(self.start >= self.first, self.p.gather(1, inside), cached)

    def explicit(self) -> Rows:
        """The rows with positions written out, counted from the start of each sequence."""
        counted = self.keys if self.counted is None else self.counted
        cached = torch.where(self.by_index, self.keys, torch.where(self.by_start, self.keys - self.lead, counted))
        own = (self.keys >= self.first) & (self.keys <= self.cache_index[:, -1:])
        column = (self.keys - self.first).clamp(0, self.p.shape[1] - 1)
        keys = torch.where(own, self.p.gather(1, column), cached)
        start = torch.where(own, self.origin.gather(1, column), self.origin[:, :1])
        keys = (keys - start).clamp(min=0)
        if self.rows.hides_tokens:  # hidden ones take the position before theirs: then they never fall
            keys = keys.where(self.real, 0).cummax(-1).values
        return self.rows.at((self.p - self.origin).clamp(min=0), keys)

    @property
    def falls(self) -> Tensor:
        """Whether a token of a call without a cache is at a position not after all visible ones before it, (batch, q_len)."""
        p = (self.p - self.origin).where(self.real, -1)
        before = torch.nn.functional.pad(p.cummax(-1).values, (1, 0), value=-1)[:, : p.shape[1]]
        return (p <= before) & self.real


def _resolve(rows: Rows, counted: Tensor | None, position_ids: Tensor, kv_len: int) -> tuple[Rows, _Found]:
    if rows.index.shape[1] == 1 and rows.allowed is None and not _several_processes():
        fits, index, start, sees_cache = _decoding(rows, position_ids)
        if fits:
            return rows, _Found((index, start, start), (index, start, start), sees_cache)
    call = _Numbered(rows, counted, position_ids, kv_len)
    step, pair = call.p.diff(), call.real[:, 1:] & call.real[:, :-1]
    same = call.start[:, 1:] == call.start[:, :-1]
    new_document = (step > 1) & pair & ~same if rows.allowed is None else pair[:, :0]
    whole = call.sees_cache | call.by_index | call.by_start | call.by_count | call.none_real | (not _several_processes())
    usual = call.regular.all() & whole.all() & ~new_document.any()  # read from the device at once, with what is noted
    usual, sees_cache, *found = torch.stack([usual, call.sees_cache.any(), *call.behind, *call.all]).tolist()
    if not usual:
        if bool(new_document.any()):
            raise ValueError(_JUMP)
        if not bool(whole.all()):
            raise ValueError(_SHARD.format(off=int(call.off.max())))
        if not bool(call.known.all()):
            raise ValueError(_UNKNOWN)
        rows = call.explicit()
        if bool(_goes_back(call, rows, kv_len).any()):
            raise ValueError(_RESET)
    return rows, _Found(cast("Numbering", tuple(found[:3])), cast("Numbering", tuple(found[3:])), sees_cache)


def _decoding(rows: Rows, position_ids: Tensor) -> list[bool]:
    """Of calls of one token, in few steps: whether it is numbered as may be, by cache index, from the start; and sees keys."""
    cache_index, _, start, low, high = rows.columns
    off = position_ids[:, -1:].to(cache_index.device) - cache_index
    padding = low > high
    by_index, by_start, alone = (off == 0) | padding, (off == -start) | padding, (low == cache_index) | padding
    read = [(by_index | by_start | alone).all(), by_index.all(), by_start.all(), (~alone).any()]
    return cast("list[bool]", torch.stack(read).tolist())


def _goes_back(call: _Numbered, out: Rows, kv_len: int) -> Tensor:
    """Where a token sees earlier ones at positions that are not before its own; `out`: the call's rows with positions."""
    rows = call.rows
    if rows.allowed is None:
        same = call.start[:, 1:] == call.start[:, :-1]
        return (call.p.diff() <= 0) & call.real[:, 1:] & call.real[:, :-1] & same
    if rows.hides_tokens:
        return call.falls
    assert out.query_ids is not None
    assert out.key_ids is not None
    earlier = rows.visible(kv_len).any(1) & (call.keys[:, None] < call.cache_index[..., None]) & call.real[..., None]
    return earlier & (out.key_ids[:, None] >= out.query_ids[..., None])


def _traced(rows: Rows, counted: Tensor | None, position_ids: Tensor, kv_len: int) -> Rows:
    """The same where no tensor may be read: explicit positions wherever the mask has holes, and a check while it runs."""
    call = _Numbered(rows, counted, position_ids, kv_len)
    fits = call.regular if rows.allowed is None else call.known
    torch._assert_async(fits.all() & ~call.falls.any() if rows.hides_tokens else fits.all(), _TRACED)
    return rows if rows.allowed is None else call.explicit()


def refuse_unknown_start(config: LongAttnConfig, rows: Rows, position_ids: Tensor | None) -> None:
    """Raise where a 4-D mask over a KV cache leaves open whether its first keys are padding or before a window."""
    sinks = config.logit_map is not None and config.logit_map.sink_tokens > 0
    if not (sinks or config.remap is not None) or torch.compiler.is_compiling():
        return
    cache_index, start = rows.columns.query, rows.columns.start
    from_cache = (
        torch.ones_like(start, dtype=torch.bool)
        if position_ids is None
        else position_ids[:, -cache_index.shape[1] :] == cache_index
    )
    late = from_cache & (start > 0) & rows.tokens(int(cache_index.max()) + 1)
    moves = (start != start[:, -1:]) | (cache_index.shape[1] == 1)  # padding stays where it is, a window goes on
    if bool((late & moves).any()):
        raise ValueError(
            f"{config.name} counts from the start of a text, and this 4-D mask over a KV cache does not show it: its first "
            "keys may be padding or lie before a window. Pass a 2-D mask, or position_ids that count visible tokens only"
        )


def _several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def ranks(visible: Tensor) -> Tensor:
    """How many visible keys lie before each, for masks whose rows agree on it; -FAR for a batch entry whose rows do not.

    Args:
        visible: bool (batch, q_len, kv_len).

    Returns:
        int64 (batch, kv_len).
    """
    rank = visible.cumsum(-1, dtype=torch.int32) - 1
    most = rank.masked_fill(~visible, -1).amax(1)
    least = rank.masked_fill(~visible, torch.iinfo(torch.int32).max).amin(1)
    agree = ((most == least) | (most < 0)).all(-1, keepdim=True)
    return torch.where(agree, most.long(), -FAR)
