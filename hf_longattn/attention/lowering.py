"""A config and the tensors of one call, turned once into what kernels compute.

    segments   each attention over an interval of keys that are rotated alike: its query, key and rows (remaps, windows)
    spec       the logits: score, softcap, length temperature and logit map
    finish     what comes after the weighted sum of values

Attention runs every segment and merges by logsumexp; diagnostics ask for the logits. `reference.py` knows nothing of this: it
is the definition that both are tested against.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..methods.base import Band, KeyBands, LengthTemperature, LogitMap
from .call import Call
from .geometry import Rows
from .kernels.spec import MASK_VALUE, LogitSpec
from .kernels.triton import MARGIN
from .reference import length_factor, require_rotation, sink_of
from .rotary import Rotation
from .tables import SHARED, TableCache
from .tracing import keepable, readable


class KVSegment(NamedTuple):
    """An interval of keys that are rotated alike.

    Args:
        rotation, angles: where keys are to be re-rotated as they are read: cos and sin by feature (see `Rotation.by_feature`).
    """

    query: Tensor
    key: Tensor
    rows: Rows
    rotation: Rotation | None = None
    angles: tuple[Tensor, Tensor] | None = None

    def scores(self, which: Tensor, keys: int) -> Tensor:
        """q . k of some rows with the first `keys` keys, (batch, heads, n, keys)."""
        query, key = self.query[:, :, which], self.key[:, :, :keys]
        if self.rotation is None or self.angles is None:
            return _product(query, key)
        cos, sin = (x[:, :keys].transpose(1, 2).to(key.dtype) for x in self.angles)
        return _product(query, cos * key) + _product(self.rotation.rotate_half(query), sin * key)


@dataclass(frozen=True, eq=False)
class LoweredAttention:
    """One call, lowered: what kernels compute.

    Args:
        sink_logits: (heads,), a term in the denominator of every softmax, which joins when segments are merged.
        factor: the temperature by length, (batch or 1, heads or 1, q_len), which spec and segments contain; None without one.
        of_entropy: every row's entropy over its keys is asked for, and no output.
    """

    call: Call
    segments: tuple[KVSegment, ...]
    spec: LogitSpec
    sink_logits: Tensor | None = None
    factor: Tensor | None = None
    of_entropy: bool = False

    @property
    def value(self) -> Tensor:
        """(batch, kv_heads, kv_len, head_dim); None where the output is to stay empty, which only some kernels take."""
        return None if self.of_entropy else self.call.value  # type: ignore[return-value]

    @property
    def dropout(self) -> float:
        return 0.0 if self.of_entropy else self.call.dropout

    @property
    def with_lse(self) -> bool:
        """Whether segments are merged, by their logsumexps."""
        return len(self.segments) > 1 or (self.sink_logits is not None and not self.of_entropy)

    @property
    def half(self) -> torch.dtype:
        """What kernels that compute half precision take queries and keys in."""
        return (self.segments[0].key if self.of_entropy else self.call.value).dtype

    @property
    def is_plain(self) -> bool:
        """Whether what is left is softmax(scaling q . k) over plain rows."""
        plain = self.spec.gain is None and not self.spec.softcap and len(self.segments) == 1
        return plain and self.call.rows.plain is not None and self.sink_logits is None

    def scaled(self, factor: Tensor) -> LoweredAttention:
        """The same call with its finished logits times a factor for each row, (batch, heads, q_len)."""
        out = _scaled(self, factor)
        if self.spec.gain is None:
            return out
        return dataclasses.replace(out, spec=dataclasses.replace(out.spec, bias_scale=factor))

    def logits(self, which: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """The logits of some rows, (batch, heads, n, keys) with MASK_VALUE at masked pairs, and which pairs are visible.

        Args:
            which: numbers of rows, int64 (n,).
            keys: how many keys from the first on; no row may see more.
        """
        spec, batch, heads = self.spec, *self.segments[0].query.shape[:2]
        logits = self.segments[0].query.new_full((batch, heads, len(which), keys), MASK_VALUE)
        visible = torch.zeros(1, dtype=torch.bool, device=logits.device)
        for segment in self.segments:
            own = segment.rows.take(which).visible(keys)
            logits = torch.where(own, segment.scores(which, keys).mul_(spec.scaling), logits)
            visible = visible | own
        if spec.softcap:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if spec.row_scale is not None:
            logits = spec.row_scale[:, :, which, None] * logits
        if spec.gain is not None and spec.bias is not None:
            t = self.call.rows.distance(keys, which)
            gain, bias = (x[:, t].transpose(0, 1) for x in (spec.gain, spec.bias))
            sinks = self.call.rows.take(which).sinks(keys, spec.sinks)[:, None]
            bias = bias if spec.bias_scale is None else spec.bias_scale[:, :, which, None] * bias
            logits = torch.where(sinks, logits, gain * logits + bias)
        return logits.masked_fill(~visible, MASK_VALUE), visible

    def log_weights(self, logits: Tensor) -> Tensor:
        """The logarithm of the attention weights, (batch, heads, n, keys); with sinks they add up to less than 1."""
        if self.sink_logits is None:
            return torch.log_softmax(logits, -1)
        sink = self.sink_logits.to(logits)[:, None, None]
        return logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), sink)


def lower(call: Call, *, wide: bool = False, rotate_reading: bool = False) -> LoweredAttention:
    """Every stage of a call's config but an entropy temperature, which needs a first pass (`LoweredAttention.scaled`).

    Args:
        wide: fold into query and key in float32 at least, for kernels that compute so anyway.
        rotate_reading: whoever computes re-rotates keys while reading them, without gradients.
    """
    config, query, rows, scaling, kv_len = call.config, call.query, call.rows, call.scaling, call.key.shape[2]
    segments = _segments(call, rotate_reading)
    if wide:
        segments = [s._replace(query=_wide(s.query), key=_wide(s.key)) for s in segments]
    if config.score is not None:
        for n, segment in enumerate(segments):
            q, k, scaling = config.score.fold(segment.query, segment.key)
            segments[n] = segment._replace(query=q, key=k)
    spec = LogitSpec(scaling=float(scaling), softcap=call.softcap)
    if config.logit_map is not None:
        length = table_length(rows, kv_len)
        gain, bias = distance_tables(config.logit_map, query.shape[1], length, query, call.cache, call.strength)
        spec = dataclasses.replace(spec, gain=gain, bias=bias, sinks=config.logit_map.sink_tokens)
    lowered = LoweredAttention(call, tuple(segments), spec, sink_of(call))
    if not isinstance(config.temperature, LengthTemperature):
        return lowered
    factor = length_factor(config, functools.reduce(torch.add, (s.rows.count(kv_len) for s in segments)), query, call.learned)
    return lowered if factor is None else dataclasses.replace(_scaled(lowered, factor), factor=factor)


#: Up to this many queries, keys are re-rotated while they are read instead of once before: decoding keeps no second cache.
FEW_QUERIES = 16


def _segments(call: Call, rotate_reading: bool) -> list[KVSegment]:
    """One for every band of keys that the config shows and rotates alike."""
    config, query, key, rows = call.config, call.query, call.key, call.rows
    rotation, tables = call.rotation, call.cache
    if not config.key_bands:
        return [KVSegment(query, key, rows)]
    i, j = rows.query_positions(), rows.key_positions(key.shape[2])
    reading = rotate_reading and readable(query)
    segments: list[KVSegment] = []
    for bands in itertools.product(*(_named(method, i) for method in config.key_bands)):
        names = tuple(name for name, _ in bands)
        narrowed = rows.once(names, functools.partial(_narrowed, rows, [x for _, x in bands]))
        if segments and rows.once((names, "nothing"), functools.partial(_sees_nothing, narrowed)):
            continue
        q, k, angles = query, key, None
        for name, band in bands:
            if band.query is not None:
                q = require_rotation(rotation).rerotate(query, i, band.query, (name, "query"), tables, band.spectrum)
            if band.key is not None and reading:
                angles = require_rotation(rotation).by_feature(
                    j, band.key, (name, "key"), key.shape[-1], tables, band.spectrum
                )
            elif band.key is not None:
                k = require_rotation(rotation).rerotate(key, j, band.key, (name, "key"), tables, band.spectrum)
        segments.append(KVSegment(q, k, narrowed, rotation, angles))
    return segments


def _named(method: KeyBands, i: Tensor) -> list[tuple[Hashable, Band]]:
    return [((method, number), band) for number, band in enumerate(method.bands(i))]


def _narrowed(rows: Rows, bands: list[Band]) -> Rows:
    for band in bands:
        rows = rows.narrowed(band.first, band.last)
    return rows


def _sees_nothing(rows: Rows) -> bool:
    """Whether no row sees a key by its interval; False where that may not be read."""
    low, high = rows.columns.low, rows.columns.high
    return readable(rows.index) and not bool((low <= high).any())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scaled(call: LoweredAttention, factor: Tensor) -> LoweredAttention:
    """Scores times a factor for each row: on the query, or after the softcap where the model has one."""
    if call.spec.softcap:
        row_scale = factor.expand(call.segments[0].query.shape[:3])
        return dataclasses.replace(call, spec=dataclasses.replace(call.spec, row_scale=row_scale))

    segments = (s._replace(query=(s.query * factor[..., None]).to(s.query.dtype)) for s in call.segments)
    return dataclasses.replace(call, segments=tuple(segments))


def _product(query: Tensor, key: Tensor) -> Tensor:
    """q . k, (batch, heads, n, keys); query heads that share a key head are multiplied with it together."""
    batch, heads, n, width = query.shape
    together = query.reshape(batch, key.shape[1], -1, width) @ key.transpose(-1, -2)
    return together.reshape(batch, heads, n, -1)


def table_length(rows: Rows, kv_len: int) -> int:
    """A length beyond every distance in the call; from shapes alone, unless positions are explicit.

    Of few distinct values; where tables are built in a graph, which any length is to pass through, no more than it takes.
    """
    if not readable(rows.index):
        return kv_len + rows.index.shape[1] + MARGIN  # kernels refuse distances beyond it
    farthest = kv_len + rows.index.shape[1] - 1 if rows.key_ids is None else rows.span
    return 1 << max(10, (farthest + MARGIN).bit_length())


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
        with torch.inference_mode(False), torch.no_grad():  # a cached tensor must serve training too
            gain, bias = logit_map.tables(heads, length, device, strength if logit_map.blends else None)
            return gain.to(dtype), bias.to(dtype)

    if strength is not None or not keepable(like):
        return build()
    gain, bias = tables.get((logit_map, heads, length, device, dtype), build)
    return gain, bias
