"""Attention over an interval of keys for each row by PyTorch's fused kernel for the CPU: where logits are scaling q . k alone.

Rows are worked off in blocks. All rows of a block see the keys in the middle of their intervals; at either end lies, in most
texts, a triangle, which is causal attention, read backwards where intervals begin; else the ends come under a mask. The parts
are joined by their logsumexps.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from .kernel import FUSED, MASK_VALUE, KernelCall

#: Rows of a block, and of one whose ends come under a mask: of what is masked more than half is computed for nothing.
ROWS, MASKED_ROWS = 1024, 256


def serves(call: KernelCall) -> bool:
    """Whether a call without gradients is computed here."""
    spec, query, value = call.spec, call.query, call.key if call.value is None else call.value
    plain = (spec.softcap, spec.gain, spec.row_scale, call.rows.allowed) == (None,) * 4 and not call.dropout
    fits = query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and hasattr(torch.ops.aten, FUSED)
    return plain and fits and not (call.with_entropy and call.value is not None)


@torch.no_grad()
def attend(call: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp and entropy, as `kernel.Result` defines them.

    The entropy is lse - scaling q . (sum_j p_j k_j): attention whose values are its keys.
    """
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    query, key, value = (x.to(dtype) for x in (call.query, call.key, call.key if call.value is None else call.value))
    out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], float("-inf"))
    for block in _blocks(call):
        own, result = query[block.batch, :, block.rows], None
        for columns, shape in block.parts(dtype):
            seen = key[block.batch, :, columns], value[block.batch, :, columns]
            part = _fused(own, *seen, shape, call.spec.scaling)
            result = part if result is None else _joined(*result, *part)
        if result is not None:
            out[block.batch, :, block.rows], lse[block.batch, :, block.rows] = result
        if block.blind is not None:
            out[block.batch, :, block.rows].masked_fill_(block.blind[:, None], 0.0)
            lse[block.batch, :, block.rows].masked_fill_(block.blind, float("-inf"))
    entropy = lse.new_zeros(0)
    if call.with_entropy:
        top = lse.masked_fill(lse == float("-inf"), 0.0)
        entropy = (top - call.spec.scaling * (query * out).sum(-1)).clamp_(min=0.0)
    return call.query.new_zeros(0) if call.value is None else out.to(call.query.dtype), lse, entropy


class _Shape(Enum):
    """Which pairs of a part are visible."""

    ALL = "all"
    CAUSAL = "the first row sees the first column, each row one more"
    FALLING = "the first row sees every column, each row one less, to the last column"


class _Block(NamedTuple):
    """Rows whose intervals are looked at together.

    Args:
        low, high: the first and last column that each row sees, int64 (rows,).
        blind: bool (rows,), those that see none; None: there are none.
    """

    batch: slice
    rows: slice
    low: Tensor
    high: Tensor
    blind: Tensor | None

    def halves(self) -> tuple[_Block, _Block]:
        middle = len(self.low) // 2
        at = self.rows.start + middle, self.rows.stop
        first = _Block(self.batch, slice(self.rows.start, at[0]), self.low[:middle], self.high[:middle], None)
        return first._looked_at(), _Block(self.batch, slice(*at), self.low[middle:], self.high[middle:], None)._looked_at()

    def _looked_at(self) -> _Block:
        blind = self.low > self.high
        return self._replace(blind=blind if bool(blind.any()) else None)

    @property
    def regular(self) -> bool:
        """Whether triangles and a rectangle are all there is, or nothing."""
        if self.blind is not None:
            return bool(self.blind.all())
        ends = [_rises(x) for x in (self.low, self.high)]
        apart = int(self.low[-1]) < int(self.high[0]) if all(ends) else int(self.low[-1]) <= int(self.high[0])
        return None not in ends and apart

    def parts(self, dtype: torch.dtype) -> Iterator[tuple[Tensor | slice, _Shape | Tensor]]:
        """Columns, and which pairs are visible, or a mask to add to their logits, (rows, columns)."""
        if self.blind is not None and bool(self.blind.all()):
            return
        if not self.regular:
            yield from self._masked(dtype)
            return
        start, stop = int(self.low[0]), int(self.high[0]) + 1
        if _rises(self.low):
            yield slice(start, start + len(self.low)), _Shape.FALLING
            start += len(self.low)
        if _rises(self.high):
            stop -= 1
            yield slice(stop, stop + len(self.high)), _Shape.CAUSAL
        if start < stop:
            yield slice(start, stop), _Shape.ALL

    def _masked(self, dtype: torch.dtype) -> Iterator[tuple[Tensor | slice, _Shape | Tensor]]:
        seeing = slice(None) if self.blind is None else ~self.blind
        (first, inner), (outer, last) = ((int(x) for x in ends[seeing].aminmax()) for ends in (self.low, self.high))
        columns = torch.arange(first, last + 1)
        if inner <= outer:
            yield slice(inner, outer + 1), _Shape.ALL
            columns = columns[(columns < inner) | (columns > outer)]
        if len(columns):
            hidden = (columns < self.low[:, None]) | (columns > self.high[:, None])
            yield columns, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, MASK_VALUE)


def _rises(ends: Tensor) -> bool | None:
    """Whether they rise by one from row to row; False: they stay; None: neither."""
    steps = ends.diff()
    return True if len(steps) and bool((steps == 1).all()) else None if bool((steps != 0).any()) else False


def _blocks(call: KernelCall) -> Iterator[_Block]:
    batch, kv_len = call.query.shape[0], call.key.shape[2]
    _, key_start, _, low, high = call.rows.columns
    low, high = (low - key_start).clamp(min=0), (high - key_start).clamp(max=kv_len - 1)
    for b in range(len(low)):
        entries = slice(0, batch) if len(low) == 1 else slice(b, b + 1)
        waiting = [_Block(entries, slice(0, low.shape[1]), low[b], high[b], None)._looked_at()]
        while waiting:
            block = waiting.pop()
            size = len(block.low)
            if size > ROWS or (size > MASKED_ROWS and not block.regular):
                waiting += block.halves()
            else:
                yield block


def _fused(query: Tensor, key: Tensor, value: Tensor, shape: _Shape | Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; of query heads that share a key head, one after another."""
    kernel, groups, backwards = getattr(torch.ops.aten, FUSED), query.shape[1] // key.shape[1], shape is _Shape.FALLING
    if backwards:
        query, key, value = (x.flip(2) for x in (query, key, value))
    options = {"attn_mask": shape if isinstance(shape, Tensor) else None, "scale": scaling}
    causal = shape in (_Shape.CAUSAL, _Shape.FALLING) if isinstance(shape, _Shape) else False
    results = [kernel(q, key, value, 0.0, causal, **options) for q in query.unflatten(1, (-1, groups)).unbind(2)]
    out, lse = (torch.stack(x, 2).flatten(1, 2) for x in zip(*results, strict=True))
    return (out.flip(2), lse.flip(2)) if backwards else (out, lse)


def _joined(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(lse, other_lse)
    return out.mul_((lse - both).exp_()[..., None]).addcmul_(other, (other_lse - both).exp_()[..., None]), both
