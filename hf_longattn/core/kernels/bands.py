"""Attention by PyTorch's fused kernels where logits are scaling q . k alone, over an interval of keys for each row.

Rows are worked off in blocks. All rows of a block see the keys in the middle of their intervals; at either end lies, in most
texts, a triangle, which is causal attention, read backwards where intervals begin; else the ends come under a mask. The parts
of all segments are joined by their logsumexps. In the backward pass the kernel of each part is given the joint output and the
joint logsumexp, and so computes its share of the joint gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..geometry import AttentionLayout
from ..plan import AttentionPlan, LogitSpec
from ..tracing import readable
from . import fused, operators, sdpa, triton
from . import parts as programs
from .by_segment import BySegment
from .kernel import MASK_VALUE, Kernel, KernelCall, KernelFailure, Result
from .precision import halves_are_fast
from .tiles import Blocks

#: Rows whose ends come under a mask together: of what is masked more than half is computed for nothing. Fewer rows than SHORT
#: that go on alike come under a mask with their neighbours.
MASKED_ROWS, SHORT = 256, 64
#: As many parts a segment may have on a GPU, each of which is a launch or two.
FEW_PARTS = 16
#: How the first and the last column that rows see go on from row to row: both stay, or rise by one, FIRST + LAST if both do;
#: otherwise MIXED. BLIND rows see nothing.
STAY, LAST, FIRST, BLIND, MIXED = 0, 1, 2, 4, 5


def run(call: KernelCall) -> Result:
    """One segment: its output, or without values its entropy."""
    flat = operators.flatten(call)
    if not readable(call.query):
        out, lse, entropy = _operator(*flat)
    else:
        out, lse, entropy = _function.apply(*flat) if operators.taped(call) else _attend(call)
    return out, lse if call.with_lse else lse.new_zeros(0), entropy


def joined(calls: list[KernelCall], sinks: Tensor | None) -> Tensor:
    """See `BySegment`."""
    parts, scalings = [_easy_or_whole(call) for call in calls], [call.spec.scaling for call in calls]
    sides = [x for call in calls for x in (call.query, call.key)]
    return _Joined.apply(parts, scalings, sinks, calls[0].value, *sides)[0]  # type: ignore[no-untyped-call]


def why_not(plan: AttentionPlan) -> str | None:
    """The reason why fused kernels cannot compute a plan, or None."""
    known = readable(plan.rows.index)
    rows = _simple(plan.rows, plan.kv_len) if known else plan.rows
    if rows.allowed is not None and (known or not rows.hides_tokens):  # else it shows when it runs: see `_fits`
        return "the rows are masked, which only the other backends compute"
    return fused.why_not(plan.query, plan.value)


class _Shape(Enum):
    """Which pairs of a part are visible."""

    ALL = "all"
    CAUSAL = "the first row sees the first column, each row one more"
    FALLING = "the first row sees every column, each row one less, to the last column"


_Ends: TypeAlias = tuple[Tensor, Tensor]


class _Part(NamedTuple):
    """Some rows with some columns.

    Args:
        shape: a `_Shape`, or the first and the last of all keys that each row sees, int64 (rows,), for a mask.
        first: nothing else was computed of these rows before.
    """

    batch: slice
    rows: slice
    columns: slice
    shape: _Shape | _Ends
    first: bool

    def of_rows(self, *tensors: Tensor) -> list[Tensor]:
        return [self.ordered(x[self.batch, :, self.rows]) for x in tensors]

    def of_columns(self, *tensors: Tensor) -> list[Tensor]:
        return [self.ordered(x[self.batch, :, self.columns]) for x in tensors]

    def ordered(self, x: Tensor) -> Tensor:
        """As the fused kernels take rows and columns, which is causal attention at most; and back."""
        return x.flip(2) if self.shape is _Shape.FALLING else x

    def visible(self, device: torch.device) -> tuple[bool, Tensor | None]:
        """Whether attention is causal, and what a mask hides, as `fused` asks for; it is made when it is needed."""
        if isinstance(self.shape, _Shape):
            return self.shape is not _Shape.ALL, None
        low, high = (ends.to(device) for ends in self.shape)
        columns = torch.arange(self.columns.start, self.columns.stop, device=low.device)
        return False, (columns < low[:, None]) | (columns > high[:, None])


class _Whole(NamedTuple):
    """A segment in one part, for the Triton kernels, which take any intervals."""

    rows: AttentionLayout
    first: bool = True

    def call(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> KernelCall:
        return KernelCall(query, key, value, self.rows, LogitSpec(scaling), with_lse=True)


#: What a segment is computed by.
_Parts: TypeAlias = "list[_Part | _Whole]"


def _simple(rows: AttentionLayout, kv_len: int) -> AttentionLayout:
    simple: AttentionLayout = rows.once(("simple", kv_len), lambda: rows.simplified(kv_len))
    return simple


def _easy_or_whole(call: KernelCall) -> _Parts:
    """Few large triangles and rectangles, for which a GPU's fused kernels have their speed; else all at once."""
    own: _Parts = [*_parts(call)]
    if fused.device(call.query) == "cpu" or triton.why_not_triton(call.query) is not None:
        return own
    easy = all(part.shape in (_Shape.ALL, _Shape.CAUSAL) for part in own if isinstance(part, _Part))
    return own if easy and len(own) <= FEW_PARTS else [_Whole(call.rows)]


def _parts(call: KernelCall) -> list[_Part]:
    """A segment's, kept with its rows."""
    rows, batch, kv_len = call.rows.host, call.query.shape[0], call.kv_len
    parts: list[_Part] = rows.once(("parts", batch, kv_len), lambda: list(_made(rows, batch, kv_len)))
    return parts


def _made(rows: AttentionLayout, batch: int, kv_len: int) -> Iterator[_Part]:
    _, key_start, _, low, high = rows.index.to("cpu").unbind(-1)
    low, high = (low - key_start).clamp(min=0), (high - key_start).clamp(max=kv_len - 1)
    for b in range(len(low)):
        entries = slice(0, batch) if len(low) == 1 else slice(b, b + 1)
        for start, stop, kind in _blocks(low[b], high[b]):
            block = slice(start, stop)
            for n, (columns, shape) in enumerate(_shapes(low[b, block], high[b, block], kind)):
                yield _Part(entries, block, columns, shape, n == 0)


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
    """The same of rows that are worked off together."""
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
    """Neighbours of several kinds."""
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


def _shapes(low: Tensor, high: Tensor, kind: int) -> Iterator[tuple[slice, _Shape | _Ends]]:
    """The columns of the parts of a block of rows, and their shape."""
    rows = len(low)
    if kind == MIXED:
        yield from _masked(low, high)
    elif kind != BLIND:
        first, last = (rows > 1 and kind & rising for rising in (FIRST, LAST))
        start, stop = int(low[0]), int(high[0]) + 1
        if first:
            yield slice(start, start + rows), _Shape.FALLING
            start += rows
        if last:
            stop -= 1
            yield slice(stop, stop + rows), _Shape.CAUSAL
        if start < stop:
            yield slice(start, stop), _Shape.ALL


def _masked(low: Tensor, high: Tensor) -> Iterator[tuple[slice, _Shape | _Ends]]:
    blind = low > high
    if bool(blind.all()):
        return
    (first, inner), (outer, last) = ((int(x) for x in ends[~blind].aminmax()) for ends in (low, high))
    ends = [(first, last + 1)]
    if inner <= outer and not bool(blind.any()):
        yield slice(inner, outer + 1), _Shape.ALL
        ends = [(first, inner), (outer + 1, last + 1)]
    for start, stop in ends:
        if start < stop:
            yield slice(start, stop), (low, high)


def _output(
    parts: list[_Parts], scalings: list[float], sinks: Tensor | None, value: Tensor | None, sides: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The weighted sum of values, or of keys without any, and the logsumexp over all segments and sinks.

    Args:
        sides: query and key of each segment.
    """
    query, key, value, wide = _computed(value, sides)
    shape = query[0].shape
    if parts[0] and isinstance(part := parts[0][0], _Whole):
        out, lse, _ = triton.run(part.call(query[0], key[0], value, scalings[0]))
    else:
        out, lse = query[0].new_empty(shape, dtype=wide), query[0].new_full(shape[:3], float("-inf"), dtype=_finer(wide))
        if not _begins(parts[0], shape):
            out.zero_()
    for n, own in enumerate(parts):
        for part in own:
            if isinstance(part, _Whole):
                if n:
                    new, new_lse, _ = triton.run(part.call(query[n], key[n], value, scalings[n]))
                    _join(out, lse, new, new_lse)
                continue
            (own_query,), (own_key, own_value) = part.of_rows(query[n]), part.of_columns(key[n], value)
            result = fused.forward(own_query, own_key, own_value, *part.visible(own_query.device), scalings[n])
            new, new_lse = (part.ordered(x) for x in result)
            place = part.batch, slice(None), part.rows
            if part.first and n == 0:
                out[place], lse[place] = new, new_lse
            else:
                _join(out[place], lse[place], new, new_lse)
    if any(isinstance(part, _Part) and not isinstance(part.shape, _Shape) for own in parts for part in own):
        nothing = _blind(lse, query[0])
        out.masked_fill_(nothing[..., None], 0.0)
        lse.masked_fill_(nothing, float("-inf"))
    if sinks is not None:
        both = torch.logaddexp(lse, _finite(sinks, lse.dtype))
        out.mul_((lse - both).exp_()[..., None])
        lse = both
    return out, lse


def _finer(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _in_place(x: Tensor) -> bool:
    """Whether a program joins outputs where they lie."""
    return fused.device(x) == "cuda" and programs.why_not(x) is None


def _join(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Output and logsumexp over some keys, in place, with those over others."""
    if _in_place(out):
        with contextlib.suppress(KernelFailure):
            programs.join(out, lse, new, new_lse)
            return
    both = torch.logaddexp(lse, new_lse)
    out.lerp_(new.to(out.dtype), (new_lse - both).exp_()[..., None].to(out.dtype))
    lse.copy_(both)


def _input_gradients(
    parts: list[_Parts],
    scalings: list[float],
    given: tuple[Tensor, Tensor, Tensor],
    value: Tensor | None,
    sides: tuple[Tensor, ...],
) -> tuple[Tensor, list[Tensor]]:
    """Of values (or of keys in their place), and of `sides`.

    Args:
        given: the gradient of the output, the output and the logsumexp.
    """
    query, key, value, _ = _computed(value, sides)
    d_out, out, lse = given
    wide = lse.dtype
    d_out, out = (_ready(x, query[0].dtype) for x in (d_out, out))
    lse = lse.masked_fill(_blind(lse, query[0]), 0.0)  # the probability of all that is hidden from it is 0
    d_value, d_sides = _room(value, wide).zero_(), []
    for n, own in enumerate(parts):
        into, d_key = _room(query[n], wide), _room(key[n], wide).zero_()
        if not _begins(own, into.shape):
            into.zero_()
        for part in own:
            if isinstance(part, _Whole):
                nothing = lse.new_empty(0)
                call = part.call(query[n], key[n], value, scalings[n])
                d_query, *d_columns, _, _ = triton.gradients(call, d_out, None, None, out, lse, nothing)
                place: Any = slice(None)
                columns: Any = slice(None)
            else:
                own_d, own_query, own_out, own_lse = part.of_rows(d_out, query[n], out, lse)
                own_key, own_value = part.of_columns(key[n], value)
                sees = own_d, own_query, own_key, own_value, own_out, own_lse
                visible = part.visible(own_query.device)
                d_query, *d_columns = (part.ordered(d) for d in fused.backward(*sees, *visible, scalings[n]))
                place, columns = (part.batch, slice(None), part.rows), (part.batch, slice(None), part.columns)
            if part.first:
                into[place] = d_query
            else:
                into[place] += d_query
            for total, d in zip((d_key, d_value), d_columns, strict=True):
                total[columns] += d
        d_sides += [into, d_key]
    return d_value, d_sides


def _computed(
    value: Tensor | None, sides: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, torch.dtype]:
    """Queries, keys and values as the kernels take them, and the dtype of joined outputs: a GPU's program joins in place."""
    dtype = fused.computed_in(sides[0], value)
    ready = tuple(_ready(x, dtype) for x in sides)
    value = ready[1] if value is None else _ready(value, dtype)
    return ready[::2], ready[1::2], value, dtype if _in_place(ready[0]) else _finer(dtype)


def _blind(lse: Tensor, query: Tensor) -> Tensor:
    """Which rows see nothing."""
    return lse < fused.hidden_logit(query.dtype) / 2


def _finite(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """(heads, 1)"""
    return sinks.to(dtype).clamp(min=MASK_VALUE)[:, None]


def _ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _room(like: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, heads, length, head_dim), laid out as the fused kernels lay out gradients."""
    return torch.empty_like(like.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)


def _begins(own: _Parts, shape: torch.Size) -> bool:
    """Whether the first parts of rows are all rows."""
    if isinstance(own[0] if own else None, _Whole):
        return True
    parts = [part for part in own if isinstance(part, _Part)]
    return sum((p.batch.stop - p.batch.start) * (p.rows.stop - p.rows.start) for p in parts if p.first) == shape[0] * shape[2]


class _Joined(torch.autograd.Function):
    """`_output` of all segments; outside of graphs."""

    @staticmethod
    def forward(parts, scalings, sinks, value, *sides):  # type: ignore[no-untyped-def]
        with torch.autocast(sides[0].device.type, enabled=False):
            return _output(parts, scalings, sinks, value, sides)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.parts, ctx.scalings, *tensors = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, d_out, _):  # type: ignore[no-untyped-def]
        gradients = _JoinedBackward.apply(ctx.parts, ctx.scalings, d_out, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, None, *gradients

    vmap = operators.refusal(operators.NO_VMAP.format("bands"))
    jvp = operators.refusal(operators.NO_FORWARD.format("bands"))


class _JoinedBackward(torch.autograd.Function):
    """The gradients outside of graphs; theirs are refused."""

    @staticmethod
    def forward(parts, scalings, d_out, out, lse, sinks, value, *sides):  # type: ignore[no-untyped-def]
        with torch.autocast(sides[0].device.type, enabled=False):
            d_value, d_sides = _input_gradients(parts, scalings, (d_out, out, lse), value, sides)
            d_sinks = None
            if sinks is not None:  # its probability times what all others have in common
                delta = (d_out.to(out.dtype) * out).sum(-1)
                d_sinks = -((_finite(sinks, lse.dtype) - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
        return d_sinks, d_value.to(value.dtype), *(d.to(x.dtype) for d, x in zip(d_sides, sides, strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    vmap = operators.refusal(operators.NO_VMAP.format("bands"))
    backward = operators.refusal(operators.NO_SECOND.format("bands"))


def _fits(call: KernelCall) -> bool:
    """Whether a call in a graph turned out to be one for fused kernels: what its rows hide is known only when it runs."""
    return _simple(call.rows, call.kv_len).allowed is None and not (call.with_entropy and call.value is not None)


def _attend(call: KernelCall) -> Result:
    """The entropy is lse - scaling q . (sum_j p_j k_j): attention whose values are its keys."""
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        if not _fits(call):
            return Blocks(call).attend()
        out, lse = _output([[*_parts(call)]], [call.spec.scaling], None, call.value, (call.query, call.key))
        entropy = lse.new_zeros(0)
        if call.with_entropy:
            top = lse.masked_fill(lse == float("-inf"), 0.0)
            entropy = (top - call.spec.scaling * (call.query.to(out.dtype) * out).sum(-1)).clamp_(min=0.0)
        return call.query.new_zeros(0) if call.value is None else out.to(call.query.dtype), lse, entropy


def _gradients(
    call: KernelCall, d_out: Tensor, d_lse: Tensor | None, d_entropy: Tensor | None, out: Tensor, lse: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        if not _fits(call):
            return Blocks(call).gradients(d_out, d_lse, d_entropy, out, lse, entropy)
        delta = torch.zeros_like(lse)
        if call.value is not None:
            d_out, out = d_out.to(lse.dtype), out.to(lse.dtype)
            delta += (d_out * out).sum(-1)
        elif d_entropy is None:
            d_out = torch.zeros_like(call.query, dtype=lse.dtype)
        else:  # that of a logit is -p (logit - its mean): values are keys, and what an output's gradient would be is known
            d_out = -call.spec.scaling * d_entropy[..., None] * call.query.to(lse.dtype)
            delta -= d_entropy * (lse.masked_fill(lse == float("-inf"), 0.0) - entropy)
        if call.value is None or d_lse is not None:
            delta = delta if d_lse is None else delta - d_lse
            d_out, out = _with_product(d_out, delta)
        sides = call.query, call.key
        d_value, d_sides = _input_gradients([[*_parts(call)]], [call.spec.scaling], (d_out, out, lse), call.value, sides)
        d_query, d_key = (d.to(x.dtype).contiguous() for d, x in zip(d_sides, sides, strict=True))
        d_value = lse.new_zeros(0) if call.value is None else d_value.to(call.value.dtype).contiguous()
        return d_query, d_key, d_value, lse.new_zeros(0), lse.new_zeros(0)


def _with_product(d_out: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """An output whose product with its gradient is delta, (batch, heads, q_len), which is all that kernels take from it.

    A gradient too small for that is made large enough, which is still nothing beside delta.
    """
    least = 2.0**-64 * delta.abs()[..., None]
    little = d_out.abs().amax(-1, keepdim=True) <= least
    d_out = torch.where(little & (torch.arange(d_out.shape[-1], device=d_out.device) == 0), least, d_out)
    largest = d_out.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(d_out.dtype).tiny)
    unit = d_out / largest
    return d_out, unit * (delta[..., None] / largest / unit.square().sum(-1, keepdim=True).clamp(min=1.0))


_operator = operators.attention_operator("bands", KernelCall, _attend, _gradients)
_function = operators.attention_function("bands", KernelCall, _attend, _gradients)


def _preferred(plan: AttentionPlan) -> bool:
    """On CUDA where rows may be read and no entropy is asked for.

    On a CPU a temperature by entropy of rows that are not plain takes whole rows, and a score of its own float32.
    """
    if fused.device(plan.query) == "cuda":
        return plan.readable and plan.temper is None
    if plan.temper is not None and plan.rows.plain is None:
        return False
    return fused.device(plan.query) == "cpu" and (plan.fold is None or not halves_are_fast(plan.value))


KERNEL = Kernel(
    "bands",
    functools.partial(BySegment, run=run, wide=True, joined=joined, product=sdpa.run),
    lacks=frozenset({"softcap", "map", "dropout"}),
    why_not=why_not,
    preferred=_preferred,
)
