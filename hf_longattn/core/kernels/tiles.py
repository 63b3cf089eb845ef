"""The tiled kernel's blocks and tiles, forward and backward, in plain PyTorch: never a q_len x kv_len tensor.

Rows are worked off in blocks, and a block in tiles: itself, or in long texts ranges of its keys, joined by their logsumexps.
The backward pass computes each tile anew. Inside a block the query rows run backwards: then t = const - (row + column), and a
strided view of a 1-D table serves a whole tile. Rows with explicit positions look every distance up instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ..geometry import RowBounds
from .kernel import MASK_VALUE, KernelCall, without_denormals

#: Logits held at a time (elements, 4 bytes each): about what the caches of a small machine take.
BLOCK_ELEMENTS = 1 << 21
#: Columns of a tile where rows see more than WHOLE_COLUMNS: whole rows would leave a block too few of them.
TILE_COLUMNS, WHOLE_COLUMNS = 1 << 11, 1 << 13
#: Logits of whole rows that are held at a time where they are gone over several times: what a core's cache takes.
ROW_ELEMENTS = 1 << 19
#: Rows of a block of them at least, of all heads that share a key head: products of fewer are slow.
TEMPERED_ROWS = 64
#: Columns whose products in half precision are summed at a time.
HALF_COLUMNS = 1 << 11
#: A bias below this makes many probabilities denormal numbers (see `without_denormals`).
FALLS_TO = -64.0


#: Output, logsumexp and entropy of rows, (heads, group, rows, value_dim or 1); None: not asked for.
Sums: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
#: Gradients that tiles add to: of the call's keys and values, of a block's rows (heads, group, rows, head_dim or 1).
Gradients: TypeAlias = dict[str, Tensor]


class TiledCall:
    """A call in the dtype that it is computed in: what all its tiles share. Iterated over, its blocks.

    Args:
        half: probabilities are rounded to the values' dtype.
        temper: from the entropies of finished logits, (heads, group, rows), to a factor on them; each tile holds whole rows.
    """

    def __init__(self, call: KernelCall, half: bool = False, temper: Callable[[Tensor], Tensor] | None = None) -> None:
        self.call, self.spec, rows = call, call.spec, call.rows.simplified(call.key.shape[2])
        self.temper = temper
        query, key, value, gain, bias = call.query, call.key, call.value, call.spec.gain, call.spec.bias
        scales = (call.spec.row_scale, call.spec.bias_scale)
        self.batch, heads, self.q_len, self.head_dim = query.shape
        self.kv_heads, self.kv_len = key.shape[1:3]
        self.group = heads // self.kv_heads
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.query = self.grouped(query.to(self.dtype))
        self.key = key.to(self.dtype).contiguous()
        self.value = None if value is None else value.to(value.dtype if half else self.dtype).contiguous()
        self.row_scale, self.bias_scale = (None if x is None else self.grouped(x.to(self.dtype)[..., None]) for x in scales)
        index = rows.index.expand(self.batch, -1, -1)
        self.bounds, self.on_host = RowBounds(*index.unbind(-1)), index.to("cpu")
        self.allowed = None if rows.allowed is None else rows.allowed.expand(self.batch, -1, self.q_len, self.kv_len)
        bounds = RowBounds(*self.on_host.unbind(-1))
        self.key_start = int(bounds.key_start[0, 0])
        self.gain = self.bias = self.ids = None
        self.hides_future = False
        #: whether probabilities may be denormal numbers, on a CPU
        self.flushes = bias is not None and bias.device.type == "cpu" and bool((bias < FALLS_TO).any())
        if gain is not None and bias is not None and rows.query_ids is not None and rows.key_ids is not None:
            self.gain, self.bias = gain.to(self.dtype), bias.to(self.dtype)
            self.ids = rows.query_ids.expand(self.batch, -1), rows.key_ids.expand(self.batch, -1)
            top, bottom = (torch.maximum(*(x.amax(1) for x in self.ids)), torch.minimum(*(x.amin(1) for x in self.ids)))
            if (farthest := int((top - bottom).max())) >= gain.shape[-1]:
                raise ValueError(f"distance {farthest} lies beyond the tables' length {gain.shape[-1]}")
        elif gain is not None and bias is not None:
            position = bounds.query
            self.farthest = max(int(position.max()) - self.key_start, 0)
            last = int(position.min()) - self.key_start - self.kv_len
            if (farthest := max(self.farthest, -last - 1)) >= gain.shape[-1]:
                raise ValueError(f"distance {farthest} lies beyond the tables' length {gain.shape[-1]}")
            past, future = slice(max(last + 1, 0), self.farthest + 1), slice(1, max(-last, 1))
            self.gain, self.bias = (torch.cat([x[:, past].flip(1), x[:, future]], 1).to(self.dtype) for x in (gain, bias))
            # a factor below 1 would weaken MASK_VALUE
            hides = self.spec.bias_scale is None or bool((self.spec.bias_scale >= 1).all())
            if hides and not self.spec.sinks and bool((bounds.high == position).all()):
                self.bias[:, self.farthest + 1 :] = MASK_VALUE  # causality for free
                self.hides_future = True
        self.heads_at_once, self.rows_at_once, self.columns_at_once = self.sizes()
        self.buffers: dict[str, Tensor] = {}

    def sizes(self) -> tuple[int, int, int]:
        """Heads, rows and columns of a tile."""
        held, least = (BLOCK_ELEMENTS, 16) if self.temper is None else (ROW_ELEMENTS, max(TEMPERED_ROWS // self.group, 16))
        if self.kv_heads * self.group * self.q_len * self.kv_len <= held:
            return self.kv_heads, self.q_len, self.kv_len
        bounds = RowBounds(*self.on_host.unbind(-1))
        width = max(min(int((bounds.high - bounds.low).max()) + 1, self.kv_len), 1)
        columns = TILE_COLUMNS if width > WHOLE_COLUMNS and self.temper is None else self.kv_len
        width = min(width, columns)
        heads = min(self.kv_heads, 2 if self.group == 1 and self.temper is None else 1)
        rows = held // (heads * self.group * width)
        return heads, min(max(rows, least), 256, self.q_len), columns

    def grouped(self, x: Tensor) -> Tensor:
        """(batch, heads, q_len, d) as (batch, kv_heads, group, q_len, d)."""
        return x.unflatten(1, (self.kv_heads, self.group))

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numel = 1
        for n in shape:
            numel *= n
        if name not in self.buffers or self.buffers[name].numel() < numel:
            self.buffers[name] = self.query.new_empty(numel, dtype=dtype)
        return self.buffers[name][:numel].view(shape)

    def __iter__(self) -> Iterator[Tile]:
        """The blocks in which some row sees a key."""
        number = 0
        for b in range(self.batch):
            bounds = [_bounds(rows, self.kv_len) for rows in self.on_host[b].split(self.rows_at_once)]
            for h0 in range(0, self.kv_heads, self.heads_at_once):
                h = slice(h0, min(h0 + self.heads_at_once, self.kv_heads))
                for r0, own in zip(range(0, self.q_len, self.rows_at_once), bounds, strict=True):
                    r1 = min(r0 + self.rows_at_once, self.q_len)
                    least, most, *_ = own
                    c0 = max(least.low - self.key_start, 0)
                    c1 = min(most.high - self.key_start + 1, self.kv_len)
                    number += 1 + self.kv_len // self.columns_at_once  # one for each of its tiles
                    if c0 < c1:
                        yield Tile(self, number, b, h, r0, r1, c0, c1, own)

    def attend(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, logsumexp and entropy, as `kernel.Result` defines them; the logsumexp also of rows in tiles."""
        query, value, with_lse, with_entropy = self.call.query, self.value, self.call.with_lse, self.call.with_entropy
        shape = query.shape[:-1]
        out = query.new_zeros((0,) if value is None else (*shape, value.shape[-1]))
        lse = self.query.new_full(shape, float("-inf"))
        entropy = self.query.new_zeros(shape if with_entropy else (0,))
        for block in self:
            tiles = block.tiles()
            need_lse = with_lse or with_entropy or len(tiles) > 1
            sums = functools.reduce(_join, (tile.attend(need_lse, with_entropy) for tile in tiles))
            _, own_lse, own_entropy = sums
            if block.fully_masked and own_lse is not None:
                nothing = own_lse <= MASK_VALUE / 2
                own_lse.masked_fill_(nothing, float("-inf"))
                if own_entropy is not None:
                    own_entropy.masked_fill_(nothing, 0.0)
            for into, own in zip((out, lse[..., None], entropy[..., None]), sums, strict=True):
                if own is not None:
                    block.put(self.grouped(into), own)
        return out, lse, entropy

    def gradients(
        self,
        d_out: Tensor,
        d_lse: Tensor | None,
        d_entropy: Tensor | None,
        out: Tensor,
        lse: Tensor,
        entropy: Tensor,
        joint: bool = False,
    ) -> tuple[Tensor, ...]:
        """The gradients of query, key, value, row scale, bias scale, gain and bias, empty where the call has none.

        Args:
            joint: output and logsumexp are those over these keys and others.
        """
        query, key, value, shape = self.call.query, self.call.key, self.call.value, self.call.query.shape[:3]
        delta = self.query.new_zeros(shape)
        if value is not None:
            delta += (d_out.to(self.dtype) * out.to(self.dtype)).sum(-1)
        if d_lse is not None:
            delta -= d_lse.to(self.dtype)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # of a fully masked row: exp(MASK_VALUE) is 0
        by_row: dict[str, Tensor | None] = {"delta": delta[..., None], "lse": lse[..., None]}
        by_row["d_out"] = None if value is None else d_out
        if d_entropy is not None:
            by_row |= {"entropy": entropy[..., None], "d_entropy": d_entropy[..., None]}
        given = {name: self.grouped(x.to(self.dtype)) for name, x in by_row.items() if x is not None}
        d_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        d_key = torch.zeros_like(self.key)
        d_value = self.key.new_zeros(0) if self.value is None else torch.zeros_like(self.value)
        d_row_scale, d_bias_scale = (
            self.query.new_zeros(0 if x is None else shape) for x in (self.row_scale, self.bias_scale)
        )
        d_tables = {}
        if self.spec.learns and self.gain is not None and self.bias is not None:
            d_tables = {"gain": torch.zeros_like(self.gain), "bias": torch.zeros_like(self.bias)}
        for block in self:
            own = {name: block.rows(x) for name, x in given.items()}
            tiles = block.tiles()
            into: Gradients = {"key": d_key, "value": d_value, **d_tables}
            for name, d in (("query", self.head_dim), ("row_scale", 1), ("bias_scale", 1)):
                into[name] = self.query.new_zeros(*block.shape[:3], d)
            for tile in tiles:
                tile.gradient(into, whole=len(tiles) == 1 and not joint, **own)
            block.put(self.grouped(d_query), into["query"].mul_(self.spec.scaling))
            if self.row_scale is not None:
                block.put(self.grouped(d_row_scale[..., None]), into["row_scale"])
            if self.bias_scale is not None:
                block.put(self.grouped(d_bias_scale[..., None]), into["bias_scale"])
        by_distance = [self.by_distance(d_tables[name]) if d_tables else self.query.new_zeros(0) for name in ("gain", "bias")]
        d_value = d_value if value is None else d_value.to(value.dtype)
        return d_query, d_key.to(key.dtype), d_value, d_row_scale, d_bias_scale, *by_distance

    def by_distance(self, table: Tensor) -> Tensor:
        """A table as the call has it, from one as the tiles read it."""
        assert self.spec.gain is not None
        if self.ids is not None:
            return table
        t = (self.farthest - torch.arange(table.shape[1], device=table.device)).abs()
        return table.new_zeros(len(table), self.spec.gain.shape[-1]).index_add_(1, t, table)


#: Of the rows of a block: least and most of each column of `AttentionLayout.index`; the last row's cache index; whether one of
#: them at least is fully masked.
_Bounds: TypeAlias = tuple[RowBounds, RowBounds, int, bool]


def _bounds(rows: Tensor, kv_len: int) -> _Bounds:
    own = RowBounds(*rows.unbind(-1))
    least, most = (RowBounds(*x.tolist()) for x in rows.aminmax(dim=0))
    fully_masked = own.low.clamp(min=least.key_start) > own.high.clamp(max=least.key_start + kv_len - 1)
    return least, most, int(own.query[-1]), bool(fully_masked.any())


class Tile:
    """Some heads of one batch row, query rows r0:r1 (in reverse order), key columns c0:c1: a block, or a part of one."""

    def __init__(
        self, tiled: TiledCall, number: int, b: int, h: slice, r0: int, r1: int, c0: int, c1: int, bounds: _Bounds
    ) -> None:
        self.tiled, self.number, self.b, self.h = tiled, number, b, h
        self.r, self.c = slice(r0, r1), slice(c0, c1)
        self.shape = (h.stop - h.start, tiled.group, r1 - r0, c1 - c0)
        self.flat = (self.shape[0], self.shape[1] * self.shape[2])
        self.key = tiled.key[b, h, c0:c1]
        self.value = None if tiled.value is None else tiled.value[b, h, c0:c1]
        self.query = self.rows(tiled.query).mul_(tiled.spec.scaling).view(*self.flat, -1)
        self.bounds, (self.least, self.most, self.last, masked) = bounds, bounds
        self.fully_masked = masked or tiled.allowed is not None  # a row of it may see no key at all

    def rows(self, x: Tensor) -> Tensor:
        """This block's rows of a grouped tensor: (heads, group, rows, d), a reversed copy."""
        return x[self.b, self.h, :, self.r].flip(2).contiguous()

    def put(self, into: Tensor, x: Tensor) -> None:
        """Store the block's rows, (heads, group, rows, d) or with group and rows flattened, in a grouped tensor."""
        into[self.b, self.h, :, self.r] = x.view(*self.shape[:3], -1).flip(2)

    def table(self, table: Tensor) -> Tensor:
        """A table by distance as the block sees it, broadcastable to (heads, group, rows, columns)."""
        if self.tiled.ids is not None:
            own, keys = self.tiled.ids
            t = (own[self.b, self.r].flip(0)[:, None] - keys[self.b, self.c]).abs()
            own = table if table.shape[0] == 1 else table.unflatten(0, (-1, self.shape[1]))[self.h].flatten(0, 1)
            return own[:, t].unflatten(0, (-1, 1 if table.shape[0] == 1 else self.shape[1]))
        first = self.last - self.tiled.key_start - self.c.start
        offset = table.storage_offset() + self.tiled.farthest - first
        shape, strides = self.shape[2:], (1, 1)
        if table.shape[0] == 1:
            return table.as_strided((1, 1, *shape), (0, 0, *strides), offset)
        width, group = table.stride(0), self.shape[1]
        return table.as_strided(
            (self.shape[0], group, *shape), (group * width, width, *strides), offset + self.h.start * group * width
        )

    def add_to_table(self, table: Tensor, x: Tensor) -> None:
        """Add x, (heads, group, rows, columns), to a table by distance: the transpose of `table`."""
        one, (rows, columns), heads = len(table) == 1, self.shape[2:], self.shape[1]
        x = x.flatten(0, 1).sum(0, keepdim=True) if one else x.flatten(0, 1)
        into = table if one else table[self.h.start * heads : self.h.stop * heads]
        if self.tiled.ids is not None:
            own, keys = self.tiled.ids
            t = (own[self.b, self.r].flip(0)[:, None] - keys[self.b, self.c]).abs()
            into.index_add_(1, t.flatten(), x.flatten(1))
            return
        skewed = x.new_zeros(len(x), rows, rows + columns)  # each row one further to the right: a distance is a column
        skewed.as_strided(x.shape, (rows * (rows + columns), rows + columns + 1, 1)).copy_(x)
        offset = self.tiled.farthest - (self.last - self.tiled.key_start - self.c.start)
        into[:, offset : offset + rows + columns - 1] += skewed.sum(1)[:, :-1]

    def sink_columns(self) -> tuple[slice, Tensor] | None:
        """The columns in which some row has a sink, and which (row, column) pairs those are."""
        if not (sinks := self.tiled.spec.sinks):
            return None
        if self.tiled.ids is not None:  # they need not grow: any column may hold one
            sink = self.tiled.ids[1][self.b, self.c] < sinks
            return (slice(None), sink.expand(self.shape[2], -1)) if bool(sink.any()) else None
        first = self.tiled.key_start + self.c.start
        c0, c1 = (
            max(self.least.start - first, 0),
            min(self.most.start - first + sinks, self.shape[3]),
        )
        if c0 >= c1:
            return None
        start = self.tiled.bounds.start[self.b, self.r].flip(0)
        offset = torch.arange(first + c0, first + c1, device=self.query.device) - start[:, None]
        return slice(c0, c1), (offset >= 0) & (offset < sinks)

    def tiles(self) -> list[Tile]:
        """The ranges of columns that are held at a time: the block itself, or parts of it."""
        step, r, c = self.tiled.columns_at_once, self.r, self.c
        if self.shape[3] <= step:
            return [self]
        starts = range(c.start, c.stop, step)
        part = functools.partial(Tile, self.tiled, b=self.b, h=self.h, r0=r.start, r1=r.stop, bounds=self.bounds)
        return [part(number=self.number + i, c0=c0, c1=min(c0 + step, c.stop)) for i, c0 in enumerate(starts)]

    def scores(self) -> Tensor:
        """C(S), (heads, group, rows, columns)."""
        s, softcap = self.tiled.buffer("logits", *self.flat, self.shape[3]), self.tiled.spec.softcap
        torch.bmm(self.query, self.key.transpose(1, 2), out=s)
        if softcap:
            s.div_(softcap).tanh_().mul_(softcap)
        return s.view(self.shape)

    def logits(self, s: Tensor) -> Tensor:
        """L from C(S), in place; MASK_VALUE where the row may not see the key."""
        tiled, sink = self.tiled, self.sink_columns()
        if tiled.row_scale is not None:
            s.mul_(self.rows(tiled.row_scale))
        kept = s[..., sink[0]].clone() if sink else None
        if tiled.gain is not None and tiled.bias is not None:
            gain, bias = self.table(tiled.gain), self.table(tiled.bias)
            if tiled.bias_scale is None:
                torch.addcmul(bias, s, gain, out=s)
            else:
                s.mul_(gain).addcmul_(self.rows(tiled.bias_scale), bias)
        if sink and kept is not None:
            torch.where(sink[1], kept, s[..., sink[0]], out=s[..., sink[0]])
        self.hide(s)
        return s

    def hide(self, s: Tensor) -> None:
        """Fill the pairs that are outside the rows' intervals, or not allowed."""
        tiled = self.tiled
        first = tiled.key_start + self.c.start
        if (width := self.most.low - first) > 0:
            indices = torch.arange(first, first + min(width, self.shape[3]), device=s.device)
            s[..., :width].masked_fill_(indices < tiled.bounds.low[self.b, self.r, None].flip(0), MASK_VALUE)
        if not tiled.hides_future and (begin := max(self.least.high + 1 - first, 0)) < self.shape[3]:
            indices = torch.arange(first + begin, first + self.shape[3], device=s.device)
            s[..., begin:].masked_fill_(indices > tiled.bounds.high[self.b, self.r, None].flip(0), MASK_VALUE)
        if (allowed := self.allowed()) is not None:
            s.masked_fill_(~allowed, MASK_VALUE)

    def allowed(self) -> Tensor | None:
        if self.tiled.allowed is None:
            return None
        mask = self.tiled.allowed[self.b, :, self.r, self.c].flip(1)
        return mask[:, None] if mask.shape[0] == 1 else mask.unflatten(0, (-1, self.shape[1]))[self.h]

    def softmax(self, logits: Tensor) -> Tensor:
        """Probabilities in place; 0 in fully masked rows."""
        nothing = logits.amax(-1, keepdim=True) <= MASK_VALUE / 2 if self.fully_masked else None
        p = self.flushed(torch.softmax(logits, -1, out=logits))
        return p if nothing is None else p.masked_fill_(nothing, 0.0)

    def flushed(self, p: Tensor) -> Tensor:
        """Probabilities without denormal numbers, in place, where there may be many."""
        return without_denormals(p) if self.tiled.flushes else p

    def attend(self, with_lse: bool, with_entropy: bool) -> Sums:
        """The rows' sums over this block's columns alone; the entropy comes with the logsumexp."""
        out = lse = entropy = None
        p = logits = self.logits(self.scores())
        if with_lse:
            top = logits.amax(-1, keepdim=True)
            if with_entropy:
                # with the largest logit at 0, H = ln Z - sum p L adds two terms >= 0: nothing cancels
                p = self.flushed(torch.softmax(logits.sub_(top), -1, out=self.tiled.buffer("p", *self.shape)))
                entropy = -torch.einsum("hgrc,hgrc->hgr", p, logits)[..., None]
            else:
                self.flushed(torch.softmax(logits, -1, out=p))
            largest = p.amax(-1, keepdim=True).log_()  # the largest probability is exp(top - lse)
            lse = top - largest
            entropy = None if entropy is None else entropy.sub_(largest)
            if self.fully_masked:
                p.masked_fill_(top <= MASK_VALUE / 2, 0.0)
        elif self.value is not None:
            self.softmax(logits if self.tiled.temper is None else self.tempered(logits, self.tiled.temper))
        if self.tiled.call.dropout:
            p.mul_(self.keep())
        if self.value is not None:
            out = self.average(p).view(*self.shape[:3], -1)
        return out, lse, entropy

    def tempered(self, logits: Tensor, temper: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits times a factor of their entropy, up to a constant for each row, in place; rows are whole."""
        top = logits.amax(-1, keepdim=True)
        if self.fully_masked:  # such rows stay where they are
            top.masked_fill_(top <= MASK_VALUE / 2, 0.0)
        p = self.flushed(torch.softmax(logits.sub_(top), -1, out=self.tiled.buffer("p", *self.shape)))
        # the largest logit is 0, and its probability 1 / Z: H = ln Z - sum p L adds two terms >= 0, nothing cancels
        entropy = -p.amax(-1).log_() - torch.linalg.vecdot(p, logits)
        return logits.mul_(temper(entropy)[..., None])

    def average(self, p: Tensor) -> Tensor:
        """sum_j P v; probabilities are rounded to a half-precision value's dtype first."""
        assert self.value is not None
        p = p.view(*self.flat, -1)
        if p.dtype == self.value.dtype:
            return torch.bmm(p, self.value)
        out = p.new_zeros(*self.flat, self.value.shape[-1])
        for c in range(0, self.shape[3], HALF_COLUMNS):  # few shapes: oneDNN keeps memory for each one it has met
            part, value = p[..., c : c + HALF_COLUMNS], self.value[:, c : c + HALF_COLUMNS]
            rounded = self.tiled.buffer("rounded", *part.shape, dtype=value.dtype).copy_(part)
            out += torch.bmm(rounded, value)
        return out

    def keep(self) -> Tensor:
        """Dropout's factors for this block, the same whenever they are asked for."""
        assert self.tiled.call.seed is not None
        generator = torch.Generator(self.query.device).manual_seed(int(self.tiled.call.seed) + self.number)
        kept = torch.rand(self.shape, generator=generator, device=self.query.device) >= self.tiled.call.dropout
        return kept.to(self.tiled.dtype) / ((1 - self.tiled.call.dropout) or 1.0)  # all are dropped at 1

    def gradient(self, into: Gradients, whole: bool, **given: Tensor) -> None:
        """Add what these columns contribute to the gradients of the block's rows, and of keys and values.

        Args:
            whole: the tile holds all visible keys of its rows.
            given: what gradients start from, by row, as `_logit_gradient` takes it.
        """
        spec, s = self.tiled.spec, self.scores()
        capped = None
        if spec.softcap or spec.row_scale is not None or "gain" in into:
            capped = self.tiled.buffer("scores", *self.shape).copy_(s)
        d = self._logit_gradient(self.logits(s), into, whole, **given)
        d = self._score_gradient(d, capped, into).view(*self.flat, -1)
        into["query"].view(*self.flat, -1).baddbmm_(d, self.key)
        into["key"][self.b, self.h, self.c].baddbmm_(d.transpose(1, 2), self.query)

    def _logit_gradient(
        self,
        logits: Tensor,
        into: Gradients,
        whole: bool,
        delta: Tensor,
        lse: Tensor,
        d_out: Tensor | None = None,
        entropy: Tensor | None = None,
        d_entropy: Tensor | None = None,
    ) -> Tensor:
        """dL, in a buffer; the values' gradient on the way.

        Args:
            delta: sum_j P dP, the same for dropped-out P, less what the logsumexp passes on, (heads, group, rows, 1).
            lse, entropy, d_entropy: likewise; d_out (heads, group, rows, value_dim). None: not asked for.
        """
        if whole and d_entropy is None:
            p = self.softmax(logits)
        else:
            log_p = logits.sub_(lse)
            p = self.flushed(torch.exp(log_p, out=log_p if d_entropy is None else self.tiled.buffer("p", *self.shape)))
        d = self.tiled.buffer("d", *self.flat, self.shape[3])
        if self.value is None or d_out is None:
            d = d.zero_().view(self.shape)
        else:
            d_out = d_out.view(*self.flat, -1)
            torch.bmm(d_out, self.value.transpose(1, 2), out=d)
            d, dropped = d.view(self.shape), p
            if self.tiled.call.dropout:
                kept = self.keep()
                d.mul_(kept)
                dropped = p * kept
            into["value"][self.b, self.h, self.c].baddbmm_(dropped.view(*self.flat, -1).transpose(1, 2), d_out)
        d.sub_(delta)
        if entropy is not None and d_entropy is not None:
            d.sub_(log_p.add_(entropy).mul_(d_entropy))  # dH/dL_j = -P_j (ln P_j + H)
        return d.mul_(p)

    def _score_gradient(self, d: Tensor, capped: Tensor | None, into: Gradients) -> Tensor:
        """d(scaling q . k) from dL, in place; the row factors' gradients on the way. `capped` is C(S)."""
        tiled, sink = self.tiled, self.sink_columns()
        if tiled.gain is not None and tiled.bias is not None:
            kept = d[..., sink[0]].clone() if sink else None
            if "gain" in into and capped is not None:
                mapped = d.clone()
                if sink:
                    mapped[..., sink[0]].masked_fill_(sink[1], 0.0)
                by_row = (None if x is None else self.rows(x) for x in (tiled.row_scale, tiled.bias_scale))
                x, y = (1.0 if scale is None else scale for scale in by_row)
                self.add_to_table(into["gain"], mapped * capped * x)
                self.add_to_table(into["bias"], mapped * y)
            if tiled.bias_scale is not None:
                product = d * self.table(tiled.bias)
                if sink:
                    product[..., sink[0]].masked_fill_(sink[1], 0.0)
                into["bias_scale"].add_(product.sum(-1, keepdim=True))
            d.mul_(self.table(tiled.gain))
            if sink and kept is not None:
                torch.where(sink[1], kept, d[..., sink[0]], out=d[..., sink[0]])
        if tiled.row_scale is not None and capped is not None:
            into["row_scale"].add_((d * capped).sum(-1, keepdim=True))
            d.mul_(self.rows(tiled.row_scale))
        if tiled.spec.softcap and capped is not None:
            d.mul_(capped.div_(tiled.spec.softcap).square_().neg_().add_(1.0))
        return d


def _join(one: Sums, other: Sums) -> Sums:
    """The sums over two ranges of keys: exp(lse) adds up, and H = sum_i w_i (H_i - ln w_i) with w_i = exp(lse_i - lse)."""
    (one_out, one_lse, one_entropy), (other_out, other_lse, other_entropy) = one, other
    assert one_lse is not None
    assert other_lse is not None
    lse = torch.logaddexp(one_lse, other_lse)
    far, near = lse - one_lse, lse - other_lse
    out = entropy = None
    if one_entropy is not None and other_entropy is not None:
        entropy = (one_entropy + far) * (-far).exp_() + (other_entropy + near) * (-near).exp_()
    if one_out is not None and other_out is not None:
        out = other_out.mul_(near.neg_().exp_()).addcmul_(one_out, far.neg_().exp_())
    return out, lse, entropy


def dropout_seed(dropout: float) -> Tensor | None:
    return torch.randint(1 << 62, (), device="cpu") if dropout else None
