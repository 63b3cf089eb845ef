"""Few queries against many keys, as in decoding: dense over keys, and nothing is prepared twice.

What depends on positions alone (bands, rotations, factors by length, gain and bias of each key) is prepared once for a call's
rows, which the layers of a forward pass share; a layer is then a few products. Keys are re-rotated, and divided by their
norms, as they are read, so that no second KV cache is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig
from ..methods.base import Band, EntropyTemperature, LengthTemperature
from .call import Call
from .geometry import Rows
from .kernels.spec import MASK_VALUE
from .lowering import FEW_QUERIES, distance_tables, table_length
from .reference import finish, require_rotation, sink_of
from .rotary import Rotation
from .tables import TableCache
from .tracing import keepable

#: Elements of keys that are worked on at a time where more than a product is to be done with them: what a core's cache holds.
KEY_ELEMENTS = 1 << 19


def serves(query: Tensor, dropout: float) -> bool:
    """Whether a call without gradients is computed here."""
    if dropout or query.device.type != "cpu" or not keepable(query):  # first: a graph for any length compares no length
        return False
    return 0 < query.shape[2] <= FEW_QUERIES


class Part(NamedTuple):
    """The keys of one band, as they are seen by any row of a call.

    Args:
        columns: of the keys that the call computes.
        own: bool (batch or 1, heads or 1, q_len, keys), those of them that are the row's; None: all.
        turn: (batch or 1, key heads or 1, 1, q_len, head_dim, head_dim), what queries are multiplied by; None: they stay.
        half: likewise, for the sine part of re-rotated keys.
        angles: of keys, by feature (see `Rotation.by_feature`); None: they stay.
    """

    columns: slice
    own: Tensor | None
    turn: Tensor | None
    half: Tensor | None
    angles: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """What all layers with equal bands and temperature share.

    Args:
        columns: the keys that some row sees; hidden: bool (batch or 1, heads or 1, q_len, keys), those of them that a row does
            not see; blind: bool (..., q_len, 1), rows that see none. None: there are none.
        factor: the temperature by length, float64 (batch or 1, heads or 1, q_len), before its learned part.
        fuses: neither bands nor an entropy temperature act.
    """

    columns: slice
    parts: tuple[Part, ...]
    hidden: Tensor | None
    blind: Tensor | None
    factor: Tensor | None
    fuses: bool


def decode(call: Call, *, fuses: bool) -> Tensor:
    """`attend` for calls that `serves` names.

    Args:
        fuses: sdpa computes what it can: where nothing but a factor on queries acts between them and the softmax.
    """
    query, key, value, config, rows = call.query, call.key, call.value, call.config, call.rows
    scaling, softcap, learned, rotation, tables = call.scaling, call.softcap, call.learned, call.rotation, call.cache
    kv_len = key.shape[2]
    names = (config.positions, config.visibility, config.temperature, kv_len, query.shape[3], rotation)
    now: Prepared = rows.once(names, lambda: _prepare(config, query, kv_len, rows, rotation, tables))
    if now.columns != slice(0, kv_len):
        key, value = key[:, :, now.columns], value[:, :, now.columns]
    factor = _factor(query, now, learned)
    acting = config.score, config.logit_map, config.sink, softcap, call.sink_logits
    if not now.parts:  # nothing is visible
        out = query.new_zeros(*query.shape[:3], value.shape[3])
    elif fuses and now.fuses and acting == (None,) * 5:
        query = query if factor is None else (query * factor[..., None]).to(query.dtype)
        out = _sdpa(query, key, value, now, scaling)
    else:
        sinks = sink_of(call)
        logits = _logits(query, key, config, now, factor, scaling, softcap)
        logits = _mapped(logits, query, config, rows, kv_len, now, tables)
        out = _weighted(logits, value, config, now, sinks)
    if now.blind is not None:
        out = out.masked_fill(now.blind, 0.0)
    return finish(config, out, learned).to(query.dtype)


# once for a call's rows ---------------------------------------------------------------------------------------------------


def _prepare(
    config: LongAttnConfig, query: Tensor, kv_len: int, rows: Rows, rotation: Rotation | None, tables: TableCache
) -> Prepared:
    i = rows.query_positions()
    bands = [[((method, number), band) for number, band in enumerate(method.bands(i))] for method in config.key_bands]
    found = []
    for several in itertools.product(*bands):
        narrowed = rows
        for _, band in several:
            narrowed = narrowed.narrowed(band.first, band.last)
        own = narrowed.visible(kv_len)
        if (columns := _extent(own)) is not None:
            found.append((several, own, columns))
    whole = slice(min((c.start for _, _, c in found), default=0), max((c.stop for _, _, c in found), default=0))
    parts = tuple(_part(*x, whole, query, rows, rotation, tables) for x in found)
    visible = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=query.device)
    for _, own, _ in found:
        visible = visible | own
    factor = None
    if isinstance(config.temperature, LengthTemperature):
        factor = config.temperature.factor(visible.sum(-1).double(), query.shape[3])
    if not found:
        return Prepared(whole, parts, None, None, factor, False)
    hidden = ~visible[..., whole]
    blind = hidden.all(-1, keepdim=True)
    fuses = not config.key_bands and not isinstance(config.temperature, EntropyTemperature)
    return Prepared(whole, parts, hidden if hidden.any() else None, blind if blind.any() else None, factor, fuses)


def _extent(visible: Tensor) -> slice | None:
    """The columns from the first to the last that any row sees."""
    seen = visible.flatten(0, 2).any(0).nonzero()
    return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else None


def _part(
    several: tuple[tuple[Hashable, Band], ...],
    own: Tensor,
    columns: slice,
    whole: slice,
    query: Tensor,
    rows: Rows,
    rotation: Rotation | None,
    tables: TableCache,
) -> Part:
    i, kv_len, own, width = rows.query_positions(), own.shape[-1], own[..., columns], query.shape[3]
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
            half = require_rotation(rotation).rotate_half(eye if turn is None else turn)
    placed = slice(columns.start - whole.start, columns.stop - whole.start)
    return Part(placed, None if own.all() else own, turn, half, angles)


def _matrices(rotation: Rotation, eye: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotations by angles (batch or 1, n, key heads or 1, pairs) as matrices, (batch or 1, key heads or 1, 1, n, d, d)."""
    batch, n, heads, pairs = cos.shape
    cos, sin = (x.transpose(1, 2).reshape(batch * heads * n, 1, 1, pairs).expand(-1, len(eye), -1, -1) for x in (cos, sin))
    turned = rotation.rotate(eye.expand(len(cos), 1, -1, -1), cos, sin)
    return turned.view(batch, heads, 1, n, *eye.shape)


# in every layer -----------------------------------------------------------------------------------------------------------


def _factor(query: Tensor, now: Prepared, learned: Mapping[str, nn.Module] | None) -> Tensor | None:
    if now.factor is None:
        return None
    factor = now.factor
    if learned is not None and "temperature" in learned:
        factor = learned["temperature"](factor)
    return factor.to(torch.promote_types(query.dtype, torch.float32))


def _sdpa(query: Tensor, key: Tensor, value: Tensor, now: Prepared, scaling: float) -> Tensor:
    """Query heads that share a key head are so many queries of it, where there is one query."""
    shape, allowed = query.shape, None if now.hidden is None else ~now.hidden
    if together := shape[2] == 1 and shape[1] != key.shape[1]:
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])
        if allowed is not None and allowed.shape[1] > 1:
            allowed = allowed.reshape(allowed.shape[0], key.shape[1], -1, allowed.shape[3])
    grouped = query.shape[1] != key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scaling, enable_gqa=grouped)
    return out.reshape(*shape[:3], -1) if together else out


def _logits(
    query: Tensor,
    key: Tensor,
    config: LongAttnConfig,
    now: Prepared,
    factor: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """(batch, heads, q_len, keys) from score to temperature by length, in float32 at least."""
    shape, normed = query.shape, False
    query = query.to(torch.promote_types(query.dtype, torch.float32))
    if config.score is not None:
        own = config.score.over_norms(query) if key.numel() > KEY_ELEMENTS else None
        if normed := own is not None:
            query, scaling = own
        else:
            query, key, scaling = config.score.fold(query, key.to(query.dtype))
    query = query * (scaling if factor is None or softcap else scaling * factor[..., None])
    logits = _products(query.view(shape[0], key.shape[1], -1, *shape[2:]), key, now, normed).view(*shape[:3], -1)
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
        logits = logits if factor is None else logits.mul_(factor[..., None])
    return logits


def _products(query: Tensor, key: Tensor, now: Prepared, normed: bool) -> Tensor:
    """q . k over all bands, (batch, heads, q_len, keys); 0 where there is none.

    Args:
        query: (batch, kv_heads, group, q_len, head_dim).
        normed: divided by |k|.
    """
    if len(now.parts) == 1 and now.parts[0].own is None:
        return _scores(query, key, now.parts[0], normed)
    batch, kv_heads, group, n, _ = query.shape
    logits = query.new_zeros(batch, kv_heads * group, n, key.shape[2])
    for part in now.parts:
        scores, into = _scores(query, key[:, :, part.columns], part, normed), logits[..., part.columns]
        scores = scores.view(*logits.shape[:3], -1)
        into.copy_(scores if part.own is None else torch.where(part.own, scores, into))
    return logits


def _scores(query: Tensor, key: Tensor, part: Part, normed: bool) -> Tensor:
    """q . k of one band, (batch, kv_heads, group * q_len, keys)."""
    own = _turned(query, part.turn)
    if part.angles is None and not normed and key.dtype == own.dtype:
        return _by_head(own, key.transpose(-1, -2))
    half, (batch, heads, keys, width) = _turned(query, part.half), key.shape
    out = own.new_empty(*own.shape[:3], keys)
    room = own.new_empty(0 if part.angles is None else min(key.numel(), KEY_ELEMENTS + 16 * width))
    at_once = max(KEY_ELEMENTS // (keys * width), 1)
    few = batch * heads <= at_once
    for b, h in [(slice(None), slice(None))] if few else itertools.product(_pieces(batch, 1), _pieces(heads, at_once)):
        for c in _pieces(keys, max(KEY_ELEMENTS // width, 16)):
            angles = None if part.angles is None else tuple(_of(x, b, h)[:, :, c] for x in part.angles)
            _read(own[b, h], half[b, h], key[b, h, c], angles, normed, room, out[b, h, :, c])
    return out


def _by_head(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of all batch entries and key heads, four dimensions each."""
    return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).view(*x.shape[:3], -1)


def _turned(query: Tensor, by: Tensor | None) -> Tensor:
    """Queries as the rows of their key head, (batch, kv_heads, group * q_len, head_dim)."""
    return (query if by is None else (query[..., None, :] @ by).squeeze(-2)).flatten(2, 3)


def _pieces(length: int, step: int) -> list[slice]:
    return [slice(first, first + step) for first in range(0, length, step)]


def _of(x: Tensor, b: slice, h: slice) -> Tensor:
    """A part of what may be the same for all batch entries, and for all key heads."""
    return x[b if x.shape[0] > 1 else slice(None), h if x.shape[1] > 1 else slice(None)]


def _read(
    query: Tensor,
    half: Tensor,
    key: Tensor,
    angles: tuple[Tensor, ...] | None,
    normed: bool,
    room: Tensor,
    out: Tensor,
) -> None:
    """q . k of keys that are re-rotated, and their norms taken, while they are in a core's cache.

    Args:
        query, half: (batch, kv_heads, rows, head_dim).
        key, angles: (batch, kv_heads, keys, head_dim).
        room: for as many numbers as there are in the keys.
        out: (batch, kv_heads, rows, keys).
    """
    key = key.to(query.dtype)
    norms = torch.linalg.vector_norm(key, dim=-1).clamp_(min=1e-30)[:, :, None] if normed else None
    buffer = None if angles is None else room[: key.numel()].view(key.shape)
    if angles is None or buffer is None:
        out.copy_(_by_head(query, key.transpose(-1, -2)))
    elif query.shape[2] == 1:  # a query of its own for each key takes one pass less
        torch.mul(angles[0], query, out=buffer).addcmul_(angles[1], half).mul_(key)
        torch.sum(buffer, -1, out=out[:, :, 0])
    else:
        out.copy_(_by_head(query, torch.mul(angles[0], key, out=buffer).transpose(-1, -2)))
        out.add_(_by_head(half, torch.mul(angles[1], key, out=buffer).transpose(-1, -2)))
    if norms is not None:
        out.div_(norms)


def _mapped(
    logits: Tensor, query: Tensor, config: LongAttnConfig, rows: Rows, kv_len: int, now: Prepared, tables: TableCache
) -> Tensor:
    """After the logit map, and with MASK_VALUE at hidden keys."""
    if config.logit_map is None:
        return logits if now.hidden is None else logits.masked_fill_(now.hidden, MASK_VALUE)
    logit_map = config.logit_map

    def make() -> tuple[Tensor, Tensor]:
        own = distance_tables(logit_map, query.shape[1], table_length(rows, kv_len), query, tables)
        t = rows.distance(kv_len)[..., now.columns]
        gain, bias = (x[:, t].transpose(0, 1) for x in own)
        if logit_map.sink_tokens:
            which = rows.sinks(kv_len, logit_map.sink_tokens)[:, None, :, now.columns]
            gain, bias = gain.masked_fill(which, 1.0), bias.masked_fill(which, 0.0)
        return gain, bias if now.hidden is None else bias.masked_fill(now.hidden, MASK_VALUE)

    gain, bias = rows.latest("map", (logit_map, query.shape[1], query.dtype, now), make)
    return torch.addcmul(bias, logits, gain, out=logits)


def _weighted(logits: Tensor, value: Tensor, config: LongAttnConfig, now: Prepared, sinks: Tensor | None) -> Tensor:
    """The weighted sum of values, after an entropy temperature if there is one."""
    if isinstance(config.temperature, EntropyTemperature):
        shifted = logits - logits.amax(-1, keepdim=True)
        weights = shifted.exp()
        total = weights.sum(-1)
        # with the largest logit at 0, H = ln Z - sum p L adds two terms >= 0: nothing cancels
        entropy = total.log() - torch.linalg.vecdot(weights, shifted) / total
        logits = shifted if sinks is None else logits
        logits = logits * config.temperature.factor(entropy)[..., None]
        logits = logits if now.hidden is None else logits.masked_fill_(now.hidden, MASK_VALUE)
    (batch, heads, n, _), kv_heads = logits.shape, value.shape[1]
    share = None if sinks is None else torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sinks.to(logits)[:, None, None])
    weights = torch.softmax(logits, -1).view(batch, kv_heads, -1, logits.shape[-1])
    out = _by_head(weights, value.to(weights.dtype)).view(batch, heads, n, -1)
    return out if share is None else out * share
