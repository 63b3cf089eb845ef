"""Lowers a call, which knows methods, to a plan, which kernels know."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable

import torch
from torch import Tensor

from ..slots.base import EntropyTemperature, KeyInterval, KeyIntervals, LengthTemperature, LogitMap
from .call import Call
from .geometry import AttentionLayout
from .kernels.kernel import MARGIN, MASK_VALUE
from .plan import AttentionPlan, LogitSpec, Operand, Segment
from .rotary import RotationDelta
from .stages import finish, joint_sinks
from .tables import SHARED, TableCache
from .tracing import keepable, readable, sent, shareable, wide_device, widened

#: An interval, by its method and its number there.
NamedInterval = tuple[tuple[KeyIntervals, int], KeyInterval]


def lower(call: Call) -> AttentionPlan:
    """The plan of a call: methods become segments, tables by distance, factors by row and functions of tensors."""
    config, query, learned = call.config, call.query, frozenset(call.learned or ())
    logits = LogitSpec(float(call.scaling), call.softcap)
    if (logit_map := config.logit_map) is not None:
        length = table_length(call.rows, call.kv_len)
        gain, bias = distance_tables(logit_map, query.shape[1], length, query, call.table_cache, call.strength)
        if call.learned is not None and "logit_map" in call.learned:
            with torch.autocast(query.device.type, enabled=False):
                own = call.learned["logit_map"](gain, bias)
            gain, bias = own[0].to(gain), own[1].to(bias).clamp(min=MASK_VALUE)
        learns = gain.requires_grad or bias.requires_grad
        logits = LogitSpec(logits.scaling, call.softcap, gain, bias, sinks=logit_map.sink_tokens, learns=learns)
    made, score, temperature = segments(call), config.score, config.temperature
    by_length, temper = None, None
    polynomial: tuple[float, ...] = ()
    if isinstance(temperature, EntropyTemperature):
        temper = temperature.prepared(query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32)))
        polynomial = temperature.polynomial
    elif isinstance(temperature, LengthTemperature):
        visible = functools.reduce(torch.add, (segment.counts(call.kv_len) for segment in made))
        by_length = temperature.factor(widened(visible), query.shape[3])
        if by_length.numel() > 1 or "temperature" in learned:
            by_length = sent(by_length, query.device)
    return AttentionPlan(
        query=Operand.of(query),
        key=Operand.of(call.key),
        value=Operand.of(call.value),
        rows=call.rows,
        segments=made,
        logits=logits,
        fold=None if score is None else score.fold,
        cosine=None if score is None else score.cosine,
        by_length=by_length,
        temper=temper,
        polynomial=polynomial,
        sinks=functools.partial(joint_sinks, config, call.table_cache),
        finish=None if config.output_norm is None else functools.partial(finish, config, call.table_cache),
        learned=learned,
        model_sinks=call.sink_logits is not None,
        names={method.slot: method.name for method in config.methods},
        rotation=call.rotation,
        dropout=call.dropout,
        trains=call.trains,
        readable=readable(query),
        keepable=keepable(query),
        asked=call.asked,
        tables=call.table_cache,
        method_id=call.method_id,
    )


def segments(call: Call) -> list[Segment]:
    """The segments that a call's config makes of its rows: each lies in one interval of every method, and may hold no key."""
    if not (methods := call.config.key_intervals):
        return [Segment(call.rows, ())]
    i = call.rows.query_positions()
    named = [[((method, n), interval) for n, interval in enumerate(method.intervals(i))] for method in methods]
    # the number of the first interval that turns a side in some way: intervals that turn keys alike share kept keys
    first_alike: dict[Hashable, int] | None = None if torch.compiler.is_compiling() else {}  # Dynamo compares no functions
    return [_segment(call, intervals, first_alike) for intervals in itertools.product(*named)]


def _segment(call: Call, intervals: tuple[NamedInterval, ...], first_alike: dict[Hashable, int] | None) -> Segment:
    """The keys that lie in all of these intervals."""
    turns: dict[str, RotationDelta] = {}
    for (method, n), interval in intervals:
        for side, remap in (("query", interval.query), ("key", interval.key)):
            if remap is not None:
                first = n if first_alike is None else first_alike.setdefault((method, side, remap, interval.spectrum), n)
                turns[side] = RotationDelta(call.rotation, remap, interval.spectrum, (method, first, side), first)
    # together, not one after another: positions of narrowed rows cannot be looked up again
    firsts = [interval.first for _, interval in intervals if interval.first is not None]
    lasts = [interval.last for _, interval in intervals if interval.last is not None]
    return Segment(
        call.rows,
        tuple(name for name, _ in intervals),
        functools.reduce(torch.maximum, firsts) if firsts else None,
        functools.reduce(torch.minimum, lasts) if lasts else None,
        **turns,
    )


def table_length(rows: AttentionLayout, kv_len: int) -> int:
    """The length of tables by distance: MARGIN beyond every distance in the call.

    Distances are rounded up to a power of two, so that calls of many lengths share tables; not inside a graph, which serves
    any length.
    """
    if not (readable(rows.index) or shareable(rows.index)):
        return kv_len + rows.index.shape[1] + MARGIN  # kernels refuse distances beyond it
    return (1 << max(10, rows.farthest(kv_len).bit_length())) + MARGIN


def distance_tables(
    logit_map: LogitMap,
    heads: int,
    length: int,
    like: Tensor,
    tables: TableCache = SHARED,
    strength: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map's gain and bias by distance, built in float64, in the dtype of the logits."""
    dtype, device = torch.float64 if like.dtype == torch.float64 else torch.float32, like.device

    def build() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            other = (strength,) if logit_map.blends else ()
            gain, bias = (x.to(dtype) for x in logit_map.checked_tables(heads, length, wide_device(device), *other))
            return sent(gain, device), sent(bias.clamp(min=MASK_VALUE), device)

    if strength is not None:
        return build()
    gain, bias = tables.beside(like, (logit_map, heads, length, device, dtype), build)
    return gain, bias
