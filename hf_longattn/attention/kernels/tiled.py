"""Exact attention in plain PyTorch that never holds a q_len x kv_len tensor, forward or backward.

It computes what `spec.LogitSpec` says. Rows are worked off in blocks, and a block in tiles: itself, or in long texts ranges of
its keys, joined by their logsumexps. The backward pass computes each tile anew. Inside a block the query rows run backwards:
then t = const - (row + column), and a strided view of a 1-D table serves a whole tile. Rows with explicit positions look every
distance up instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..geometry import Columns, Rows
from ..tracing import keepable, readable
from . import precision
from .spec import MASK_VALUE, LogitSpec

#: Logits held at a time (elements, 4 bytes each): about what the caches of a small machine take.
BLOCK_ELEMENTS = 1 << 21
#: Columns of a tile where rows see more than WHOLE_COLUMNS: whole rows would leave a block too few of them.
TILE_COLUMNS, WHOLE_COLUMNS = 1 << 11, 1 << 13
#: Columns whose products in half precision are summed at a time.
HALF_COLUMNS = 1 << 11
#: Elements of keys turned at a time.
TURN_ELEMENTS = 1 << 19
#: p, c and s of S_ij = scaling (q_i . (c_j k_j) + p_i . (s_j k_j)): p like the query, c and s
#: (batch or 1, kv_len, kv_heads or 1, head_dim).
KeyTurn = tuple[Tensor, Tensor, Tensor]


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    rows: Rows,
    spec: LogitSpec,
    *,
    dropout: float = 0.0,
    with_lse: bool = False,
    with_entropy: bool = False,
    turn: KeyTurn | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention under a Toeplitz-affine logit map.

    Args:
        query: (batch, heads, q_len, head_dim); key, value: (batch, kv_heads, kv_len, head_dim), any float dtype;
            logits are float32 (float64 for float64 inputs).
        turn: a further product, which turns keys to other positions as they are read (see `KeyTurn`): for few queries;
            the call then has no gradient.
        value: None to leave the output empty, which saves its product.
        with_lse, with_entropy: compute the logsumexp and the entropy (nats) of every row, before dropout,
            differentiable; otherwise they come back empty.

    Returns:
        output like query, logsumexp and entropy (batch, heads, q_len) in the logits' dtype. Fully masked rows give
        0, -inf and 0.
    """
    seed = torch.randint(1 << 62, ()) if dropout else None
    arguments = _Arguments(
        *(query, key, value, rows.index, rows.allowed, rows.query_ids, rows.key_ids),
        *(spec.gain, spec.bias, spec.row_scale, spec.bias_scale, seed),
        sinks=int(spec.sinks),
        scaling=float(spec.scaling),
        softcap=float(spec.softcap or 0.0),
        dropout=float(dropout),
        with_lse=bool(with_lse),
        with_entropy=bool(with_entropy),
    )
    tensors = (query, key, value, spec.row_scale, spec.bias_scale)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if turn is None and not readable(query):
        out, lse, entropy = _tiled(*arguments)
    elif turn is None and (needs_grad or not keepable(query)):
        # its gradient takes probabilities that nothing has rounded
        out, lse, entropy = _Tiled.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        out, lse, entropy = _forward(*arguments, turn=turn, half=_halves_are_fast(value))
    return out, lse if with_lse else lse.new_zeros(0), entropy


class _Arguments(NamedTuple):
    """Those of the custom operator, which takes no objects; _SCHEMA names them once more."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    rows: Tensor
    allowed: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    gain: Tensor | None
    bias: Tensor | None
    row_scale: Tensor | None
    bias_scale: Tensor | None
    seed: Tensor | None
    sinks: int
    scaling: float
    softcap: float
    dropout: float
    with_lse: bool = False
    with_entropy: bool = False


_SCHEMA = (
    "Tensor query, Tensor key, Tensor? value, Tensor rows, Tensor? allowed, Tensor? query_ids, Tensor? key_ids, "
    "Tensor? gain, Tensor? bias, Tensor? row_scale, Tensor? bias_scale, Tensor? seed, int sinks, float scaling, "
    "float softcap, float dropout"
)


class _Blocks:
    """Query, key and value in computing dtype and block order, and the logits of one block at a time."""

    def __init__(self, given: _Arguments, turn: KeyTurn | None = None, half: bool = False) -> None:
        query, key, value, index, allowed, query_ids, key_ids, gain, bias, row_scale, bias_scale, seed = given[:12]
        self.batch, heads, self.q_len, self.head_dim = query.shape
        self.kv_heads, self.kv_len = key.shape[1:3]
        self.group = heads // self.kv_heads
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.turn = None
        if turn is not None:
            self.turn = (self.grouped(turn[0].to(self.dtype)), turn[1].to(self.dtype), turn[2].to(self.dtype))
        self.scaling = given.scaling
        self.query = self.grouped(query.to(self.dtype))
        self.key = key.to(self.dtype).contiguous()
        self.value = None if value is None else value.to(value.dtype if half else self.dtype).contiguous()
        self.row_scale = None if row_scale is None else self.grouped(row_scale.to(self.dtype)[..., None])
        self.bias_scale = None if bias_scale is None else self.grouped(bias_scale.to(self.dtype)[..., None])
        index = index.expand(self.batch, -1, -1)
        self.columns, self.bounds = Columns(*index.unbind(-1)), index.to("cpu")
        self.allowed = None
        if allowed is not None:
            self.allowed = allowed.expand(self.batch, -1, self.q_len, self.kv_len)
        bounds = Columns(*self.bounds.unbind(-1))
        self.key_start = int(bounds.key_start[0, 0])
        self.gain = self.bias = self.ids = None
        self.hides_future = False
        if gain is not None and bias is not None and query_ids is not None and key_ids is not None:
            self.gain, self.bias = gain.to(self.dtype), bias.to(self.dtype)
            self.ids = query_ids.expand(self.batch, -1), key_ids.expand(self.batch, -1)
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
            hides = bias_scale is None or bool((bias_scale >= 1).all())  # a smaller factor would weaken MASK_VALUE
            if hides and not given.sinks and bool((bounds.high == position).all()):
                self.bias[:, self.farthest + 1 :] = MASK_VALUE  # causality for free
                self.hides_future = True
        self.sinks, self.softcap, self.dropout, self.seed = given.sinks, given.softcap, given.dropout, seed
        self.heads_at_once, self.rows_at_once, self.columns_at_once = self.sizes()
        self.buffers: dict[str, Tensor] = {}

    def sizes(self) -> tuple[int, int, int]:
        """Heads, rows and columns of a tile."""
        if self.kv_heads * self.group * self.q_len * self.kv_len <= BLOCK_ELEMENTS:
            return self.kv_heads, self.q_len, self.kv_len
        bounds = Columns(*self.bounds.unbind(-1))
        width = max(min(int((bounds.high - bounds.low).max()) + 1, self.kv_len), 1)
        columns = TILE_COLUMNS if width > WHOLE_COLUMNS else self.kv_len
        width = min(width, columns)
        heads = min(self.kv_heads, 2 if self.group == 1 else 1)
        rows = BLOCK_ELEMENTS // (heads * self.group * width)
        return heads, min(max(rows, 16), 256, self.q_len), columns

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

    def __iter__(self) -> Iterator[_Block]:
        number = 0
        for b in range(self.batch):
            bounds = [_Bounds.of(rows) for rows in self.bounds[b].split(self.rows_at_once)]
            for h0 in range(0, self.kv_heads, self.heads_at_once):
                h = slice(h0, min(h0 + self.heads_at_once, self.kv_heads))
                for r0, own in zip(range(0, self.q_len, self.rows_at_once), bounds, strict=True):
                    r1 = min(r0 + self.rows_at_once, self.q_len)
                    c0 = max(own.least.low - self.key_start, 0)
                    c1 = min(own.most.high - self.key_start + 1, self.kv_len)
                    number += 1 + self.kv_len // self.columns_at_once  # one for each of its tiles
                    if c0 < c1:
                        yield _Block(self, number, b, h, r0, r1, c0, c1, own)


class _Bounds(NamedTuple):
    """Of the rows of a block: least and most of each column of `Rows.index`, the last row's slot, whether one sees nothing."""

    least: Columns
    most: Columns
    last: int
    blind: bool

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        least, most = rows.aminmax(dim=0)
        own = Columns(*rows.unbind(-1))
        return cls(Columns(*least.tolist()), Columns(*most.tolist()), int(own.query[-1]), bool((own.low > own.high).any()))


class _Block:
    """Some heads of one batch row, query rows r0:r1 (in reverse order), key columns c0:c1."""

    def __init__(
        self, all: _Blocks, number: int, b: int, h: slice, r0: int, r1: int, c0: int, c1: int, bounds: _Bounds
    ) -> None:
        self.all, self.number, self.b, self.h = all, number, b, h
        self.r, self.c = slice(r0, r1), slice(c0, c1)
        self.shape = (h.stop - h.start, all.group, r1 - r0, c1 - c0)
        self.flat = (self.shape[0], self.shape[1] * self.shape[2])
        self.key = all.key[b, h, c0:c1]
        self.value = None if all.value is None else all.value[b, h, c0:c1]
        self.query = self.rows(all.query).mul_(all.scaling).view(*self.flat, -1)
        self.bounds = bounds

    def rows(self, x: Tensor) -> Tensor:
        """This block's rows of a grouped tensor: (heads, group, rows, d), a reversed copy."""
        return x[self.b, self.h, :, self.r].flip(2).contiguous()

    def put(self, into: Tensor, x: Tensor) -> None:
        """Store the block's rows, (heads, group, rows, d) or with group and rows flattened, in a grouped tensor."""
        into[self.b, self.h, :, self.r] = x.view(*self.shape[:3], -1).flip(2)

    def table(self, table: Tensor) -> Tensor:
        """A table by distance as the block sees it, broadcastable to (heads, group, rows, columns)."""
        if self.all.ids is not None:
            own, keys = self.all.ids
            t = (own[self.b, self.r].flip(0)[:, None] - keys[self.b, self.c]).abs()
            own = table if table.shape[0] == 1 else table.unflatten(0, (-1, self.shape[1]))[self.h].flatten(0, 1)
            return own[:, t].unflatten(0, (-1, 1 if table.shape[0] == 1 else self.shape[1]))
        first = self.bounds.last - self.all.key_start - self.c.start
        offset = table.storage_offset() + self.all.farthest - first
        shape, strides = self.shape[2:], (1, 1)
        if table.shape[0] == 1:
            return table.as_strided((1, 1, *shape), (0, 0, *strides), offset)
        width, group = table.stride(0), self.shape[1]
        return table.as_strided(
            (self.shape[0], group, *shape), (group * width, width, *strides), offset + self.h.start * group * width
        )

    def sink_columns(self) -> tuple[slice, Tensor] | None:
        """The columns in which some row has a sink, and which (row, column) pairs those are."""
        if not self.all.sinks:
            return None
        if self.all.ids is not None:  # they need not grow: any column may hold one
            sink = self.all.ids[1][self.b, self.c] < self.all.sinks
            return (slice(None), sink.expand(self.shape[2], -1)) if bool(sink.any()) else None
        first = self.all.key_start + self.c.start
        c0, c1 = max(self.bounds.least.start - first, 0), min(self.bounds.most.start - first + self.all.sinks, self.shape[3])
        if c0 >= c1:
            return None
        start = self.all.columns.start[self.b, self.r].flip(0)
        offset = torch.arange(first + c0, first + c1, device=self.query.device) - start[:, None]
        return slice(c0, c1), (offset >= 0) & (offset < self.all.sinks)

    @property
    def blind(self) -> bool:
        """Whether a row of it may see nothing at all."""
        return self.all.allowed is not None or self.bounds.blind

    def tiles(self) -> list[_Block]:
        """The ranges of columns that are held at a time: the block itself, or parts of it."""
        step, r, c = self.all.columns_at_once, self.r, self.c
        if self.shape[3] <= step:
            return [self]
        starts = range(c.start, c.stop, step)
        part = functools.partial(_Block, self.all, b=self.b, h=self.h, r0=r.start, r1=r.stop, bounds=self.bounds)
        return [part(number=self.number + i, c0=c0, c1=min(c0 + step, c.stop)) for i, c0 in enumerate(starts)]

    def scores(self) -> Tensor:
        """C(S), (heads, group, rows, columns)."""
        s = self.all.buffer("logits", *self.flat, self.shape[3])
        if self.all.turn is None:
            torch.bmm(self.query, self.key.transpose(1, 2), out=s)
        else:
            other, cos, sin = self.all.turn
            other = self.rows(other).mul_(self.all.scaling).view(*self.flat, -1)
            cos, sin = (x[self.b if x.shape[0] > 1 else 0, self.c].transpose(0, 1) for x in (cos, sin))
            cos, sin = (x[self.h] if x.shape[0] > 1 else x for x in (cos, sin))
            step = max(TURN_ELEMENTS // self.key[:, 0].numel(), 16)
            for c in range(0, self.shape[3], step):
                columns = slice(c, c + step)
                key = self.key[:, columns]
                part = self.all.buffer("turned", *key.shape)
                if self.flat[1] == 1:  # a query of its own for each key takes one pass less
                    torch.mul(cos[:, columns], self.query, out=part).addcmul_(sin[:, columns], other).mul_(key)
                    torch.sum(part, -1, out=s[:, 0, columns])
                    continue
                s[..., columns] = torch.bmm(self.query, torch.mul(key, cos[:, columns], out=part).transpose(1, 2))
                s[..., columns].baddbmm_(other, torch.mul(key, sin[:, columns], out=part).transpose(1, 2))
        if self.all.softcap:
            s.div_(self.all.softcap).tanh_().mul_(self.all.softcap)
        return s.view(self.shape)

    def logits(self, s: Tensor) -> Tensor:
        """L from C(S), in place; MASK_VALUE where the row may not see the key."""
        all, sink = self.all, self.sink_columns()
        if all.row_scale is not None:
            s.mul_(self.rows(all.row_scale))
        kept = s[..., sink[0]].clone() if sink else None
        if all.gain is not None and all.bias is not None:
            gain, bias = self.table(all.gain), self.table(all.bias)
            if all.bias_scale is None:
                torch.addcmul(bias, s, gain, out=s)
            else:
                s.mul_(gain).addcmul_(self.rows(all.bias_scale), bias)
        if sink and kept is not None:
            torch.where(sink[1], kept, s[..., sink[0]], out=s[..., sink[0]])
        self.hide(s)
        return s

    def hide(self, s: Tensor) -> None:
        """Fill the pairs that are outside the rows' intervals, or not allowed."""
        all, bounds = self.all, self.bounds
        first = all.key_start + self.c.start
        if (width := bounds.most.low - first) > 0:
            slots = torch.arange(first, first + min(width, self.shape[3]), device=s.device)
            s[..., :width].masked_fill_(slots < all.columns.low[self.b, self.r, None].flip(0), MASK_VALUE)
        if not all.hides_future and (begin := max(bounds.least.high + 1 - first, 0)) < self.shape[3]:
            slots = torch.arange(first + begin, first + self.shape[3], device=s.device)
            s[..., begin:].masked_fill_(slots > all.columns.high[self.b, self.r, None].flip(0), MASK_VALUE)
        if (allowed := self.allowed()) is not None:
            s.masked_fill_(~allowed, MASK_VALUE)

    def allowed(self) -> Tensor | None:
        if self.all.allowed is None:
            return None
        mask = self.all.allowed[self.b, :, self.r, self.c].flip(1)
        return mask[:, None] if mask.shape[0] == 1 else mask.unflatten(0, (-1, self.shape[1]))[self.h]

    def softmax(self, logits: Tensor) -> Tensor:
        """Probabilities in place; 0 in rows that see nothing."""
        nothing = logits.amax(-1, keepdim=True) <= MASK_VALUE / 2 if self.blind else None
        torch.softmax(logits, -1, out=logits)
        return logits if nothing is None else logits.masked_fill_(nothing, 0.0)

    def attend(self, with_lse: bool, with_entropy: bool) -> _Sums:
        """What the rows take from this block's columns alone; the entropy comes with the logsumexp."""
        out = lse = entropy = None
        p = logits = self.logits(self.scores())
        if with_lse:
            top = logits.amax(-1, keepdim=True)
            if with_entropy:
                # with the largest logit at 0, H = ln Z - sum p L adds two terms >= 0: nothing cancels
                p = torch.softmax(logits.sub_(top), -1, out=self.all.buffer("p", *self.shape))
                entropy = -torch.einsum("hgrc,hgrc->hgr", p, logits)[..., None]
            else:
                torch.softmax(logits, -1, out=p)
            largest = p.amax(-1, keepdim=True).log_()  # the largest probability is exp(top - lse)
            lse = top - largest
            entropy = None if entropy is None else entropy.sub_(largest)
            if self.blind:
                p.masked_fill_(top <= MASK_VALUE / 2, 0.0)
        elif self.value is not None:
            self.softmax(logits)
        if self.all.dropout:
            p.mul_(self.keep())
        if self.value is not None:
            out = self.average(p).view(*self.shape[:3], -1)
        return _Sums(out, lse, entropy)

    def average(self, p: Tensor) -> Tensor:
        """sum_j P v; probabilities are rounded to a half-precision value's dtype first."""
        assert self.value is not None
        p = p.view(*self.flat, -1)
        if p.dtype == self.value.dtype:
            return torch.bmm(p, self.value)
        out = p.new_zeros(*self.flat, self.value.shape[-1])
        for c in range(0, self.shape[3], HALF_COLUMNS):  # few shapes: oneDNN keeps memory for each one it has met
            part, value = p[..., c : c + HALF_COLUMNS], self.value[:, c : c + HALF_COLUMNS]
            rounded = self.all.buffer("rounded", *part.shape, dtype=value.dtype).copy_(part)
            out += torch.bmm(rounded, value)
        return out

    def keep(self) -> Tensor:
        """Dropout's factors for this block, the same whenever they are asked for."""
        assert self.all.seed is not None
        generator = torch.Generator(self.query.device).manual_seed(int(self.all.seed) + self.number)
        kept = torch.rand(self.shape, generator=generator, device=self.query.device) >= self.all.dropout
        return kept.to(self.all.dtype) / (1 - self.all.dropout)


class _Sums(NamedTuple):
    """Output, logsumexp and entropy of rows, (heads, group, rows, value_dim or 1); None: not asked for."""

    out: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None

    def join(self, other: _Sums) -> _Sums:
        """Of both ranges of keys together: exp(lse) adds up, and H = sum_i w_i (H_i - ln w_i) with w_i = exp(lse_i - lse)."""
        assert self.lse is not None
        assert other.lse is not None
        lse = torch.logaddexp(self.lse, other.lse)
        far, near = lse - self.lse, lse - other.lse
        out = entropy = None
        if self.entropy is not None and other.entropy is not None:
            entropy = (self.entropy + far) * (-far).exp_() + (other.entropy + near) * (-near).exp_()
        if self.out is not None and other.out is not None:
            out = other.out.mul_(near.neg_().exp_()).addcmul_(self.out, far.neg_().exp_())
        return _Sums(out, lse, entropy)


def _halves_are_fast(value: Tensor | None) -> bool:
    """Whether products of half-precision factors, summed in float32, beat those in float32."""
    if value is None or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    return value.device.type != "cpu" or (value.dtype == torch.bfloat16 and precision.cpu_multiplies_bfloat16())


def _forward(*arguments: Any, turn: KeyTurn | None = None, half: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    given = _Arguments(*arguments)
    query, value, with_lse, with_entropy = given.query, given.value, given.with_lse, given.with_entropy
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        blocks = _Blocks(given, turn, half)
        shape = query.shape[:-1]
        out = query.new_zeros((0,) if value is None else (*shape, value.shape[-1]))
        lse = blocks.query.new_full(shape, float("-inf"))  # of rows in tiles, which the backward pass asks for, too
        entropy = blocks.query.new_zeros(shape if with_entropy else (0,))
        for block in blocks:
            tiles = block.tiles()
            need_lse = with_lse or with_entropy or len(tiles) > 1
            sums = functools.reduce(_Sums.join, (tile.attend(need_lse, with_entropy) for tile in tiles))
            if block.blind and sums.lse is not None:
                nothing = sums.lse <= MASK_VALUE / 2
                sums.lse.masked_fill_(nothing, float("-inf"))
                if sums.entropy is not None:
                    sums.entropy.masked_fill_(nothing, 0.0)
            if sums.out is not None:
                block.put(blocks.grouped(out), sums.out)
            if sums.lse is not None:
                block.put(blocks.grouped(lse[..., None]), sums.lse)
            if sums.entropy is not None:
                block.put(blocks.grouped(entropy[..., None]), sums.entropy)
        return out, lse, entropy


_tiled = torch.library.custom_op(
    "hf_longattn::tiled",
    _forward,
    mutates_args=(),
    schema=f"({_SCHEMA}, bool with_lse, bool with_entropy) -> (Tensor, Tensor, Tensor)",
)


@_tiled.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((0,) if value is None else (*query.shape[:-1], value.shape[-1]))
    rows = [query.new_empty(query.shape[:-1] if wanted else (0,), dtype=dtype) for wanted in (True, rest[-1])]
    return out, *rows


def _gradients(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    lse: Tensor,
    entropy: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = _Arguments(*arguments)
    query, key, value, row_scale, bias_scale = given.query, given.key, given.value, given.row_scale, given.bias_scale
    scaling, softcap, dropout = given.scaling, given.softcap, given.dropout
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        a = _Blocks(given)
        # sum_j P dP, the same for dropped-out P, less what the logsumexp passes on
        delta = a.query.new_zeros(*query.shape[:-1])
        if value is not None:
            delta += (grad.to(a.dtype) * out.to(a.dtype)).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse.to(a.dtype)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # a row that sees nothing: exp(MASK_VALUE) is 0
        given_rows = {"delta": delta, "lse": lse, "gain": row_scale}
        given_rows |= {} if grad_entropy is None else {"entropy": entropy, "d_entropy": grad_entropy}
        by_row = {name: a.grouped(x.to(a.dtype)[..., None]) for name, x in given_rows.items() if x is not None}
        by_row |= {} if value is None else {"grad": a.grouped(grad.to(a.dtype))}
        d_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        d_key = torch.zeros_like(a.key)
        d_value = a.key.new_zeros(0) if a.value is None else torch.zeros_like(a.value)
        d_scale = a.query.new_zeros(query.shape[:3] if row_scale is not None else 0)
        d_bias = a.query.new_zeros(query.shape[:3] if bias_scale is not None else 0)
        for block in a:
            own = {name: block.rows(x) for name, x in by_row.items()}
            g = own["grad"].view(*block.flat, -1) if "grad" in own else None
            dq = a.query.new_zeros(*block.flat, a.head_dim)
            dx, dy = (a.query.new_zeros(*block.shape[:3], 1) for _ in range(2))
            for tile in (tiles := block.tiles()):
                b, h, c = tile.b, tile.h, tile.c
                s = tile.scores()
                capped = a.buffer("scores", *tile.shape).copy_(s) if softcap or row_scale is not None else None
                logits = tile.logits(s)
                if len(tiles) == 1 and "d_entropy" not in own:
                    p = tile.softmax(logits)
                else:
                    log_p = logits.sub_(own["lse"])
                    p = torch.exp(log_p, out=a.buffer("p", *tile.shape) if "d_entropy" in own else log_p)
                d = a.buffer("d", *tile.flat, tile.shape[3])
                if tile.value is None or g is None:
                    d = d.zero_().view(tile.shape)
                else:
                    torch.bmm(g, tile.value.transpose(1, 2), out=d)
                    d = d.view(tile.shape)
                    dropped = p
                    if dropout:
                        kept = tile.keep()
                        d.mul_(kept)
                        dropped = p * kept
                    d_value[b, h, c].baddbmm_(dropped.view(*tile.flat, -1).transpose(1, 2), g)
                d.sub_(own["delta"])
                if "d_entropy" in own:
                    d.sub_(log_p.add_(own["entropy"]).mul_(own["d_entropy"]))  # dH/dL_j = -P_j (ln P_j + H)
                d.mul_(p)  # dL
                sink = tile.sink_columns()
                if a.gain is not None and a.bias is not None:
                    sunk = d[..., sink[0]].clone() if sink else None
                    if a.bias_scale is not None:
                        product = d * tile.table(a.bias)
                        if sink:
                            product[..., sink[0]].masked_fill_(sink[1], 0.0)
                        dy += product.sum(-1, keepdim=True)
                    d.mul_(tile.table(a.gain))
                    if sink and sunk is not None:
                        torch.where(sink[1], sunk, d[..., sink[0]], out=d[..., sink[0]])
                if a.row_scale is not None and capped is not None:
                    dx += (d * capped).sum(-1, keepdim=True)
                    d.mul_(own["gain"])
                if softcap and capped is not None:
                    d.mul_(capped.div_(softcap).square_().neg_().add_(1.0))
                d = d.view(*tile.flat, -1)
                dq.baddbmm_(d, tile.key)
                d_key[b, h, c].baddbmm_(d.transpose(1, 2), tile.query)
            block.put(a.grouped(d_query), dq.mul_(scaling))
            if row_scale is not None:
                block.put(a.grouped(d_scale[..., None]), dx)
            if bias_scale is not None:
                block.put(a.grouped(d_bias[..., None]), dy)
        return d_query, d_key.to(key.dtype), d_value if value is None else d_value.to(value.dtype), d_scale, d_bias


_backward = torch.library.custom_op(
    "hf_longattn::tiled_backward",
    _gradients,
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_lse, Tensor? grad_entropy, Tensor out, Tensor lse, Tensor entropy, "
    f"{_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _(grad, grad_lse, grad_entropy, out, lse, entropy, *arguments):  # type: ignore[no-untyped-def]
    given = _Arguments(*arguments)
    query, key, value = given.query, given.key, given.value
    d_query, d_key = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key))
    d_value = key.new_empty(0) if value is None else torch.empty_like(value, memory_format=torch.contiguous_format)
    d_rows = [lse.new_empty(query.shape[:-1] if x is not None else 0) for x in (given.row_scale, given.bias_scale)]
    return d_query, d_key, d_value, *d_rows


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    tensors, ctx.options = inputs[:12], inputs[12:16]
    ctx.save_for_backward(*output, *tensors)
    ctx.with_entropy = inputs[-1]


def _autograd(ctx, grad, grad_lse, grad_entropy, run=_backward):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # once: gradient checkpointing gives them out once
    given = _Arguments(*saved[3:], *ctx.options)
    names = ("query", "key", "value", "row_scale", "bias_scale")
    grads = run(grad, grad_lse, grad_entropy if ctx.with_entropy else None, *saved, *ctx.options)
    by_name = {name: d.to(x.dtype) for name, d in zip(names, grads, strict=True) if (x := getattr(given, name)) is not None}
    return tuple(by_name.get(name) for name in _Arguments._fields)


_tiled.register_autograd(_autograd, setup_context=_setup_context)


class _TiledBackward(torch.autograd.Function):
    """The gradients outside of graphs; theirs are refused."""

    @staticmethod
    def forward(*arguments):  # type: ignore[no-untyped-def]
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "the tiled kernel has no second derivatives: use backend='reference', as in hf_longattn.update(model, backend=...)"
        )


class _Tiled(torch.autograd.Function):
    """`_tiled` outside of graphs, where the transforms of torch.func take gradients of a Function, but not of an operator."""

    @staticmethod
    def forward(*arguments):  # type: ignore[no-untyped-def]
        return _forward(*arguments)

    @staticmethod
    def vmap(*arguments):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "the tiled kernel does not go through vmap: give it the batch dimension itself, or use backend='reference'"
        )

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(functools.partial(_autograd, run=_TiledBackward.apply))
