"""A config and the tensors of one call, turned once into what kernels compute.

    segments   each attention over an interval of keys that are rotated alike: its query, key and rows (remaps, windows)
    spec       the logits: score, softcap, length temperature and logit map
    finish     what comes after the weighted sum of values

Attention runs every segment and merges by logsumexp; diagnostics ask for the logits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable

import torch
from torch import Tensor

from ..slots.base import Band, KeyBands, LengthTemperature, LogitMap
from .call import Call
from .geometry import Rows
from .kernels.lowered import KVSegment, LoweredAttention
from .kernels.spec import LogitSpec
from .kernels.triton import MARGIN
from .stages import length_factor, require_rotation, sink_of
from .tables import SHARED, TableCache
from .tracing import keepable, readable


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
    return lowered if factor is None else dataclasses.replace(lowered.with_scores(factor), factor=factor)


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
