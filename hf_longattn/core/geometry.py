"""Which keys each query may see, and how far away they are: the only thing a kernel knows about positions.

A *cache index* counts the tokens in a row of the batch, padding included; the key in column j has the index `key_start + j`.
The distance of two tokens is the difference of their position_ids. Where these count as cache indices do (the usual case,
under padding, packing and any cache) indices serve; elsewhere rows carry explicit positions of queries and keys.

Rows are made on the host wherever it knows them: what follows from them is then found without waiting for a device, and
kernels get them by `AttentionLayout.on`. They are on the device where nothing may be read, or under masks of any form.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tracing import assert_later, readable, sent


class RowBounds(NamedTuple):
    """The columns of `AttentionLayout.index`: tensors (batch or 1, q_len), or numbers drawn from them."""

    query: Any  # the row's own cache index
    key_start: Any  # the cache index of key 0
    start: Any  # where the row's sequence starts
    low: Any  # the first visible cache index
    high: Any  # and the last

    def stacked(self) -> Tensor:
        """int64 (batch or 1, q_len, 5), `AttentionLayout.index`."""
        return torch.stack(torch.broadcast_tensors(*self)).movedim(0, -1)


#: More than any position: numbers the sequences of packed text apart.
FAR = 1 << 32


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """The rows of a pass: for every query the interval of cache indices that it sees.

    Args:
        index: int64 (batch or 1, q_len, 5), see `RowBounds`: key_start is the same in every row; high < low: fully masked.
        allowed: None, or a bool tensor (batch or 1, heads or 1, q_len or 1, kv_len), True = visible, on top
            of the interval.
        query_ids, key_ids: where positions do not count as cache indices do, those of queries, int64 (batch or 1, q_len), and
            of keys, (batch or 1, kv_len), from the start of each one's sequence. They never fall along it if no key is
            hidden by `allowed`, or `hides_tokens`.
        query_axes, key_axes: where tokens are rotated that have a position on each of several axes (M-RoPE), int64 (axes,
            batch or 1, q_len) and (axes, batch or 1, kv_len), from the start of each one's sequence. Intervals begin and end
            on the first axis, time; all else goes by indices and ids.
    """

    index: Tensor
    allowed: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    query_axes: Tensor | None = None
    key_axes: Tensor | None = None
    # what `once` keeps; init=False: `dataclasses.replace` begins with none, since other rows have other facts
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> AttentionLayout:
        """Move the rows to a device; one copy for all layers."""
        rows: AttentionLayout = self if self.index.device == device else self.once(device, lambda: self._moved(device))
        return rows

    def _moved(self, device: torch.device) -> AttentionLayout:
        names = ("allowed", "query_ids", "key_ids", "query_axes", "key_axes")
        moved: dict[str, Any] = {n: None if (x := getattr(self, n)) is None else sent(x, device) for n in names}
        copy = AttentionLayout(sent(self.index.contiguous(), device), **moved)  # as kernels read it
        copy._known["host"] = weakref.ref(self)  # weakly, since these rows keep their copy
        return copy

    def int32_index(self, device: torch.device) -> Tensor:
        """`index` on a device as kernels read it: int32, contiguous."""
        index: Tensor = self.once((device, "int32"), lambda: sent(self.index.to(torch.int32).contiguous(), device))
        return index

    @property
    def host(self) -> AttentionLayout:
        """The rows as the host made them, of which these are a copy; else themselves."""
        host: AttentionLayout | None = self._known["host"]() if "host" in self._known else None
        return self if host is None else host

    @property
    def bounds(self) -> RowBounds:
        """`index` by name, each (batch or 1, q_len)."""
        known: RowBounds = self.once("bounds", lambda: RowBounds(*self.index.unbind(-1)))
        return known

    @property
    def hides_tokens(self) -> bool:
        """True if queries and keys are the same tokens and `allowed` hides some from all of them."""
        return self.allowed is not None and self.allowed.shape[-2] == 1 and self.allowed.shape[-1] == self.index.shape[1]

    def simplified(self, kv_len: int) -> AttentionLayout:
        """Drop a mask that hides no more than the intervals, and positions that count as indices do.

        For rows that were made where nothing could be read; reads the device.
        """
        if not self.hides_tokens:
            return self
        simple = AttentionLayout(self.index)
        if not bool((self.count(kv_len) == simple.count(kv_len)).all()):
            return self
        if self.query_ids is not None and self.key_ids is not None:
            _, _, _, low, high = self.bounds
            rows, index = low <= high, self.key_indices(kv_len)[:, 0]
            first, last = (low.where(rows, FAR).amin(-1, True), high.where(rows, -1).amax(-1, True))
            queries = (self.query_ids == simple.query_positions()) | ~rows
            keys = (self.key_ids == simple.key_positions(kv_len)) | (index < first) | (index > last)
            if not bool(queries.all() & keys.all()):
                return simple.at(self.query_ids, self.key_ids)
        return simple

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """make(), kept with the rows: every layer of a forward pass gets the same ones."""
        if torch.compiler.is_compiling():
            return make()
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    @classmethod
    def causal(cls, q_len: int, kv_len: int, query_start: int | None, key_start: int, device: torch.device) -> AttentionLayout:
        """Every key up to the query's own index; query_start defaults to key_start + kv_len - q_len."""
        if query_start is None:
            query_start = key_start + kv_len - q_len
        position = torch.arange(query_start, query_start + q_len, device=device)
        start = torch.full_like(position, key_start)
        rows = cls(RowBounds(position, start, start, start, position).stacked()[None])
        if key_start - q_len <= query_start <= key_start + kv_len:
            return rows
        # lengths do not bound the distances across a gap; explicit positions do
        return rows.at(rows.query_positions(), rows.key_positions(kv_len))

    @classmethod
    def of_row(cls, row: RowBounds) -> AttentionLayout:
        """One row, given by numbers, that all texts share; on the host."""
        rows = cls(torch.tensor([[list(row)]], device="cpu"))
        rows._known["row"] = row
        return rows

    @property
    def row(self) -> RowBounds | None:
        """The bounds of the only row, as numbers; None: there are several, of several texts perhaps, or more than bounds tells
        of them. Reads the device, once.
        """
        if self.index.shape[:2] != (1, 1) or self.allowed is not None or self.key_ids is not None or self.key_axes is not None:
            return None
        found: RowBounds = self.once("row", lambda: RowBounds(*self.index[0, 0].tolist()))
        return found

    def at(self, query_ids: Tensor, key_ids: Tensor) -> AttentionLayout:
        """Give the rows explicit positions, int64 (batch or 1, q_len) and (batch or 1, kv_len)."""
        batch = max(self.index.shape[0], query_ids.shape[0], key_ids.shape[0])
        return dataclasses.replace(self, index=self.index.expand(batch, -1, -1), query_ids=query_ids, key_ids=key_ids)

    def by_axis(self, query_axes: Tensor, key_axes: Tensor) -> AttentionLayout:
        """Give the rows' tokens several positions each; reads the device."""
        batch, kv_len = max(self.index.shape[0], query_axes.shape[1], key_axes.shape[1]), key_axes.shape[2]
        index = self.index.expand(batch, -1, -1)
        rows = dataclasses.replace(self, index=index, query_axes=query_axes, key_axes=key_axes)
        index, first, time = rows.key_indices(kv_len)[:, 0], rows.key_starts(kv_len).expand(-1, kv_len), key_axes[0]
        inside = (index >= first) & (index <= rows.bounds.high.amax(-1, keepdim=True))
        falls = (time.diff() < 0) & inside[:, 1:] & inside[:, :-1] & (first.diff() == 0)
        # where positions fall, an interval of them is none of indices
        return rows.masked(rows.visible(kv_len)) if bool(falls.any()) else rows

    def masked(self, allowed: Tensor) -> AttentionLayout:
        """Put the rows under one more mask, bool, broadcastable to (batch, heads, q_len, kv_len)."""
        allowed = allowed if self.allowed is None else self.allowed & allowed
        return dataclasses.replace(self, allowed=allowed)

    @functools.cached_property
    def span(self) -> int:
        """A bound on the distances between explicit positions; reads the device."""
        assert self.query_ids is not None
        assert self.key_ids is not None
        ids = torch.cat([self.query_ids.flatten(), self.key_ids.flatten()])
        return int(ids.max() - ids.min())

    def farthest(self, kv_len: int) -> int:
        """A bound on the distances between queries and keys; reads the device only where positions are explicit."""
        if self.key_ids is not None and readable(self.index):
            return self.span
        if self.key_ids is not None or self.host.index.device.type != "cpu":
            return kv_len + self.index.shape[1] - 1
        known: int = self.host.once(("farthest", kv_len), lambda: self.host._farthest(kv_len))
        return known

    def _farthest(self, kv_len: int) -> int:
        before = self.bounds.query - self.bounds.key_start  # keys
        return max(int(before.amax()), kv_len - 1 - int(before.amin()))

    @functools.cached_property
    def extent(self) -> int:
        """A number of tokens that the longest text has: more than each position, and than each row sees; reads the device."""
        if self.query_ids is not None and self.key_ids is not None:
            return 1 + int(torch.maximum(self.query_ids.amax(), self.key_ids.amax()))
        if (row := self.row) is not None:
            return 1 + max(row.query, row.high) - row.start  # type: ignore[no-any-return]
        query, _, start, _, high = self.bounds
        return 1 + int((torch.maximum(query, high) - start).amax())

    @property
    def causal_columns(self) -> slice | None:
        """The columns of keys over which the rows are a causal triangle: as many rows as columns, or one that sees all.

        None for anything else, and where nothing may be read.
        """
        host = self.host
        return host._causal_columns if host.allowed is None and readable(host.index) else None

    @functools.cached_property  # which Dynamo cannot trace on Python 3.11
    def _causal_columns(self) -> slice | None:
        position, key_start, _, low, high = self.index.to("cpu").unbind(-1)
        first, last, q_len = int(low[0, 0]), int(high[0, -1]), low.shape[1]
        triangle = torch.arange(last - q_len + 1, last + 1, device="cpu")
        if not ((low == first).all() and (high == triangle).all() and (position == triangle).all()):
            return None
        begin = int(key_start[0, 0])
        return slice(first - begin, last + 1 - begin) if q_len in (1, last - first + 1) and first <= last else None

    def query_places(self) -> Tensor:
        """The places that queries are rotated for: `query_axes`, or `query_positions` where each has one."""
        return self.query_positions() if self.query_axes is None else self.query_axes

    def key_places(self, kv_len: int) -> Tensor:
        """The places that keys are rotated for: `key_axes`, or `key_positions` where each has one."""
        return self.key_positions(kv_len) if self.key_axes is None else self.key_axes

    def query_positions(self) -> Tensor:
        """Query positions counted from the start of each row's sequence, int64 (batch or 1, q_len), >= 0; of several, time."""
        if self.query_axes is not None:
            return self.query_axes[0]
        if self.query_ids is not None:
            return self.query_ids
        return (self.bounds.query - self.bounds.start).clamp(min=0)

    def key_positions(self, kv_len: int) -> Tensor:
        """Key positions counted likewise, int64 (batch or 1, kv_len)."""
        if self.key_axes is not None:
            return self.key_axes[0]
        if self.key_ids is not None:
            return self.key_ids
        return (self.key_indices(kv_len)[:, 0] - self.key_starts(kv_len)).clamp(min=0)

    def key_starts(self, kv_len: int) -> Tensor:
        """The index where each key's sequence starts, (batch or 1, kv_len or 1).

        Rows of one batch entry start together, except in packed text, where queries and keys are the same tokens.
        """
        start = self.bounds.start
        return start if self.index.shape[1] == kv_len else start[:, :1]

    def narrowed(self, first: Tensor | None, last: Tensor | None) -> AttentionLayout:
        """Only the keys at positions first .. last of each row's sequence, both (batch or 1, q_len) or no limit.

        Of whole rows alone: where positions are explicit, they are looked up among the keys that rows see.
        """
        if first is None and last is None:
            return self
        ids = self._ids
        if ids is not None and self.allowed is not None and not self.hides_tokens:  # they may fall: no interval
            own = ids[:, None, None]
            inside = [own >= first[:, None, :, None]] if first is not None else []
            inside += [own <= last[:, None, :, None]] if last is not None else []
            return self.masked(functools.reduce(torch.logical_and, inside))
        bounds = self.bounds
        if first is not None:
            bounds = bounds._replace(low=torch.maximum(bounds.low, self._index_of(first)))
        if last is not None:
            bounds = bounds._replace(high=torch.minimum(bounds.high, self._index_of(last + 1) - 1))
        return dataclasses.replace(self, index=bounds.stacked())

    @property
    def _ids(self) -> Tensor | None:
        """The keys' explicit positions by which intervals begin and end."""
        return self.key_ids if self.key_axes is None else self.key_axes[0]

    def _index_of(self, position: Tensor) -> Tensor:
        """The first cache index in each row's sequence whose position is at least `position`, both (batch or 1, q_len)."""
        start, high = self.bounds.start, self.bounds.high
        if (ids := self._ids) is None:
            return start + position
        kv_len = ids.shape[1]
        index, first = self.key_indices(kv_len)[:, 0], self.key_starts(kv_len)
        high = high if self.index.shape[1] == kv_len else high[:, -1:]
        own = torch.where(index < first, -1, torch.where(index > high, FAR - 1, ids))
        own, sought = first * FAR + own, start * FAR + position
        batch = max(own.shape[0], sought.shape[0])
        own, sought = (x.expand(batch, -1).contiguous() for x in (own, sought))
        return self.bounds.key_start + torch.searchsorted(own, sought)

    def key_indices(self, kv_len: int) -> Tensor:
        """The cache indices of the keys, (batch or 1, 1, kv_len)."""
        return self.bounds.key_start[:, :1, None] + torch.arange(kv_len, device=self.index.device)

    def visible(self, kv_len: int) -> Tensor:
        """bool (batch or 1, heads or 1, q_len, kv_len), True = the row may see the key, of the first kv_len."""
        index = self.key_indices(kv_len)
        inside = (index >= self.bounds.low[..., None]) & (index <= self.bounds.high[..., None])
        return inside[:, None] if self.allowed is None else inside[:, None] & self.allowed[..., :kv_len]

    def seen(self, kv_len: int) -> tuple[slice, slice] | None:
        """The rows from the first to the last that sees a key in its interval, and the columns from the first to the last that
        is seen; None: no row sees any. Reads the device, once.
        """
        found: tuple[slice, slice] | None = self.once(("seen", kv_len), lambda: self._seen(kv_len))
        return found

    def _seen(self, kv_len: int) -> tuple[slice, slice] | None:
        _, first, _, low, high = self.bounds
        low, high = (low - first).clamp(min=0), (high - first).clamp(max=kv_len - 1)
        seeing = low <= high
        rows = seeing.any(0).to(torch.uint8)
        begin, end = int(rows.argmax()), len(rows) - int(rows.flip(0).argmax())
        if not rows[begin]:
            return None
        return slice(begin, end), slice(int(low.where(seeing, kv_len).min()), int(high.where(seeing, -1).max()) + 1)

    def distance(self, kv_len: int, which: Tensor | slice = slice(None)) -> Tensor:
        """|query position - key position| of the rows `which`; int64 (batch or 1, rows, kv_len)."""
        if self.query_ids is not None and self.key_ids is not None:
            return (self.query_ids[:, which, None] - self.key_ids[:, None, :kv_len]).abs()
        return (self.bounds.query[:, which, None] - self.key_indices(kv_len)).abs()

    def real_rows(self, kv_len: int) -> Tensor:
        """bool (batch or 1, q_len), False where the row is padding, which does not see itself."""
        own, key_start, _, low, high = self.bounds
        real = (low <= own) & (own <= high)
        if self.allowed is not None:
            column = (own - key_start).clamp(0, kv_len - 1)[..., None]
            allowed = self.allowed.any(1)  # which take_along_dim would tie to one length while exporting
            batch, q_len = max(allowed.shape[0], column.shape[0]), column.shape[1]
            real = real & allowed.expand(batch, q_len, -1).gather(-1, column.expand(batch, -1, -1))[..., 0]
        return real

    def take(self, rows: Tensor) -> AttentionLayout:
        """Take some of the rows by their numbers, int64 (n,)."""
        allowed = self.allowed if self.allowed is None or self.allowed.shape[-2] == 1 else self.allowed[:, :, rows]
        ids, axes = (None if x is None else x[..., rows] for x in (self.query_ids, self.query_axes))
        return AttentionLayout(self.index[:, rows], allowed, ids, self.key_ids, axes, self.key_axes)

    def sinks(self, kv_len: int, count: int) -> Tensor:
        """bool (batch or 1, q_len, kv_len), True for the keys at the first `count` positions of the row's sequence."""
        if self.key_ids is not None:
            return (self.key_ids[:, None, :kv_len] < count).expand(-1, self.index.shape[1], -1)
        offset = self.key_indices(kv_len) - self.bounds.start[..., None]
        return (offset >= 0) & (offset < count)

    def count(self, kv_len: int) -> Tensor:
        """n_i, the number of keys that each row sees: int64 (batch or 1, heads or 1, q_len)."""
        if self.allowed is not None and not self.hides_tokens:
            return self.visible(kv_len).sum(-1)
        _, first, _, low, high = self.bounds
        low, high = torch.maximum(low, first), torch.minimum(high, first + kv_len - 1)
        if self.allowed is None:
            return (high - low + 1).clamp(min=0)[:, None]
        before = torch.nn.functional.pad(self.allowed[:, :, 0].cumsum(-1), (1, 0))  # visible keys before each column
        batch, heads = max(before.shape[0], low.shape[0]), before.shape[1]
        below, inside = (
            before.expand(batch, -1, -1).gather(-1, (x - first).clamp(0, kv_len)[:, None].expand(batch, heads, -1))
            for x in (low, high + 1)
        )
        return (inside - below).clamp(min=0)


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless query, key and value are (batch, heads, length, head_dim) and fit each other."""
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError("query, key and value must be (batch, heads, length, head_dim)")
    if not query.is_floating_point():
        raise ValueError(f"query, key and value must be of a floating-point dtype, got {query.dtype}")
    if query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1] or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit together"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads evenly")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")


def check_mask(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask with four dimensions; ValueError unless it is bool and broadcasts to (batch, heads, q_len, kv_len)."""
    if attention_mask is None:
        return None
    target = (*query.shape[:3], key.shape[2])
    if attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask must be bool (True = visible), got {attention_mask.dtype}")
    try:
        if torch.broadcast_shapes(attention_mask.shape, target) != torch.Size(target):
            raise RuntimeError
    except RuntimeError:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} does not broadcast to {target}") from None
    mask = attention_mask[(None,) * (4 - attention_mask.ndim)]
    return mask.expand(-1, -1, target[2], target[3])


def check_positions(position_ids: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The positions from the first one on; ValueError unless (batch or 1, length), growing, of the same queries and keys."""
    fits = position_ids.ndim == 2 and position_ids.shape[0] in (1, query.shape[0])
    if not fits or not position_ids.shape[1] == query.shape[2] == key.shape[2]:
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} must be (batch or 1, length) for queries and keys of that length, got "
            f"{query.shape[2]} and {key.shape[2]}"
        )
    if position_ids.dtype != torch.int64:
        raise ValueError(f"position_ids must be int64, got {position_ids.dtype}")
    grows = (position_ids.diff() > 0).all()
    if not readable(position_ids):
        assert_later(grows, "position_ids must grow from token to token")
    elif not grows:
        raise ValueError("position_ids must grow from token to token")
    return (position_ids - position_ids[:, :1]).to(query.device)
