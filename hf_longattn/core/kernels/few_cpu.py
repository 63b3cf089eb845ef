"""Few queries against many keys on a CPU, as in decoding: dense over the keys of all segments together.

What depends on positions alone (which keys are seen, how they are turned, gain and bias of each) is prepared once; a layer is
then a few products. Keys are turned, and divided by their norms, as they are read, unless whoever calls keeps what was made of
them for the token before (see `rotated_keys`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..plan import AttentionPlan, Segment
from ..rotated_keys import AHEAD, WORTH, Keep, RotatedKeys
from .by_segment import merge_outputs
from .kernel import MASK_VALUE, entropy
from .sdpa import few, few_queries

#: Elements of keys that are worked on at a time where more than a product is to be done with them: what a core's cache holds.
KEY_ELEMENTS = 1 << 19
#: Keys of a head that are then worked on at a time at least; as many heads as fit share the reading of their angles.
KEYS = 1 << 9


class SeenSegment(NamedTuple):
    """The keys of a segment that some row sees.

    Args:
        columns: theirs, counted from the first column that the call computes.
        own: bool (batch or 1, heads or 1, q_len, keys), which of them each row sees; None: all.
        turn: the matrix that queries are multiplied by, (batch or 1, key heads or 1, q_len, head_dim, head_dim); None: queries
            are not turned. With `angles` its last dimension is 2 head_dim: the query to meet c k, and the one to meet s k.
        angles: c and s of keys (see `RotationDelta.by_feature`), each (batch or 1, key heads or 1, keys, head_dim); None: keys
            are not turned.
        beyond: `angles` with those of up to AHEAD keys more, which are turned with these where rotated keys are kept.
        interval: see `RotationDelta`; the keys of segments with one number are turned alike.
    """

    columns: slice
    own: Tensor | None
    turn: Tensor | None
    angles: tuple[Tensor, Tensor] | None
    beyond: tuple[Tensor, Tensor] | None
    interval: int

    @property
    def size(self) -> int:
        return self.columns.stop - self.columns.start


#: All that layers share whose keys are seen, and turned, alike: the columns that some row sees; segments in the order of their
#: columns; which of these a row does not see, bool (batch or 1, heads or 1, q_len, keys); rows that see none, (..., q_len, 1).
Visible: TypeAlias = tuple[slice, tuple[SeenSegment, ...], Tensor | None, Tensor | None]


def _visible(plan: AttentionPlan) -> Visible:
    q_len = plan.query.shape[2]
    among = [(segment, *segment.visible_columns(plan.kv_len)) for segment in plan.segments]
    found = sorted(((s, c, own) for s, c, own in among if c is not None), key=lambda x: x[1].start)
    whole = slice(min((c.start for _, c, _ in found), default=0), max((c.stop for _, c, _ in found), default=0))
    seen = tuple(_seen(plan, segment, columns, own, whole.start) for segment, columns, own in found)
    total, width = sum(one.size for one in seen), whole.stop - whole.start
    if seen and all(one.own is None for one in seen):  # a key is in one segment of each row: no columns are shared
        return whole, seen, None if total == width else _hidden(seen, q_len, width), None
    hidden = _hidden(seen, q_len, width)
    blind = hidden.all(-1, keepdim=True)
    return whole, seen, hidden if hidden.any() else None, blind if blind.any() else None


def _hidden(seen: tuple[SeenSegment, ...], q_len: int, width: int) -> Tensor:
    """Which keys a row sees in no segment, bool (batch or 1, heads or 1, q_len, width)."""
    shapes = [one.own.shape[:3] for one in seen if one.own is not None]
    batch, heads = (max((shape[d] for shape in shapes), default=1) for d in (0, 1))
    hidden = torch.ones(batch, heads, q_len, width, dtype=torch.bool, device="cpu")
    for one in seen:
        hidden[..., one.columns] &= False if one.own is None else ~one.own
    return hidden


def _seen(plan: AttentionPlan, segment: Segment, columns: slice, own: Tensor | None, first: int) -> SeenSegment:
    width, wide = plan.query.shape[3], plan.wide
    turn = angles = beyond = None
    if segment.key is not None:
        j = plan.rows.key_places(plan.kv_len)[..., columns.start : columns.stop + AHEAD]
        cos, sin = segment.key.by_feature(j, width, plan.tables)
        beyond = cos.transpose(1, 2).to(wide), sin.transpose(1, 2).to(wide)
        size = columns.stop - columns.start
        angles = beyond[0][:, :, :size], beyond[1][:, :, :size]
    if (side := segment.query or segment.key) is not None:
        like, parts = torch.empty(0, dtype=wide, device="cpu"), 1 if angles is None else 2
        rotation = side.known_rotation
        basis = plan.tables.get(("basis", rotation, width, wide), lambda: rotation.basis(width, like))
        turn, other = (x[None, None, None, :, :parts] for x in basis)
        if segment.query is not None:
            by_feature = segment.query.by_feature(plan.rows.query_places(), width)
            cos, sin = (x.transpose(1, 2)[..., None, None, :].to(wide) for x in by_feature)
            turn = torch.addcmul(turn * cos, other, sin)
        turn = turn.flatten(-2)
    interval = 0 if segment.key is None else segment.key.interval
    return SeenSegment(slice(columns.start - first, columns.stop - first), own, turn, angles, beyond, interval)


class FewOnCPU:
    """A `Computation` of few queries, in one of three ways:

    - `_fused`: PyTorch's sdpa, where nothing but a factor acts on queries.
    - `_streamed`: its fused kernel on one segment after another, joined by their logsumexps, where logits are products of what
      is turned or normalised; in half precision, of several queries, or where it takes fewer steps.
    - `_dense`: the logits of all segments side by side, and one softmax; everything else.

    Inside, the queries that share a key head are rows of it: (batch * kv_heads, group * q_len, head_dim).
    """

    def __init__(self, plan: AttentionPlan) -> None:
        query, kv_len = plan.query, plan.kv_len
        alike = tuple((s.name, s.query is None, s.key is None) for s in plan.segments), kv_len, query.shape[3], query.dtype
        shown: Visible = plan.rows.once((*alike, plan.rotation), functools.partial(_visible, plan))
        columns, self.segments, hidden, self.blind = shown
        self.columns = None if columns == slice(0, kv_len) else columns
        self.first, self.rotation = columns.start, plan.rotation
        self.kept_under = self._name_of_kept(plan)
        self.scaling, self.softcap = plan.logits.scaling, plan.logits.softcap
        self.fold, self.cosine, self.temper = plan.fold, plan.cosine, plan.temper
        self.q_len, self.kv_heads, self.group = query.shape[2], plan.key.shape[1], query.shape[1] // plan.key.shape[1]
        self.rows, self.wide = (self.group * self.q_len, query.shape[3]), plan.wide
        turned = any(segment.turn is not None for segment in self.segments)
        acts = turned or plan.fold is not None or plan.has_sinks or plan.temper is not None
        self.fuses = not (acts or self.softcap or plan.logits.gain is not None) and plan.asked == "auto"
        if not self.fuses:
            self._prepare(plan, columns, hidden)
            return
        self.allowed = None if hidden is None else ~self._grouped(hidden)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None = None,
        sinks: Tensor | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        factor = factor[..., None] if isinstance(factor, Tensor) else factor
        kept = None if keep is None or self.kept_under is None else keep(self.kept_under, key)
        if self.columns is not None:
            key, value = key[:, :, self.columns], value[:, :, self.columns]
        if not self.segments:  # nothing is visible
            out = query.new_zeros(*query.shape[:3], value.shape[3])
        elif self.fuses:
            out = self._fused(query, key, value, factor)
        else:
            run = self._streamed if self.streams and (kept is not None or not self.makes) else self._dense
            with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
                out = run(query, key, value, factor, sinks, kept)  # its products are to be as wide as its logits
        return out if self.blind is None else out.masked_fill(self.blind, 0.0)

    def _name_of_kept(self, plan: AttentionPlan) -> Hashable:
        """The name under which rotated keys, or norms, are kept for later tokens; None: there are none, or too few."""
        worth = max((s.size for s in self.segments if s.angles is not None or plan.fold is not None), default=0)
        rows, rounds = plan.rows, plan.key.dtype.itemsize == 2
        if worth < WORTH or plan.method_id is None or rows.key_ids is not None or rows.index.shape[1] == plan.kv_len:
            return None
        if rounds and plan.asked != "auto":  # which computes in float32 throughout
            return None
        places = rows.index[:, 0, 1:3].flatten().tolist()  # where keys and texts begin
        return plan.method_id, plan.rotation, plan.key.dtype, tuple(places)

    def _grouped(self, x: Tensor) -> Tensor:
        """(batch or 1, heads or 1, q_len, m) so that it fits (batch, kv_heads, group * q_len, m)."""
        if x.shape[1] > 1:
            return x.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)  # of no keys too
        return x if x.shape[2] == 1 else x.repeat(1, 1, self.group, 1)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, factor: float | Tensor | None) -> Tensor:
        """Run sdpa: nothing but a factor on queries acts between them and the softmax."""
        scaling = self.scaling
        if isinstance(factor, Tensor):
            query = (query * factor).to(query.dtype)
        elif factor is not None:
            scaling *= factor
        return few_queries(query, key, value, self.allowed, scaling).transpose(1, 2)

    def _prepare(self, plan: AttentionPlan, whole: slice, hidden: Tensor | None) -> None:
        spec = plan.logits
        ends = [(one.columns.stop, other.columns.start) for one, other in itertools.pairwise(self.segments)]
        #: no key lies among the columns of two segments; some keys lie among those of none, and are not computed
        self.apart = all(a <= b for a, b in ends)
        self.gaps = self.apart and any(a < b for a, b in ends)
        self.sizes = [segment.size for segment in self.segments]
        if self.gaps:  # beside the size of each segment that of the gap behind it
            self.sizes = list(itertools.chain(*zip(self.sizes, [b - a for a, b in ends] + [0], strict=True)))
        columns: Tensor | slice = slice(None)
        if self.gaps:
            columns = torch.cat(
                [torch.arange(segment.columns.start, segment.columns.stop, device="cpu") for segment in self.segments]
            )
        hidden = None if hidden is None else hidden[..., columns]
        self.hidden = None if hidden is None or not hidden.any() else self._grouped(hidden)
        self.own = [None if self.apart or segment.own is None else self._grouped(segment.own) for segment in self.segments]
        self.makes = self.fold is not None or any(segment.angles is not None for segment in self.segments)
        #: in half precision, which the fused kernel reads as it is; of several queries; or where it takes fewer steps
        self.streams = plan.query.dtype.itemsize == 2 or self.q_len > 1 or (len(self.segments) == 1 and not self.makes)
        self.streams &= plan.asked == "auto"
        self.streams &= not (spec.gain is not None or spec.softcap or self.temper is not None)
        self.streams &= self.fold is None or self.cosine is not None
        self.streams &= plan.query.shape[3] == plan.value.shape[3]
        self.masks = [None if one.own is None or not self.streams else self._added(one.own) for one in self.segments]
        #: True: what turns rows, or the gain, is multiplied by scaling once; not where rows may be in half precision
        self.scaled = not self.streams and self.fold is None and not self.softcap
        self._prepare_turns(plan.query.shape[3])
        self.scaled &= spec.gain is not None or self.turns is not None
        self.map = None if spec.gain is None else self._map(plan, whole, columns)

    def _added(self, own: Tensor) -> Tensor:
        """Make the bias that the fused kernel adds to logits: MASK_VALUE for keys that are not the row's."""
        return self._grouped(torch.zeros(own.shape, dtype=self.wide, device=own.device).masked_fill_(~own, MASK_VALUE))

    def _prepare_turns(self, width: int) -> None:
        """All matrices that queries are multiplied by, side by side, and how many columns of each segment's there are."""
        turns = [segment.turn for segment in self.segments]
        self.turns: Tensor | None = None
        self.widths: list[int] = []
        if all(turn is None for turn in turns):
            return
        if self.scaled:
            eye = torch.eye(width, dtype=self.wide, device="cpu")[None, None, None]
            turns = [eye if turn is None else turn for turn in turns]
        self.widths = [0 if turn is None else turn.shape[-1] for turn in turns]
        several = [turn for turn in turns if turn is not None]
        # torch's own way to broadcast shapes takes as long as ten of these
        shape = tuple(max(sizes) for sizes in zip(*(x.shape[:4] for x in several), strict=True))
        joined = torch.cat([x.expand(*shape, -1) for x in several], -1)
        joined = joined * self.scaling if self.scaled else joined
        self.turns = joined[0, 0, 0] if shape[:3] == (1, 1, 1) else joined

    def _map(self, plan: AttentionPlan, shown: slice, columns: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Gain and bias of each key, MASK_VALUE of hidden ones."""
        spec = plan.logits
        t = plan.rows.distance(plan.kv_len)[..., shown][..., columns]
        gain, bias = (x[:, t].transpose(0, 1) for x in (spec.gain, spec.bias) if x is not None)
        if spec.sinks:
            which = plan.rows.sinks(plan.kv_len, spec.sinks)[:, None, :, shown][..., columns]
            gain, bias = gain.masked_fill(which, 1.0), bias.masked_fill(which, 0.0)
        gain, bias = self._grouped(gain * self.scaling if self.scaled and self.turns is None else gain), self._grouped(bias)
        return gain, bias if self.hidden is None else bias.masked_fill(self.hidden, MASK_VALUE)

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None,
        sinks: Tensor | None,
        kept: RotatedKeys | None,
    ) -> Tensor:
        logits = self._logits(query, key, factor, kept)
        if self.map is not None:
            own = logits.view(-1, self.kv_heads, *logits.shape[1:])
            torch.addcmul(self.map[1], own, self.map[0], out=own)
        elif self.hidden is not None:
            logits.view(-1, self.kv_heads, *logits.shape[1:]).masked_fill_(self.hidden, MASK_VALUE)
        if self.temper is not None:
            logits = self._by_entropy(logits, query.shape, sinks is not None)
        out = self._averaged(torch.softmax(logits, -1), value.to(self.wide)).view(*query.shape[:3], -1)
        return out if sinks is None else merge_outputs([(out, logits.logsumexp(-1).view(query.shape[:3]), logits)], sinks)

    def _streamed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None,
        sinks: Tensor | None,
        kept: RotatedKeys | None,
    ) -> Tensor:
        """Run the fused kernel, a segment after another, and join them by their logsumexps."""
        rows, scaling = query.to(self.wide), self.scaling
        if self.cosine is not None:
            rows, scaling = rows / _norms(rows), self.cosine
        if isinstance(factor, Tensor):
            rows = rows * factor
        elif factor is not None:
            scaling *= factor
        each, results = self._turned(rows.reshape(-1, *self.rows)), []
        for i, (own, seen, mask) in enumerate(zip(each, self._cut(value), self.masks, strict=True)):
            own = own[..., : self.rows[1]].to(query.dtype).unflatten(0, key.shape[:2])
            keys = self._keys(i, key, kept, self.fold is not None)
            out, lse = few(own, keys.to(own.dtype), seen.to(own.dtype), mask, scaling)  # autocast halves values alone
            results.append((out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3]), lse))
        return merge_outputs(results, sinks)

    def _logits(self, query: Tensor, key: Tensor, factor: float | Tensor | None, kept: RotatedKeys | None) -> Tensor:
        """(batch * kv_heads, group * q_len, keys) from score to temperature by length; 0 outside of all segments."""
        rows, normed = query.to(self.wide), self.cosine is not None
        scaling: Any = None if self.scaled else self.scaling
        if self.cosine is not None:
            rows, scaling = rows / _norms(rows), self.cosine
        elif self.fold is not None:
            kept, (rows, key, scaling) = None, self.fold(rows, key.to(self.wide))
        if self.softcap:
            scaling /= self.softcap
        elif factor is not None:
            scaling = factor if scaling is None else scaling * factor
        rows = rows if scaling is None else rows * scaling
        each = self._turned(rows.reshape(-1, *self.rows))
        if kept is not None:
            scores = [self._once(n, own, key, normed, kept) for n, own in enumerate(each)]
        else:
            several = zip(each, self._cut(key), self.segments, strict=True)
            scores = [_scores(own, keys, segment.angles, normed) for own, keys, segment in several]
        if self.apart:
            logits = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        else:
            logits = self._overlaid(scores, key.shape[2])
        if self.softcap:
            logits.tanh_().mul_(self.softcap)
            if factor is not None:
                logits.view(*query.shape[:3], -1).mul_(factor)
        return logits

    def _overlaid(self, scores: list[Tensor], keys: int) -> Tensor:
        """The scores of segments that have columns in common, each for the rows that see it there."""
        logits = scores[0].new_zeros(*scores[0].shape[:2], keys).unflatten(0, (-1, self.kv_heads))
        for segment, visible, own in zip(self.segments, self.own, scores, strict=True):
            into = logits[..., segment.columns]
            own = own.view_as(into)
            into.copy_(own if visible is None else torch.where(visible, own, into))
        return logits.flatten(0, 1)

    def _once(self, n: int, rows: Tensor, key: Tensor, normed: bool, kept: RotatedKeys) -> Tensor:
        """q . k of a segment, whose keys are turned once, and their norms taken once."""
        scores = _scores(rows[..., : self.rows[1]], self._keys(n, key, kept, False), None, False)
        if not normed:
            return scores

        def inverse(c: slice) -> Tensor:
            return _norms(self._at(key, c).to(self.wide)).reciprocal_()

        return scores.mul_(kept.get(("norms", n), *self._place(n, key), inverse).flatten(0, 1).mT)

    def _turned(self, rows: Tensor) -> Sequence[Tensor]:
        """Rows as each segment turns them; where its keys are turned, beside them what the sine part is multiplied by."""
        if self.turns is None:
            return [rows] * len(self.segments)
        if self.turns.ndim == 2:
            turned = rows @ self.turns
        else:
            by_query = rows.view(-1, self.kv_heads, self.group, self.q_len, rows.shape[-1])
            turned = (by_query[..., None, :] @ self.turns[:, :, None]).flatten(0, 1).flatten(1, 3)
        parts = turned.split_with_sizes(self.widths, -1)
        return [own if width else rows for own, width in zip(parts, self.widths, strict=True)]

    def _cut(self, x: Tensor) -> Sequence[Tensor]:
        """Cut keys or values (batch, kv_heads, keys, width) into those of each segment."""
        if len(self.segments) == 1:
            return [x]
        if not self.apart:
            return [x[:, :, segment.columns] for segment in self.segments]
        return x.split_with_sizes(self.sizes, 2)[:: 2 if self.gaps else 1]

    def _keys(self, n: int, key: Tensor, kept: RotatedKeys | None, normed: bool) -> Tensor:
        """The keys of a segment, turned, and divided by their norms if `normed`."""
        segment, rotation = self.segments[n], self.rotation
        if segment.beyond is None and not normed:
            return key[:, :, segment.columns]
        columns, until = self._place(n, key)

        def turn(c: slice) -> Tensor:
            k = own = self._at(key, c).to(self.wide)
            if segment.beyond is not None and rotation is not None:
                cos, sin = (x[:, :, c.start - columns.start : c.stop - columns.start] for x in segment.beyond)
                k = cos * k - rotation.rotate_half(sin * k)
            return (k / _norms(own) if normed else k).to(key.dtype)

        assert kept is not None
        return kept.get((segment.interval if segment.beyond is not None else ("own", n), normed), columns, until, turn)

    def _place(self, n: int, key: Tensor) -> tuple[slice, int]:
        """A segment's columns of all keys in the cache, and where these end."""
        columns, first = self.segments[n].columns, self.first
        return slice(columns.start + first, columns.stop + first), key.shape[2] + first

    def _at(self, key: Tensor, columns: slice) -> Tensor:
        """Take some columns of all keys in the cache from the visible ones."""
        return key[:, :, columns.start - self.first : columns.stop - self.first]

    def _by_entropy(self, logits: Tensor, shape: torch.Size, sinks: bool) -> Tensor:
        """Logits times the temperature, up to a constant for each row unless there are sinks."""
        assert self.temper is not None
        log_p = torch.log_softmax(logits, -1)
        factor = self.temper(entropy(log_p).view(shape[:3])).view(*logits.shape[:-1], 1)
        logits = (logits if sinks else log_p).mul_(factor)
        if self.hidden is not None:
            logits.view(-1, self.kv_heads, *logits.shape[1:]).masked_fill_(self.hidden, MASK_VALUE)
        return logits

    def _averaged(self, weights: Tensor, value: Tensor) -> Tensor:
        if not self.gaps:
            return torch.bmm(weights, value.flatten(0, 1))
        shares = weights.split_with_sizes(self.sizes[::2], -1)
        pairs = zip(shares, self._cut(value), strict=True)
        return functools.reduce(torch.add, (torch.bmm(share, own.flatten(0, 1)) for share, own in pairs))


def _norms(key: Tensor) -> Tensor:
    return torch.linalg.vector_norm(key, dim=-1, keepdim=True).clamp_(min=1e-30)


def _scores(rows: Tensor, key: Tensor, angles: tuple[Tensor, Tensor] | None, normed: bool) -> Tensor:
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
    step = max(KEY_ELEMENTS // (batch * heads * width), KEYS)
    at_once = max(KEY_ELEMENTS // (step * width), 1)
    everything = [(slice(None), slice(None))]
    groups = everything if batch * heads <= at_once else list(itertools.product(_pieces(batch, 1), _pieces(heads, at_once)))
    for c in _pieces(keys, step):
        for b, h in groups:
            turns = None if angles is None else (_of(angles[0], b, h)[:, :, c], _of(angles[1], b, h)[:, :, c])
            part = into[b, h, :, c]
            part.copy_(_read(own[b, h].flatten(0, 1), key[b, h, c], turns, normed).view_as(part))
    return out


def _read(rows: Tensor, key: Tensor, angles: tuple[Tensor, Tensor] | None, normed: bool) -> Tensor:
    """`_scores` of keys that a core's cache holds."""
    key = key.to(rows.dtype)
    if angles is None:
        out = torch.bmm(rows, key.flatten(0, 1).mT)
    elif rows.shape[1] == 1:  # a query of its own for each key takes less than two products
        query, half = rows.view(*key.shape[:2], 1, -1).chunk(2, -1)
        out = (angles[0] * query).addcmul_(angles[1], half).mul_(key).sum(-1).flatten(0, 1)[:, None]
    else:
        out = torch.bmm(rows, torch.cat([angles[0] * key, angles[1] * key], -1).flatten(0, 1).mT)
    return out.div_(_norms(key).flatten(0, 1).mT) if normed else out


def _pieces(length: int, step: int) -> list[slice]:
    return [slice(first, first + step) for first in range(0, length, step)]


def _of(x: Tensor, b: slice, h: slice) -> Tensor:
    """A part of what may be the same for all batch entries, and for all key heads."""
    return x[b if x.shape[0] > 1 else slice(None), h if x.shape[1] > 1 else slice(None)]
