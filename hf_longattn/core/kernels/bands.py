"""Cuts the rows of a segment into parts that PyTorch's fused kernels compute: triangles and rectangles.

Rows are worked off in blocks. All rows of a block see the keys in the middle of their intervals; at either end lies, in most
texts, a triangle, which is causal attention, read backwards where intervals begin; else the ends come under a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .kernel import KernelCall

#: Rows whose ends come under a mask together: of what is masked more than half is computed for nothing. Fewer rows than SHORT
#: that go on alike come under a mask with their neighbours.
MASKED_ROWS, SHORT = 256, 64
#: How a row's columns differ from those of the row before. STAY: not at all; LAST: the last is one further; FIRST: the first
#: is; FIRST + LAST: both are; BLIND: neither row sees any; MIXED: otherwise.
STAY, LAST, FIRST, BLIND, MIXED = 0, 1, 2, 4, 5
#: Which pairs of a part are visible. ALL: every one; CAUSAL: in row r columns 0 to r; FALLING: in row r those from r on.
ALL, CAUSAL, FALLING = "all", "causal", "falling"
#: One of these three, or the first and the last of all keys that each row sees, int64 (rows,), for a mask.
Shape: TypeAlias = "str | tuple[Tensor, Tensor]"


class Part(NamedTuple):
    """Some rows with some columns.

    Args:
        first: nothing else was computed of these rows before.
    """

    batch: slice
    rows: slice
    columns: slice
    shape: Shape
    first: bool

    def of_rows(self, *tensors: Tensor) -> list[Tensor]:
        """The part's rows of tensors (batch, heads, q_len, ...), in order."""
        return [self.ordered(x[self.batch, :, self.rows]) for x in tensors]

    def of_columns(self, *tensors: Tensor) -> list[Tensor]:
        """The part's columns of tensors (batch, kv_heads, kv_len, ...), in order."""
        return [self.ordered(x[self.batch, :, self.columns]) for x in tensors]

    def ordered(self, x: Tensor) -> Tensor:
        """Rows or columns in the order in which attention is causal at most; and back."""
        return x.flip(2) if self.shape == FALLING else x

    @property
    def masked(self) -> bool:
        """True if a mask says which pairs are visible."""
        return not isinstance(self.shape, str)

    def mask(self, device: torch.device) -> tuple[bool, Tensor | None]:
        """Tell whether attention is causal, and make the mask of hidden pairs or None, as `sdpa` asks for them."""
        if isinstance(self.shape, str):
            return self.shape != ALL, None
        low, high = (ends.to(device) for ends in self.shape)
        columns = torch.arange(self.columns.start, self.columns.stop, device=low.device)
        return False, (columns < low[:, None]) | (columns > high[:, None])


def parts(call: KernelCall) -> list[Part]:
    """The parts of a segment, kept with its rows."""
    rows, batch, kv_len = call.rows.host, call.query.shape[0], call.kv_len
    known: list[Part] = rows.once(("parts", batch, kv_len), lambda: list(_made(rows.index, batch, kv_len)))
    return known


def _made(index: Tensor, batch: int, kv_len: int) -> Iterator[Part]:
    _, key_start, _, low, high = index.to("cpu").unbind(-1)
    low, high = (low - key_start).clamp(min=0), (high - key_start).clamp(max=kv_len - 1)
    for b in range(len(low)):
        entries = slice(0, batch) if len(low) == 1 else slice(b, b + 1)
        for start, stop, kind in _blocks(low[b], high[b]):
            block = slice(start, stop)
            for n, (columns, shape) in enumerate(_shapes(low[b, block], high[b, block], kind)):
                yield Part(entries, block, columns, shape, n == 0)


def _runs(low: Tensor, high: Tensor) -> Iterator[tuple[int, int, int]]:
    """Start, stop and kind of rows that go on alike.

    Args:
        low, high: the first and last column that each row sees, int64 (rows,).
    """
    first, last, blind = low.diff(), high.diff(), low > high
    kinds = torch.where((first.clamp(0, 1) == first) & (last.clamp(0, 1) == last), FIRST * first + LAST * last, MIXED)
    kinds = torch.where(blind[1:] | blind[:-1], torch.where(blind[1:] & blind[:-1], BLIND, MIXED), kinds)
    start = at = 0  # the first row that is in no run yet; the one from which rows go on
    for kind, count in zip(*(x.tolist() for x in kinds.unique_consecutive(return_counts=True)), strict=True):
        stop = at + count + (kind != MIXED)  # where they go on differently, a row may begin anew
        if start < stop:
            yield start, stop, kind
            start = stop
        at += count
    if start < len(low):
        yield start, len(low), MIXED


def _blocks(low: Tensor, high: Tensor) -> Iterator[tuple[int, int, int]]:
    """Start, stop and kind of rows that are worked off together."""
    short: list[tuple[int, int, int]] = []
    for start, stop, kind in _runs(low, high):
        if kind == MIXED or stop - start < SHORT:
            short.append((start, stop, kind))
            continue
        yield from _together(short, low, high)
        yield from _cut(start, stop, kind, low, high)
        short = []
    yield from _together(short, low, high)


def _together(runs: list[tuple[int, int, int]], low: Tensor, high: Tensor) -> Iterator[tuple[int, int, int]]:
    """Cut neighbours of several kinds as one run."""
    if runs:
        yield from _cut(runs[0][0], runs[-1][1], MIXED if len(runs) > 1 else runs[0][2], low, high)


def _cut(start: int, stop: int, kind: int, low: Tensor, high: Tensor) -> Iterator[tuple[int, int, int]]:
    """Rows of one kind in blocks, whose triangles do not overlap."""
    step = stop - start
    if kind == FIRST + LAST and (apart := int(high[start] - low[start])) < step:
        step, kind = (apart, kind) if apart >= SHORT else (step, MIXED)
    step = MASKED_ROWS if kind == MIXED else step
    for first in range(start, stop, step):
        yield first, min(first + step, stop), kind


def _shapes(low: Tensor, high: Tensor, kind: int) -> Iterator[tuple[slice, Shape]]:
    """The columns of the parts of a block of rows, and their shape."""
    rows = len(low)
    if kind == MIXED:
        yield from _masked(low, high)
    elif kind != BLIND:
        first, last = (rows > 1 and kind & rising for rising in (FIRST, LAST))
        start, stop = int(low[0]), int(high[0]) + 1
        if first:
            yield slice(start, start + rows), FALLING
            start += rows
        if last:
            stop -= 1
            yield slice(stop, stop + rows), CAUSAL
        if start < stop:
            yield slice(start, stop), ALL


def _masked(low: Tensor, high: Tensor) -> Iterator[tuple[slice, Shape]]:
    blind = low > high
    if bool(blind.all()):
        return
    (first, inner), (outer, last) = ((int(x) for x in ends[~blind].aminmax()) for ends in (low, high))
    ends = [(first, last + 1)]
    if inner <= outer and not bool(blind.any()):
        yield slice(inner, outer + 1), ALL
        ends = [(first, inner), (outer + 1, last + 1)]
    for start, stop in ends:
        if start < stop:
            yield slice(start, stop), (low, high)
