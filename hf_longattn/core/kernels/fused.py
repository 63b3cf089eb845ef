"""Attention by PyTorch's fused kernels, forward and backward, where logits are scaling q . k alone.

Rows that are a lower triangle take sdpa itself. Else each row sees an interval of a segment's keys, the segment is cut into
triangles and rectangles (see `bands`), and the parts of all segments are joined by their logsumexps. In the backward pass the
kernel of each part is given the joint output and the joint logsumexp, and so computes its share of the joint gradient. On CUDA
the Triton kernel takes a segment that makes many parts.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TypeAlias

import torch
from torch import Tensor

from ..geometry import AttentionLayout
from ..plan import AttentionPlan, LogitSpec, Operand
from ..tracing import keepable, readable
from . import bands, operators, programs, sdpa, triton
from .by_segment import BySegment
from .kernel import MASK_VALUE, Kernel, KernelCall, KernelFailure, Result, by_token
from .precision import halves_are_fast
from .tiles import TiledCall

#: As many parts a segment may have on a GPU, each of which is a launch or two.
FEW_PARTS = 16
#: The parts of a segment; or its rows, which Triton computes as a whole, since it takes any intervals.
Pieces: TypeAlias = "list[bands.Part] | AttentionLayout"


def prepare(plan: AttentionPlan) -> BySegment:
    """sdpa of a plan that is one, else the parts of all segments."""
    if plan.is_product and (plan.rows.causal_columns is not None or plan.dropout or _not_in_parts(plan) is not None):
        return BySegment(plan, sdpa.run)
    if _has_triton(plan.query):  # it finds entropies in less time
        return BySegment(plan, triton.run, joined=joined, product=sdpa.run)
    return BySegment(plan, run, wide=True, joined=joined, product=sdpa.run)


def why_not(plan: AttentionPlan) -> str | None:
    """The reason why fused kernels cannot compute a plan, or None; sdpa takes any mask, holding all pairs."""
    if plan.logits.scaling <= 0:  # they scale what causality hides, -inf, too
        return f"scaling is {plan.logits.scaling:g}, and fused kernels need one above 0"
    if plan.is_product:
        return None
    return "it has no dropout" if plan.dropout else _not_in_parts(plan)


def _not_in_parts(plan: AttentionPlan) -> str | None:
    known = readable(plan.rows.index)
    rows = _simple(plan.rows, plan.kv_len) if known else plan.rows
    if rows.allowed is not None and (known or not rows.hides_tokens):  # else it shows when it runs: see `_fits`
        return "the rows are masked, which only the other backends compute"
    return sdpa.why_not(plan.query, plan.value)


def joined(calls: list[KernelCall], sinks: Tensor | None) -> Tensor:
    """The output over all segments and sinks (see `BySegment`), with the gradients of all at once."""
    pieces, scalings = [_pieces(call) for call in calls], [call.spec.scaling for call in calls]
    value, sides = calls[0].value, [x for call in calls for x in (call.query, call.key)]
    taped = any(map(operators.taped, calls)) or (sinks is not None and sinks.requires_grad and torch.is_grad_enabled())
    with torch.autocast(calls[0].query.device.type, enabled=False):
        if not taped:
            return _output(pieces, scalings, sinks, value, *sides)[0]
        learned = sinks is not None and (sinks.requires_grad or not keepable(sinks))
        gradients = functools.partial(_joined_gradients, learned)
        return operators.Function.apply("fused", _output, gradients, pieces, scalings, sinks, value, *sides)[0]  # type: ignore[no-untyped-call]


def _joined_gradients(
    learned: bool,
    d_out: Tensor,
    _: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: list[Pieces],
    scalings: list[float],
    sinks: Tensor | None,
    value: Tensor,
    *sides: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of `_output`'s arguments; that of sinks if they are learned."""
    d_value, d_sides = _input_gradients(pieces, scalings, (d_out, out, lse), value, sides)
    d_sinks = None
    if sinks is not None and learned:  # its probability times what all others have in common
        delta = (d_out.to(out.dtype) * out).sum(-1)
        d_sinks = -((_finite(sinks, lse.dtype) - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
    own = (d.to(x.dtype) for d, x in zip(d_sides, sides, strict=True))
    return None, None, d_sinks, d_value.to(value.dtype), *own


def _simple(rows: AttentionLayout, kv_len: int) -> AttentionLayout:
    simple: AttentionLayout = rows.once(("simple", kv_len), lambda: rows.simplified(kv_len))
    return simple


def _pieces(call: KernelCall) -> Pieces:
    """Few large triangles and rectangles, for which a GPU's fused kernels have their speed; else all at once."""
    own = bands.parts(call)
    if not _has_triton(call.query):
        return own
    easy = len(own) <= FEW_PARTS and all(part.shape in (bands.ALL, bands.CAUSAL) for part in own)
    return own if easy else call.rows


def _has_triton(query: Tensor | Operand) -> bool:
    """Tell whether the Triton kernel computes such calls on a GPU."""
    return sdpa.device(query) == "cuda" and triton.why_not_triton(query) is None


def _whole(rows: AttentionLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> KernelCall:
    return KernelCall(query, key, value, rows, LogitSpec(scaling), with_lse=True)


def _output(
    pieces: list[Pieces], scalings: list[float], sinks: Tensor | None, value: Tensor | None, *sides: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted sum of values, or of keys without any, and the logsumexp over all segments and sinks.

    Args:
        sides: query and key of each segment.
    """
    query, key, value, wide = _computed(value, sides)
    shape, masked = query[0].shape, False
    whole = isinstance(pieces[0], list) and _begins(pieces[0][:1], shape)  # then its own output and logsumexp begin
    if isinstance(pieces[0], list) and not whole:
        out, lse = by_token(query[0], dtype=wide), query[0].new_full(shape[:3], float("-inf"), dtype=_finer(wide))
        if not _begins(pieces[0], shape):
            out.zero_()
    for n, (own, scaling) in enumerate(zip(pieces, scalings, strict=True)):
        if not isinstance(own, list):
            new, new_lse, _ = triton.run(_whole(own, query[n], key[n], value, scaling))
            if n:
                _join(out, lse, new, new_lse)
            else:
                out, lse = new, new_lse
            continue
        for part in own:
            masked = masked or part.masked
            (own_query,), (own_key, own_value) = part.of_rows(query[n]), part.of_columns(key[n], value)
            result = sdpa.forward(own_query, own_key, own_value, *part.mask(own_query.device), scaling)
            new, new_lse = (part.ordered(x) for x in result)
            place = part.batch, slice(None), part.rows
            if whole and n == 0 and part is own[0]:
                out, lse = new.to(wide), new_lse.to(_finer(wide))
            elif part.first and n == 0:
                out[place], lse[place] = new, new_lse
            else:
                _join(out[place], lse[place], new, new_lse)
    if masked:
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
    """Tell whether a program joins outputs where they lie."""
    return sdpa.device(x) == "cuda" and programs.why_not(x) is None


def _join(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Join output and logsumexp over some keys, in place, with those over others."""
    if _in_place(out):
        with contextlib.suppress(KernelFailure):
            programs.join(out, lse, new, new_lse)
            return
    both = torch.logaddexp(lse, new_lse)
    out.lerp_(new.to(out.dtype), (new_lse - both).exp_()[..., None].to(out.dtype))
    lse.copy_(both)


def _input_gradients(
    pieces: list[Pieces],
    scalings: list[float],
    given: tuple[Tensor, Tensor, Tensor],
    value: Tensor | None,
    sides: tuple[Tensor, ...],
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of values (or of keys in their place), and of `sides`.

    Args:
        given: the gradient of the output, the output and the logsumexp.
    """
    query, key, value, _ = _computed(value, sides)
    d_out, out, lse = given
    wide = lse.dtype
    d_out, out = (_ready(x, query[0].dtype) for x in (d_out, out))
    lse = lse.masked_fill(_blind(lse, query[0]), 0.0)  # the probability of all that is hidden from it is 0
    d_value: Tensor | None = None
    d_sides: list[Tensor] = []
    for n, (own, scaling) in enumerate(zip(pieces, scalings, strict=True)):
        d_query = d_key = None
        if not isinstance(own, list):
            call = _whole(own, query[n], key[n], value, scaling)
            d_query, d_key, own_value, _, _ = triton.gradients(call, d_out, None, None, out, lse, lse.new_empty(0))
            d_value = _added(d_value, own_value, (), value, wide)
            own = []
        begins, dtype = _begins(own, query[n].shape), wide if len(own) > 1 else value.dtype
        for part in own:
            own_d, own_query, own_out, own_lse = part.of_rows(d_out, query[n], out, lse)
            own_key, own_value = part.of_columns(key[n], value)
            sees = own_d, own_query, own_key, own_value, own_out, own_lse
            each = sdpa.backward(*sees, *part.mask(own_query.device), scaling)
            by_query, by_key, by_value = (part.ordered(d) for d in each)
            rows, columns = (part.batch, slice(None), part.rows), (part.batch, slice(None), part.columns)
            d_query = _added(d_query, by_query, rows, query[n], dtype, part.first and begins)
            d_key = _added(d_key, by_key, columns, key[n], dtype)
            d_value = _added(d_value, by_value, columns, value, wide)
        d_sides += [torch.zeros_like(x) if d is None else d for d, x in ((d_query, query[n]), (d_key, key[n]))]
    return torch.zeros_like(value) if d_value is None else d_value, d_sides


def _added(
    total: Tensor | None, d: Tensor, place: tuple[slice, ...], like: Tensor, dtype: torch.dtype, new: bool = False
) -> Tensor:
    """Add the gradient of some vectors of a tensor: the first of all of them is taken as it is, others are added in a dtype.

    Args:
        total: what was added before; None: nothing.
        new: these are the first of their place, and every place has one.
    """
    if total is None and d.shape == like.shape:
        return d
    if total is None:
        total = by_token(like, dtype=dtype) if new else by_token(like, dtype=dtype).zero_()
    if new:
        total[place] = d
        return total
    total = total.to(dtype)
    total[place].add_(d)  # += would copy it onto itself
    return total


def _computed(
    value: Tensor | None, sides: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, torch.dtype]:
    """Queries, keys and values as the kernels take them, and the dtype of joined outputs: a GPU's program joins in place."""
    dtype = sdpa.computed_in(sides[0], value)
    ready = tuple(_ready(x, dtype) for x in sides)
    value = ready[1] if value is None else _ready(value, dtype)
    return ready[::2], ready[1::2], value, dtype if _in_place(ready[0]) else _finer(dtype)


def _blind(lse: Tensor, query: Tensor) -> Tensor:
    """Mark the rows that see no key, by their logsumexp: bool, of its shape."""
    return lse < sdpa.hidden_logit(query.dtype) / 2


def _finite(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """(heads, 1)"""
    return sinks.to(dtype).clamp(min=MASK_VALUE)[:, None]


def _ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _begins(own: list[bands.Part], shape: torch.Size) -> bool:
    """Tell whether every row has a part that is the first of its rows."""
    first = sum((p.batch.stop - p.batch.start) * (p.rows.stop - p.rows.start) for p in own if p.first)
    return first == shape[0] * shape[2]


def _fits(call: KernelCall) -> bool:
    """Tell whether fused kernels compute a call of a graph: its rows are known only when it runs."""
    return _simple(call.rows, call.kv_len).allowed is None and not (call.with_entropy and call.value is not None)


def _attend(call: KernelCall) -> Result:
    """The entropy is lse - scaling q . (sum_j p_j k_j): attention whose values are its keys."""
    if not _fits(call):
        return TiledCall(call).attend()
    out, lse = _output([bands.parts(call)], [call.spec.scaling], None, call.value, call.query, call.key)
    entropy = lse.new_zeros(0)
    if call.with_entropy:
        top = lse.masked_fill(lse == float("-inf"), 0.0)
        entropy = (top - call.spec.scaling * (call.query.to(out.dtype) * out).sum(-1)).clamp_(min=0.0)
    out = call.query.new_zeros(0) if call.value is None else out.to(call.query.dtype)
    return out, lse, entropy


def _gradients(
    call: KernelCall, d_out: Tensor, d_lse: Tensor | None, d_entropy: Tensor | None, out: Tensor, lse: Tensor, entropy: Tensor
) -> tuple[Tensor, ...]:
    if not _fits(call):
        return TiledCall(call).gradients(d_out, d_lse, d_entropy, out, lse, entropy)
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
    d_value, d_sides = _input_gradients([bands.parts(call)], [call.spec.scaling], (d_out, out, lse), call.value, sides)
    d_query, d_key = (d.to(x.dtype) for d, x in zip(d_sides, sides, strict=True))
    d_value = lse.new_zeros(0) if call.value is None else d_value.to(call.value.dtype)
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


#: One segment: its output, or without values its entropy.
run = operators.attention("fused", _attend, _gradients)


def _preferred(plan: AttentionPlan) -> bool:
    """Prefer it for a product over a causal triangle. Else on CUDA where rows may be read; on a CPU unless a temperature by
    entropy acts on other rows, or a score of a method's own on a half precision in which the CPU is fast.
    """
    if plan.is_causal_product:
        return True
    if plan.dropout or _not_in_parts(plan) is not None:
        return False
    if sdpa.device(plan.query) == "cuda":
        return plan.readable and (plan.temper is None or _has_triton(plan.query))
    if plan.temper is not None and plan.rows.causal_columns is None:
        return False
    return sdpa.device(plan.query) == "cpu" and (plan.fold is None or not halves_are_fast(plan.value))


KERNEL = Kernel(prepare, lacks=frozenset({"softcap", "map"}), why_not=why_not, preferred=_preferred)
