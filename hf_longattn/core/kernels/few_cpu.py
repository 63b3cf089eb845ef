"""Few queries against many keys on a CPU, as in decoding: `FewOnCPU` chooses one of three ways."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..plan import AttentionPlan, Computation
from ..rotary import Angles
from ..rotated_keys import WORTH, Keep, RotatedKeys
from .by_segment import merge_outputs
from .kernel import MASK_VALUE, Result, entropy, without_denormals
from .sdpa import few_queries, few_queries_with_lse
from .visible_keys import SeenSegment, Turns, VisibleKeys, by_key_head, norms, visible_keys

#: Elements of keys that are worked on at a time where more than a product is to be done with them: what a core's cache holds.
KEY_ELEMENTS = 1 << 19
#: Keys of a head that are then worked on at a time at least; as many heads as fit share the reading of their angles.
KEYS = 1 << 9
#: The factor of each row: a number, or (batch or 1, heads or 1, q_len, 1); None is 1.
Factor: TypeAlias = float | Tensor | None


class FewOnCPU:
    """A `Computation` of few queries, in one of three ways:

    - `Plain`: PyTorch's sdpa, where nothing but a factor acts on queries.
    - `Streamed`: its fused kernel, segment by segment, where logits are products of vectors, rotated or normalised ones too:
      in half precision, for several queries, or for a single segment whose keys are used as they are.
    - `Dense`: the logits of all segments side by side, and one softmax; everything else.

    `Streamed` reads keys that are turned, or normalised, already. A layer whose cache keeps none (see `rotated_keys`) takes
    `Dense` instead, which turns them as it reads them.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        keys, query, spec = visible_keys(plan), plan.query, plan.logits
        self.columns = None if keys.columns == slice(0, plan.kv_len) else keys.columns
        self.blind, self.kept_under = keys.blind, _kept_under(plan, keys)
        turns_queries = any(segment.turn is not None for segment in keys.segments)
        makes_keys = plan.fold is not None or any(segment.angles is not None for segment in keys.segments)
        # nothing acts between products, of whatever they are, and the softmax
        products = plan.asked == "auto" and not (spec.gain is not None or spec.softcap or plan.temper is not None)
        fuses = products and not (turns_queries or plan.fold is not None or plan.has_sinks)
        streams = query.dtype.itemsize == 2 or query.shape[2] > 1 or (len(keys.segments) == 1 and not makes_keys)
        streams &= products and (plan.fold is None or plan.cosine is not None) and query.shape[3] == plan.value.shape[3]
        #: of layers whose turned keys are kept, and of others; None: no key is visible
        self.way: Plain | Streamed | Dense | None = None
        self.way_without_kept: Plain | Streamed | Dense | None = None
        if not keys.segments:
            return
        if fuses:
            self.way = self.way_without_kept = Plain(plan, keys)
        elif streams:
            self.way = streamed = Streamed(plan, keys)
            self.way_without_kept = Dense(plan, keys, streamed.turns) if makes_keys else streamed
        else:
            self.way = self.way_without_kept = Dense(plan, keys)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, factor: Factor, sinks: Tensor | None, keep: Keep | None
    ) -> Tensor:
        factor = factor[..., None] if isinstance(factor, Tensor) else factor
        kept = None if keep is None or self.kept_under is None else keep(self.kept_under, key)
        if self.columns is not None:
            key, value = key[:, :, self.columns], value[:, :, self.columns]
        way = self.way_without_kept if kept is None else self.way
        if way is None:
            return query.new_zeros(*query.shape[:3], value.shape[3])
        if isinstance(way, Plain) or not torch.is_autocast_enabled("cpu"):  # sdpa is as wide as that of the model itself
            out = way.run(query, key, value, factor, sinks, kept)
        else:
            with torch.autocast("cpu", enabled=False):  # products are to be as wide as logits
                out = way.run(query, key, value, factor, sinks, kept)
        return out if self.blind is None else out.masked_fill(self.blind, 0.0)


def few_on_cpu(plan: AttentionPlan) -> Computation:
    """`FewOnCPU`, or of it `Plain` alone where all keys are visible to it."""
    few = FewOnCPU(plan)
    if isinstance(few.way, Plain) and few.columns is None and few.blind is None:
        return few.way
    return few


def _kept_under(plan: AttentionPlan, keys: VisibleKeys) -> Hashable:
    """The name under which turned keys, or norms, are kept for later tokens; None: there are none, or too few."""
    rows, worth = plan.rows, max((s.size for s in keys.segments if s.angles is not None or plan.fold is not None), default=0)
    if worth < WORTH or plan.method_id is None or rows.key_ids is not None or rows.index.shape[1] == plan.kv_len:
        return None
    if plan.key.dtype.itemsize == 2 and plan.asked != "auto":  # which computes in float32 throughout
        return None
    places = rows.index[:, 0, 1:3].flatten().tolist()  # where keys and texts begin
    return plan.method_id, plan.rotation, plan.key.dtype, tuple(places)


class Plain:
    """Run sdpa on queries times their factor."""

    def __init__(self, plan: AttentionPlan, keys: VisibleKeys) -> None:
        self.allowed, self.scaling = None if keys.hidden is None else ~keys.hidden, plan.logits.scaling

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, factor: Factor, *_: object) -> Tensor:
        """A `Computation` of its own, where it sees all keys."""
        return self.run(query, key, value, factor[..., None] if isinstance(factor, Tensor) else factor)

    def run(self, query: Tensor, key: Tensor, value: Tensor, factor: Factor, *_: object) -> Tensor:
        scaling = self.scaling
        if isinstance(factor, Tensor):
            query = (query * factor).to(query.dtype)
        elif factor is not None:
            scaling *= factor
        return few_queries(query, key, value, self.allowed, scaling).transpose(1, 2)


class Streamed:
    """Run the fused kernel on one segment after another, and join them by their logsumexps."""

    def __init__(self, plan: AttentionPlan, keys: VisibleKeys) -> None:
        self.keys, self.turns, self.scaling, self.cosine = keys, keys.turns(None), plan.logits.scaling, plan.cosine
        masks = [segment.mask for segment in keys.segments]
        #: what is added to the logits of each segment, of the shape of its mask; None: nothing
        self.biases = [None if m is None else torch.zeros_like(m, dtype=plan.wide).masked_fill_(~m, MASK_VALUE) for m in masks]

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, factor: Factor, sinks: Tensor | None, kept: RotatedKeys | None
    ) -> Tensor:
        keys, rows, scaling = self.keys, query.to(self.keys.wide), self.scaling
        if self.cosine is not None:
            rows, scaling = rows / norms(rows), self.cosine
        if isinstance(factor, Tensor):
            rows = rows * factor
        elif factor is not None:
            scaling *= factor
        results: list[Result] = []
        each = zip(keys.segments, keys.turned_queries(rows, self.turns), keys.cut(value), self.biases, strict=True)
        for segment, turned, values, bias in each:
            # of the two queries that meet the parts of a key the first, since keys are turned; autocast halves values alone
            turned = turned[..., : query.shape[3]].to(query.dtype).view(*key.shape[:2], -1, query.shape[3])
            made = keys.turned_keys(segment, key, kept, self.cosine is not None)
            out, lse = few_queries_with_lse(turned, made.to(query.dtype), values.to(query.dtype), bias, scaling)
            results.append((out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3]), lse))
        return merge_outputs(results, sinks)


class Dense:
    """Compute the logits of all segments side by side, (batch * kv_heads, rows, keys), and one softmax.

    Args:
        turns: those of a `Streamed`; None: its own, which, or else the gain, are multiplied by scaling once for all layers.
    """

    def __init__(self, plan: AttentionPlan, keys: VisibleKeys, turns: Turns | None = None) -> None:
        spec, scales = plan.logits, turns is None and plan.fold is None and not plan.logits.softcap
        self.keys, self.softcap, self.temper, self.fold, self.cosine = keys, spec.softcap, plan.temper, plan.fold, plan.cosine
        hidden = None if keys.hidden is None else keys.without_gaps(keys.hidden)
        self.hidden = None if hidden is None or not hidden.any() else hidden
        self.turns = keys.turns(spec.scaling if scales else None) if turns is None else turns
        scales &= self.turns is not None or spec.gain is not None
        self.scaling: Any = None if scales else spec.scaling
        self.map = None if spec.gain is None else self._map(plan, spec.scaling if scales and self.turns is None else None)

    def _map(self, plan: AttentionPlan, scaling: float | None) -> tuple[Tensor, Tensor]:
        """Gain and bias of each key, (batch or 1, kv_heads or 1, rows or 1, keys); MASK_VALUE of hidden ones."""
        spec, keys = plan.logits, self.keys
        t = keys.without_gaps(plan.rows.distance(plan.kv_len)[..., keys.columns])
        gain, bias = (x[:, t].transpose(0, 1) for x in (spec.gain, spec.bias) if x is not None)
        if spec.sinks:
            which = keys.without_gaps(plan.rows.sinks(plan.kv_len, spec.sinks)[:, None, :, keys.columns])
            gain, bias = gain.masked_fill(which, 1.0), bias.masked_fill(which, 0.0)
        gain, bias = by_key_head(gain if scaling is None else gain * scaling, plan), by_key_head(bias, plan)
        return gain, bias if self.hidden is None else bias.masked_fill(self.hidden, MASK_VALUE)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, factor: Factor, sinks: Tensor | None, kept: RotatedKeys | None
    ) -> Tensor:
        logits = self._logits(query, key, factor, kept)
        if self.map is not None:
            own = logits.view(-1, self.keys.kv_heads, *logits.shape[1:])
            torch.addcmul(self.map[1], own, self.map[0], out=own)
        elif self.hidden is not None:
            logits.view(-1, self.keys.kv_heads, *logits.shape[1:]).masked_fill_(self.hidden, MASK_VALUE)
        if self.temper is not None:
            log_p = torch.log_softmax(logits, -1)
            by_row = self.temper(entropy(log_p).view(query.shape[:3])).view(*logits.shape[:-1], 1)
            logits = (log_p if sinks is None else logits).mul_(by_row)  # a constant for each row counts beside sinks alone
            if self.hidden is not None:
                logits.view(-1, self.keys.kv_heads, *logits.shape[1:]).masked_fill_(self.hidden, MASK_VALUE)
        weights = torch.softmax(logits, -1)
        out = self._averaged(weights if self.map is None else without_denormals(weights), value).view(*query.shape[:3], -1)
        return out if sinks is None else merge_outputs([(out, logits.logsumexp(-1).view(query.shape[:3]), logits)], sinks)

    def _logits(self, query: Tensor, key: Tensor, factor: Factor, kept: RotatedKeys | None) -> Tensor:
        """From the score to the temperature by length; 0 outside of all segments."""
        keys, rows, scaling, normed = self.keys, query.to(self.keys.wide), self.scaling, self.cosine is not None
        if self.cosine is not None:
            rows, scaling = rows / norms(rows), self.cosine
        elif self.fold is not None:
            kept, (rows, key, scaling) = None, self.fold(rows, key.to(keys.wide))
        if self.softcap:
            scaling /= self.softcap
        elif factor is not None:
            scaling = factor if scaling is None else scaling * factor
        rows = rows if scaling is None else rows * scaling
        each = keys.turned_queries(rows, self.turns)
        if kept is None:
            parts = zip(each, keys.cut(key), keys.segments, strict=True)
            scores = [_scores(turned, part, segment.angles, normed) for turned, part, segment in parts]
        else:
            scores = [self._kept_scores(turned, key, one, kept) for turned, one in zip(each, keys.segments, strict=True)]
        if keys.sizes is None:
            logits = self._overlaid(scores, key.shape[2])
        else:
            logits = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        if self.softcap:
            logits.tanh_().mul_(self.softcap)
            if factor is not None:
                logits.view(*query.shape[:3], -1).mul_(factor)
        return logits

    def _kept_scores(self, rows: Tensor, key: Tensor, segment: SeenSegment, kept: RotatedKeys) -> Tensor:
        """`_scores` of a segment whose keys are turned, and their norms taken, once."""
        scores = _scores(rows[..., : key.shape[3]], self.keys.turned_keys(segment, key, kept, False), None, False)
        if self.cosine is not None:
            inverse = self.keys.kept_of(("norms", segment.name), segment, key, kept, lambda k, _: norms(k).reciprocal_())
            scores.mul_(inverse.flatten(0, 1).mT)
        return scores

    def _overlaid(self, scores: list[Tensor], columns: int) -> Tensor:
        """The scores of segments that overlap, each for the rows that see it there."""
        logits = scores[0].new_zeros(*scores[0].shape[:2], columns).unflatten(0, (-1, self.keys.kv_heads))
        for segment, own in zip(self.keys.segments, scores, strict=True):
            into = logits[..., segment.columns]
            own = own.view_as(into)
            into.copy_(own if segment.mask is None else torch.where(segment.mask, own, into))
        return logits.flatten(0, 1)

    def _averaged(self, weights: Tensor, value: Tensor) -> Tensor:
        if not self.keys.gaps:
            return _sums(weights, value)
        shares = weights.split_with_sizes([segment.size for segment in self.keys.segments], -1)
        return functools.reduce(torch.add, map(_sums, shares, self.keys.cut(value)))


def _scores(rows: Tensor, key: Tensor, angles: Angles | None, normed: bool) -> Tensor:
    """q . k of one segment, (batch * kv_heads, rows, keys).

    Args:
        rows: (batch * kv_heads, rows, head_dim), under `angles` beside each query what their sine part is multiplied by.
        key: (batch, kv_heads, keys, head_dim).
    """
    batch, heads, keys, width = key.shape
    if (angles is None and not normed and key.dtype == rows.dtype) or key.numel() <= KEY_ELEMENTS:
        return _read(rows, key, angles, normed)
    out = rows.new_empty(*rows.shape[:2], keys)
    own, into = (x.view(batch, heads, *x.shape[1:]) for x in (rows, out))
    turns = [x.expand(batch, heads, -1, -1) for x in angles or ()]
    step = _at_a_time(key)
    at_once = max(KEY_ELEMENTS // (step * width), 1)
    entries, shared = (batch, heads) if batch * heads <= at_once else (1, at_once)
    cuts = (keys, step), (batch, entries), (heads, shared)
    buffer = rows.new_empty(entries, shared, step, width)
    for c, b, h in itertools.product(*([slice(i, i + size) for i in range(0, length, size)] for length, size in cuts)):
        part, turn = into[b, h, :, c], (turns[0][b, h, c], turns[1][b, h, c]) if turns else None
        part.copy_(_read(own[b, h].flatten(0, 1), _widened(key[b, h, c], buffer), turn, normed).view_as(part))
    return out


def _read(rows: Tensor, key: Tensor, angles: Angles | None, normed: bool) -> Tensor:
    """`_scores` of keys that a core's cache holds."""
    key = key.to(rows.dtype)
    if angles is None:
        out = torch.bmm(rows, key.flatten(0, 1).mT)
    elif rows.shape[1] == 1:  # a query of its own for each key takes less than two products
        query, half = rows.view(*key.shape[:2], 1, -1).chunk(2, -1)
        out = (angles[0] * query).addcmul_(angles[1], half).mul_(key).sum(-1).flatten(0, 1)[:, None]
    else:
        out = torch.bmm(rows, torch.cat([angles[0] * key, angles[1] * key], -1).flatten(0, 1).mT)
    return out.div_(norms(key).flatten(0, 1).mT) if normed else out


def _sums(weights: Tensor, value: Tensor) -> Tensor:
    """The weighted sums of values (batch, kv_heads, keys, width), (batch * kv_heads, rows, width) in the dtype of weights."""
    if value.dtype == weights.dtype:
        return torch.bmm(weights, value.flatten(0, 1))
    (batch, heads, keys, width), step = value.shape, _at_a_time(value)
    out, buffer = weights.new_zeros(*weights.shape[:2], width), weights.new_empty(batch, heads, step, width)
    for start in range(0, keys, step):
        c = slice(start, start + step)
        out.baddbmm_(weights[..., c], _widened(value[:, :, c], buffer).flatten(0, 1))
    return out


def _at_a_time(x: Tensor) -> int:
    """The number of keys that are worked on at a time, of (batch, kv_heads, keys, width)."""
    batch, heads, keys, width = x.shape
    return min(max(KEY_ELEMENTS // (batch * heads * width), KEYS), keys)


def _widened(x: Tensor, buffer: Tensor) -> Tensor:
    """x in the dtype of a buffer, which is written to: a new tensor for each part would be new memory each time."""
    return x if x.dtype == buffer.dtype else buffer[tuple(map(slice, x.shape))].copy_(x)
