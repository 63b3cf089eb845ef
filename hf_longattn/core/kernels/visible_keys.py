"""The keys that few queries on a CPU see, and how both sides are turned: what follows from positions alone, once a pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..plan import AttentionPlan, Segment
from ..rotary import Angles, Rotation
from ..rotated_keys import AHEAD, RotatedKeys

#: What turns queries for all segments at once, (head_dim, n) or (batch or 1, kv_heads or 1, q_len, head_dim, n), and how many
#: of the n columns are each segment's; 0: it takes queries as they are.
Turns: TypeAlias = tuple[Tensor, list[int]]


class SeenSegment(NamedTuple):
    """The keys of a segment that some query sees, and how both sides are turned; None: they are not.

    Where keys are turned, `turn` makes two of a query, to meet c k and to meet s k (see `RotationDelta.by_feature`).
    """

    columns: slice  # counted from the first visible key
    place: slice  # the same, counted from the call's first key
    size: int
    name: Hashable  # by which its turned keys are kept; segments that turn keys alike share one
    mask: Tensor | None  # bool (batch or 1, kv_heads or 1, rows or 1, keys), True = the row sees the key; None: all are seen
    turn: Tensor | None  # multiplies queries, (batch or 1, kv_heads or 1, q_len or 1, head_dim, head_dim or twice that)
    angles: Angles | None  # c and s of keys, each (batch or 1, kv_heads or 1, keys, head_dim)
    beyond: Angles | None  # the same with those of up to AHEAD keys more, which are turned with these where they are kept


@dataclass(eq=False)
class VisibleKeys:
    """The keys that some query sees. Queries that share a key head are its rows, in masks and in products: group * q_len."""

    columns: slice  # from the first visible key of a call to the last
    segments: tuple[SeenSegment, ...]  # in the order of their columns; none: no query sees a key
    sizes: list[int] | None  # of each segment, and of each gap behind one if there are `gaps`; None: segments overlap
    gaps: bool  # whether keys between segments are in none
    hidden: Tensor | None  # bool (batch or 1, kv_heads or 1, rows or 1, columns), what a row does not see; None: nothing
    blind: Tensor | None  # bool (batch or 1, heads or 1, q_len, 1), queries that see no key; None: there are none
    rotation: Rotation | None
    wide: torch.dtype  # of logits
    kv_heads: int
    rows: tuple[int, int]  # their number, and head_dim

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        """Cut visible keys or values, (batch, kv_heads, columns, width), into those of each segment."""
        if len(self.segments) == 1:
            return [x]
        if self.sizes is None:
            return [x[:, :, segment.columns] for segment in self.segments]
        return x.split_with_sizes(self.sizes, 2)[:: 2 if self.gaps else 1]

    def without_gaps(self, x: Tensor) -> Tensor:
        """Leave out of (..., columns) those of no segment."""
        return torch.cat([x[..., segment.columns] for segment in self.segments], -1) if self.gaps else x

    def turns(self, scaling: float | None) -> Turns | None:
        """The `Turns` of queries, multiplied by scaling if that is given; None: nothing turns them."""
        each = [segment.turn for segment in self.segments]
        if all(turn is None for turn in each):
            return None
        if scaling is not None:  # what is not turned is multiplied too
            eye = torch.eye(self.rows[1], dtype=self.wide, device="cpu")[None, None, None]
            each = [eye if turn is None else turn for turn in each]
        several = [turn for turn in each if turn is not None]
        # torch's own way to broadcast shapes takes as long as ten of these
        shape = tuple(max(sizes) for sizes in zip(*(x.shape[:4] for x in several), strict=True))
        joined = torch.cat([x.expand(*shape, -1) for x in several], -1)
        joined = joined if scaling is None else joined * scaling
        return joined[0, 0, 0] if shape[:3] == (1, 1, 1) else joined, [0 if x is None else x.shape[-1] for x in each]

    def turned_queries(self, query: Tensor, turns: Turns | None) -> Sequence[Tensor]:
        """Queries (batch, heads, q_len, head_dim) as each segment turns them, (batch * kv_heads, rows, ...)."""
        rows = query.reshape(-1, *self.rows)
        if turns is None:
            return [rows] * len(self.segments)
        matrix, widths = turns
        if matrix.ndim == 2:
            turned = rows @ matrix
        else:
            by_query = rows.view(-1, self.kv_heads, rows.shape[1] // query.shape[2], *query.shape[2:])
            turned = (by_query[..., None, :] @ matrix[:, :, None]).flatten(0, 1).flatten(1, 3)
        return [own if width else rows for own, width in zip(turned.split_with_sizes(widths, -1), widths, strict=True)]

    def turned_keys(self, segment: SeenSegment, key: Tensor, kept: RotatedKeys | None, normed: bool) -> Tensor:
        """The keys of a segment among visible ones, turned, and divided by their norms if `normed`: each is made once."""
        if segment.beyond is None and not normed:
            return key[:, :, segment.columns]

        def turn(k: Tensor, own: slice) -> Tensor:
            norm = norms(k) if normed else None
            if segment.beyond is not None and self.rotation is not None:
                cos, sin = (x[:, :, own] for x in segment.beyond)
                k = cos * k - self.rotation.rotate_half(sin * k)
            return (k if norm is None else k / norm).to(key.dtype)

        assert kept is not None
        return self.kept_of((segment.name, normed), segment, key, kept, turn)

    def kept_of(
        self, name: Hashable, segment: SeenSegment, key: Tensor, kept: RotatedKeys, make: Callable[[Tensor, slice], Tensor]
    ) -> Tensor:
        """The vectors kept under a name for a segment's keys; `make` takes some keys, and where in the segment they are."""

        def of_columns(c: slice) -> Tensor:
            first, own = self.columns.start, segment.place.start
            k = key[:, :, c.start - first : c.stop - first].to(self.wide)
            return make(k, slice(c.start - own, c.stop - own))

        return kept.get(name, segment.place, self.columns.stop, of_columns)


def norms(x: Tensor) -> Tensor:
    """The norm of each vector, (..., 1), more than 0."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-30)


def by_key_head(x: Tensor, plan: AttentionPlan) -> Tensor:
    """(batch or 1, heads or 1, q_len, m) as (batch or 1, kv_heads or 1, rows or 1, m)."""
    if x.shape[1] > 1:
        return x.unflatten(1, (plan.key.shape[1], -1)).flatten(2, 3)  # of no keys too
    return x if x.shape[2] == 1 else x.repeat(1, 1, plan.query.shape[1] // plan.key.shape[1], 1)


def visible_keys(plan: AttentionPlan) -> VisibleKeys:
    """The visible keys of a plan, the same for all layers of a pass that see them, and turn them, alike."""
    segments = tuple((s.name, s.query is None, s.key is None) for s in plan.segments)
    alike = segments, plan.rotation, plan.query.shape, plan.query.dtype, plan.key.shape
    keys: VisibleKeys = plan.rows.once(alike, lambda: _visible(plan))
    return keys


def _visible(plan: AttentionPlan) -> VisibleKeys:
    among = [(segment, *segment.visible_columns(plan.kv_len)) for segment in plan.segments]
    found = sorted(((s, c, mask) for s, c, mask in among if c is not None), key=lambda x: x[1].start)
    whole = slice(min((c.start for _, c, _ in found), default=0), max((c.stop for _, c, _ in found), default=0))
    seen = tuple(_seen(plan, whole.start, n, *each) for n, each in enumerate(found))
    between = [after.columns.start - one.columns.stop for one, after in itertools.pairwise(seen)]
    overlap = any(size < 0 for size in between)
    gaps = any(between) and not overlap
    sizes = [segment.size for segment in seen]
    if gaps:
        sizes = list(itertools.chain(*zip(sizes, [*between, 0], strict=True)))
    masks, hidden, blind = [mask for _, _, mask in found], None, None
    if gaps or any(mask is not None for mask in masks):
        batch, heads = (max(1 if mask is None else mask.shape[d] for mask in masks) for d in (0, 1))
        hidden = torch.ones(batch, heads, plan.query.shape[2], whole.stop - whole.start, dtype=torch.bool, device="cpu")
        for segment, mask in zip(seen, masks, strict=True):
            hidden[..., segment.columns] &= False if mask is None else ~mask
        blind = hidden.all(-1, keepdim=True)
        hidden, blind = by_key_head(hidden, plan) if hidden.any() else None, blind if blind.any() else None
    rows = plan.query.shape[1] // plan.key.shape[1] * plan.query.shape[2], plan.query.shape[3]
    return VisibleKeys(
        columns=whole,
        segments=seen,
        sizes=None if overlap else sizes,
        gaps=gaps,
        hidden=hidden,
        blind=blind,
        rotation=plan.rotation,
        wide=plan.wide,
        kv_heads=plan.key.shape[1],
        rows=rows,
    )


def _seen(plan: AttentionPlan, first: int, n: int, segment: Segment, columns: slice, mask: Tensor | None) -> SeenSegment:
    width, wide, size = plan.query.shape[3], plan.wide, columns.stop - columns.start
    turn = angles = beyond = None
    if segment.key is not None:
        j = plan.rows.key_places(plan.kv_len)[..., columns.start : columns.stop + AHEAD]
        cos, sin = (x.transpose(1, 2).to(wide) for x in segment.key.by_feature(j, width, plan.tables))
        beyond, angles = (cos, sin), (cos[:, :, :size], sin[:, :, :size])
    if (side := segment.query or segment.key) is not None:
        rotation, parts = side.known_rotation, 1 if angles is None else 2
        like = torch.empty(0, dtype=wide, device="cpu")
        basis = plan.tables.get(("basis", rotation, width, wide), lambda: rotation.basis(width, like))
        turn, other = (x[None, None, None, :, :parts] for x in basis)
        if segment.query is not None:
            by_feature = segment.query.by_feature(plan.rows.query_places(), width)
            cos, sin = (x.transpose(1, 2)[..., None, None, :].to(wide) for x in by_feature)
            turn = torch.addcmul(turn * cos, other, sin)
        turn = turn.flatten(-2)
    return SeenSegment(
        columns=slice(columns.start - first, columns.stop - first),
        place=columns,
        size=size,
        name=("own", n) if segment.key is None else segment.key.interval,
        mask=None if mask is None else by_key_head(mask, plan),
        turn=turn,
        angles=angles,
        beyond=beyond,
    )
