"""Which keys few queries see, and how they are turned: what depends on positions alone, once for a forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..slots.base import Band
from .geometry import Rows
from .rotary import Rotation
from .stages import require_rotation
from .tables import TableCache


class Part(NamedTuple):
    """The keys of one band, as they are seen by any row of a call.

    Args:
        columns: of all keys that a call computes.
        own: bool (batch or 1, heads or 1, q_len, keys), those of them that are the row's; None: all.
        turn: (batch or 1, key heads or 1, q_len, head_dim, head_dim), what queries are multiplied by; None: they stay.
        half: likewise, for the sine part of re-rotated keys.
        angles: of keys, by feature (see `Rotation.by_feature`), (batch or 1, key heads or 1, keys, head_dim); None: they stay.
    """

    columns: slice
    own: Tensor | None
    turn: Tensor | None
    half: Tensor | None
    angles: tuple[Tensor, Tensor] | None

    @property
    def size(self) -> int:
        return self.columns.stop - self.columns.start


@dataclass(frozen=True, eq=False)
class Bands:
    """What all layers share whose keys are seen, and rotated, alike.

    Args:
        columns: the keys that some row sees.
        parts: in the order of their columns.
        count: how many keys each row sees, int64 (batch or 1, heads or 1, q_len).
        hidden: bool (batch or 1, heads or 1, q_len, keys), those of `columns` that a row does not see; None: there are none.
        blind: bool (..., q_len, 1), rows that see none; None: there are none.
    """

    columns: slice
    parts: tuple[Part, ...]
    count: Tensor
    hidden: Tensor | None
    blind: Tensor | None

    @classmethod
    def of(
        cls, config: LongAttnConfig, query: Tensor, kv_len: int, rows: Rows, rotation: Rotation | None, tables: TableCache
    ) -> Bands:
        i = rows.query_positions()
        bands = [[((method, number), band) for number, band in enumerate(method.bands(i))] for method in config.key_bands]
        found = []
        for several in itertools.product(*bands):
            columns, own = _seen(rows, [band for _, band in several], kv_len)
            if columns is not None:
                found.append((several, columns, own))
        found.sort(key=lambda x: x[1].start)
        whole = slice(min((c.start for _, c, _ in found), default=0), max((c.stop for _, c, _ in found), default=0))
        parts = tuple(
            _part(several, columns, own, whole, kv_len, query, rows, rotation, tables) for several, columns, own in found
        )
        total, width = sum(part.size for part in parts), whole.stop - whole.start
        if parts and all(part.own is None for part in parts):  # a key is in one band of each row: no columns are shared
            count = torch.full((1, 1, query.shape[2]), total, device=query.device)
            return cls(whole, parts, count, None if total == width else _hidden(parts, query, width), None)
        hidden = _hidden(parts, query, width)
        blind = hidden.all(-1, keepdim=True)
        count = width - hidden.sum(-1)
        return cls(whole, parts, count, hidden if hidden.any() else None, blind if blind.any() else None)


def _seen(rows: Rows, bands: list[Band], kv_len: int) -> tuple[slice | None, Tensor | None]:
    """The columns that some row sees of the keys in all of these bands, and which of them each row sees; None: all."""
    if rows.allowed is None and rows.key_ids is None and rows.index.shape[:2] == (1, 1):
        _, key_start, start, low, high = rows.index[0, 0].tolist()
        for band in bands:
            low = low if band.first is None else max(low, start + int(band.first))
            high = high if band.last is None else min(high, start + int(band.last))
        low, high = max(low - key_start, 0), min(high - key_start, kv_len - 1)
        return (slice(low, high + 1) if low <= high else None), None
    for band in bands:
        rows = rows.narrowed(band.first, band.last)
    visible = rows.visible(kv_len)
    some = visible.flatten(0, 2).any(0).nonzero()
    if not len(some):
        return None, None
    columns = slice(int(some[0]), int(some[-1]) + 1)
    own = visible[..., columns]
    return columns, None if own.all() else own


def _hidden(parts: tuple[Part, ...], query: Tensor, width: int) -> Tensor:
    """Which keys a row does not see in any part, bool (batch or 1, heads or 1, q_len, width)."""
    shapes = [part.own.shape[:3] for part in parts if part.own is not None]
    batch, heads = (max((shape[d] for shape in shapes), default=1) for d in (0, 1))
    hidden = torch.ones(batch, heads, query.shape[2], width, dtype=torch.bool, device=query.device)
    for part in parts:
        hidden[..., part.columns] &= False if part.own is None else ~part.own
    return hidden


def _part(
    several: tuple[tuple[Hashable, Band], ...],
    columns: slice,
    own: Tensor | None,
    whole: slice,
    kv_len: int,
    query: Tensor,
    rows: Rows,
    rotation: Rotation | None,
    tables: TableCache,
) -> Part:
    i, width = rows.query_positions(), query.shape[3]
    turn = half = angles = None
    for name, band in several:
        eye = torch.eye(width, dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
        if band.query is not None:
            cos, sin = require_rotation(rotation).angles(i, band.query, band.spectrum)
            turn = _matrices(require_rotation(rotation), eye, cos, sin)
        if band.key is not None:
            j = rows.key_positions(kv_len)[:, columns]
            cos, sin = require_rotation(rotation).by_feature(j, band.key, (name, "key"), width, tables, band.spectrum)
            angles = cos.transpose(1, 2).to(eye.dtype), sin.transpose(1, 2).to(eye.dtype)
            turn = eye[None, None, None] if turn is None else turn
            half = require_rotation(rotation).rotate_half(turn)
    placed = slice(columns.start - whole.start, columns.stop - whole.start)
    return Part(placed, own, turn, half, angles)


def _matrices(rotation: Rotation, eye: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotations by angles (batch or 1, n, key heads or 1, pairs) as matrices, (batch or 1, key heads or 1, n, d, d)."""
    batch, n, heads, pairs = cos.shape
    cos, sin = (x.transpose(1, 2).reshape(batch * heads * n, 1, 1, pairs).expand(-1, len(eye), -1, -1) for x in (cos, sin))
    turned = rotation.rotate(eye.expand(len(cos), 1, -1, -1), cos, sin)
    return turned.view(batch, heads, n, *eye.shape)
