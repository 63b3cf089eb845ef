"""How position_ids number the tokens of a call: as cache indices do, from the start of a text, or visible tokens alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.geometry import AttentionLayout, RowBounds
from .masks import ParsedMask

UNKNOWN = (
    "position_ids do not continue where the KV cache ends, or do not start at 0: the positions of cached keys are unknown. "
    "They are known where they count as cache indices do or, as generate() makes them, as attention_mask.cumsum(-1) - 1: let "
    "a text start at 0, which changes no distance, or pass all tokens in one call. Or the cache holds more tokens than the "
    "prompt: crop it (cache.crop) before the call, or give the whole text; this call has added to it, so fill a new one"
)
_AGAIN = (
    "position_ids start at 0 again behind the tokens in the KV cache, which would be read twice: pass the tokens that follow "
    "them, or all tokens without a cache. generate() reads the whole prompt where it is assisted, by a model or by prompt "
    "look-up: give it no filled cache. This call has added to it, so fill a new one"
)
_PADDED = (
    "the tokens in the KV cache end in padding, and position_ids do not continue from the last one before it: generate() "
    'counts on from the padding, and needs it on the left (tokenizer.padding_side = "left"). This call has added to the '
    "cache, so fill a new one"
)


def own_positions(parsed: ParsedMask, position_ids: Tensor) -> Tensor:
    """The positions of a call's queries, which may be some of its tokens, (batch or 1, q_len)."""
    index = parsed.rows.index
    if position_ids.shape[1] == index.shape[1]:
        return position_ids.to(index.device)
    query = parsed.rows.bounds.query
    column = (query - parsed.first).clamp(0, position_ids.shape[1] - 1)
    batch = max(len(column), len(position_ids))
    return position_ids.to(query.device).expand(batch, -1).gather(1, column.expand(batch, -1))


def _grown(x: Tensor) -> Tensor:
    """By how much each element of a row is more than the one before it, (batch, n); the first by 0.

    Of the same shape, since a graph of any length would tell n - 1 = 1 apart.
    """
    return x.diff(prepend=x[:, :1])


class Numbered:
    """The position_ids of a call beside its cache indices, from which follows how its tokens are numbered."""

    def __init__(self, parsed: ParsedMask, position_ids: Tensor, kv_len: int) -> None:
        rows, counted, first, _ = parsed
        index = rows.index
        batch = max(index.shape[0], position_ids.shape[0])
        index = index.expand(batch, -1, -1)
        self.rows, self.counted = rows, counted
        #: of each query, (batch, q_len): its position, its cache index, and the cache index where its sequence starts
        self.position = own_positions(parsed, position_ids).expand(batch, -1)
        self.cache_index, _, self.start, _, _ = RowBounds(*index.unbind(-1))
        #: whether a query is no padding, which may be at any position; (batch, 1), whether all queries are
        self.real = rows.real_rows(kv_len).expand(batch, -1)
        self.all_padding = ~self.real.any(-1, keepdim=True)
        #: the positions of all tokens of the call, (batch, tokens), and the cache index of the first, (batch, 1)
        self.tokens, self.first = position_ids.to(index.device).expand(batch, -1), first.expand(batch, -1)
        #: the cache indices of keys, (batch, kv_len)
        self.keys = rows.key_indices(kv_len)[:, 0].expand(batch, -1)
        which = self.real.int().argmax(-1, keepdim=True)
        #: of the first real token, (batch, 1): its position, that less its cache index, and where its sequence starts
        self.begins_at = self.position.gather(1, which)
        self.offset = self.begins_at - self.cache_index.gather(1, which)
        self.text_start = self.start.gather(1, which)
        #: whether that token is numbered by cache index, from the start of its text, or by visible tokens, (batch, 1)
        self.by_index, self.by_start = self.offset == 0, self.offset == -self.text_start
        self.by_count = torch.zeros_like(self.by_index)
        if counted is not None:
            column = (self.cache_index.gather(1, which) - self.keys[:, :1]).clamp(0, kv_len - 1)
            self.by_count = counted.expand(batch, -1).gather(1, column) == self.begins_at
        #: whether any token sees keys of earlier calls, (batch, 1)
        self.sees_cache = self._sees_cache()
        #: the position at which a query's sequence starts, at a token of this call or at a cached one, (batch, q_len)
        cached = torch.where(self.by_index, self.text_start, 0)
        inside = (self.start - self.first).clamp(0, self.tokens.shape[1] - 1)
        self.origin = torch.where(self.start >= self.first, self.tokens.gather(1, inside), cached)

    def _sees_cache(self) -> Tensor:
        if self.rows.allowed is None or self.rows.hides_tokens:
            low, high = self.rows.bounds.low, self.rows.bounds.high
            return ((low < self.first) & (low <= high) & self.real).any(-1, keepdim=True)
        earlier = self.rows.visible(self.keys.shape[1]).any(1) & (self.keys < self.first)[:, None]
        return (earlier.any(-1) & self.real).any(-1, keepdim=True)

    @property
    def known(self) -> Tensor:
        """True where the positions of all visible keys are known, (batch, 1)."""
        return self.by_index | self.by_start | self.by_count | self.all_padding | ~self.sees_cache

    @property
    def why_unknown(self) -> str:
        """The message of the error where rows are not `known`."""
        unknown, last = ~self.known, (self.first - self.keys[:, :1] - 1).clamp(min=0)
        if bool((unknown & (self.begins_at == 0)).any()):
            return _AGAIN
        visible = self.rows.visible(self.keys.shape[1]).any((1, 2)).expand(len(last), -1)
        return _PADDED if bool((unknown & ~visible.gather(1, last)).any()) else UNKNOWN

    @property
    def regular(self) -> Tensor:
        """True where all positions differ as cache indices do, (batch, 1)."""
        even = ((self.position - self.origin == self.cache_index - self.start) | ~self.real).all(-1, keepdim=True)
        return self.all_padding | (even & (self.by_index | self.by_start | ~self.sees_cache))

    @property
    def numbering_of_first(self) -> list[Tensor]:
        """The numbering of the tokens that come first behind cached keys, if any does, as bools on the device."""
        by_count = self.by_start if self.counted is None else self.by_count
        return [(fits | ~self.sees_cache).all() for fits in (self.by_index, self.by_start, by_count)]

    @property
    def numbering(self) -> list[Tensor]:
        """The numbering of all tokens, as bools on the device."""
        from_start = self.cache_index - self.start
        count = from_start
        if self.counted is not None:
            column = (self.cache_index - self.keys[:, :1]).clamp(0, self.keys.shape[1] - 1)
            count = self.counted.expand(len(column), -1).gather(1, column)
        return [((self.position == at) | ~self.real).all() for at in (self.cache_index, from_start, count)]

    @property
    def is_next(self) -> Tensor:
        """True where a query is the next token after the query before it, and neither is padding, (batch, q_len)."""
        return (_grown(self.cache_index) == 1) & self.real & (_grown(self.real.int()) == 0)

    @property
    def jumps(self) -> Tensor:
        """True where the next token starts a text, at a position beyond the next one, (batch, q_len)."""
        return self.is_next & (_grown(self.start) != 0) & (_grown(self.position) > 1)

    @property
    def goes_back(self) -> Tensor:
        """True where the next token of a text is at a position not beyond the one before, (batch, q_len)."""
        return self.is_next & (_grown(self.start) == 0) & (_grown(self.position) <= 0)

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
            keys = keys.where(self.real, 0).cummax(-1)[0]
        return self.rows.at((self.position - self.origin).clamp(min=0), keys)

    @property
    def falls(self) -> Tensor:
        """True where a token of a call without a cache stands not after all visible ones before it, (batch, q_len)."""
        p = (self.position - self.origin).where(self.real, -1)
        # [0] is .values, and what transformers' exporters put in place of cummax has no names
        before = torch.nn.functional.pad(p.cummax(-1)[0], (1, 0), value=-1)[:, : p.shape[1]]
        return (p <= before) & self.real
