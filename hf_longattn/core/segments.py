"""A call's keys in segments that are turned alike, and the way by which most kernels compute it: one segment after another."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..slots.base import Band, EntropyTemperature, KeyBands, Score
from .call import Call
from .geometry import Rows
from .kernels import sdpa, tiled
from .kernels.kernel import MASK_VALUE, Kernel, KernelCall, LogitSpec, Result, count_keys
from .rotary import Angles, Turn
from .tracing import keepable, readable
from .turned import Keep

#: A band, by its method and its number there.
NamedBand: TypeAlias = tuple[tuple[KeyBands, int], Band]


class Segment(NamedTuple):
    """An interval of each row's keys, and how both sides are turned to meet; no tensor of a layer.

    Args:
        whole: the call's rows.
        bands: what is seen of them, by name: the keys that lie in each.
        query, key: None: that side stays, as it does where it arrives turned.
    """

    whole: Rows
    bands: tuple[NamedBand, ...]
    query: Turn | None = None
    key: Turn | None = None

    @classmethod
    def of(cls, call: Call) -> list[Segment]:
        """All that a call's config makes of its rows, those that see nothing too."""
        i = call.rows.query_positions() if call.config.key_bands else None
        named = [[((m, n), band) for n, band in enumerate(m.bands(i))] for m in call.config.key_bands]  # type: ignore[arg-type]
        # the first of a method's bands that is turned as another one is; Dynamo cannot compare functions, and keeps nothing
        alike: dict[Hashable, int] | None = None if torch.compiler.is_compiling() else {}
        return [cls._turned(call, bands, alike) for bands in itertools.product(*named)]

    @classmethod
    def _turned(cls, call: Call, bands: tuple[NamedBand, ...], alike: dict[Hashable, int] | None) -> Segment:
        turns: dict[str, Turn] = {}
        for (m, n), band in bands:
            for side, remap in (("query", band.query), ("key", band.key)):
                if remap is not None:
                    first = n if alike is None else alike.setdefault((m, side, remap, band.spectrum), n)
                    turns[side] = Turn(call.rotation, remap, band.spectrum, (m, first, side), first)
        return cls(call.rows, bands, **turns)

    @property
    def name(self) -> Hashable:
        """The same for segments of a call's rows that are turned by the same angles."""
        return tuple(name for name, _ in self.bands), self.query is None, self.key is None

    @property
    def rows(self) -> Rows:
        """The call's rows, narrowed to these keys; the same for all that ask."""
        rows: Rows = self.whole.once(tuple(name for name, _ in self.bands), self._narrowed)
        return rows

    def _narrowed(self) -> Rows:
        whole = self.whole
        rows = dataclasses.replace(whole, _known={}, _host=None)  # kept with the whole ones, and keeps them not
        for _, band in self.bands:
            rows = rows.narrowed(band.first, band.last)
        return rows

    def seen(self, kv_len: int) -> tuple[slice | None, Tensor | None]:
        """The columns of these keys that some row sees, None: no row any; and which of them each row sees, None: all."""
        rows = self.whole
        if rows.allowed is None and rows.key_ids is None and rows.key_axes is None and rows.index.shape[:2] == (1, 1):
            _, key_start, start, low, high = rows.index[0, 0].tolist()
            for _, band in self.bands:
                low = low if band.first is None else max(low, start + int(band.first))
                high = high if band.last is None else min(high, start + int(band.last))
            low, high = max(low - key_start, 0), min(high - key_start, kv_len - 1)
            return (slice(low, high + 1) if low <= high else None), None
        visible = self.rows.visible(kv_len)
        some = visible.flatten(0, 2).any(0).nonzero()
        if not len(some):
            return None, None
        columns = slice(int(some[0]), int(some[-1]) + 1)
        own = visible[..., columns]
        return columns, None if own.all() else own


class Side(NamedTuple):
    """What is turned of a segment's queries or keys: their angles (see `Turn`), and which they are; None: all."""

    angles: Angles
    at: slice | None


class ReadySegment(NamedTuple):
    """A segment of which some row may see a key: its rows, and what is turned in it."""

    rows: Rows
    query: Side | None
    key: Side | None


#: All rows, and all keys.
ALL: tuple[slice | None, slice | None] = (None, None)


class BySegment:
    """A `Computation` by one run of a kernel for each segment, joined by their logsumexps."""

    def __init__(self, call: Call, segments: list[Segment], spec: LogitSpec, kernel: Kernel) -> None:
        config, rows, self.kv_len, device = call.config, call.rows, call.kv_len, call.query.device
        self._all = segments
        self.kernel, self.spec, self.dropout, self.rotation = kernel, spec, call.dropout, call.rotation
        self.score, self.widens = config.score, kernel.wide and call.folds and device.type == "cpu"
        self.wide = torch.promote_types(call.query.dtype, torch.float32)
        self.temper = config.temperature.factor if isinstance(config.temperature, EntropyTemperature) else None
        self.segments: list[ReadySegment] = []
        for segment in segments:
            own, query, key = segment.rows, segment.query, segment.key
            seen = own.once(("seen", self.kv_len), functools.partial(own.seen, self.kv_len)) if readable(own.index) else ALL
            if self.segments and seen is None:
                continue
            by_query: Side | None = None
            by_key: Side | None = None
            rows_at, keys_at = ALL if seen is None else seen
            if query is not None:
                by_query = Side(query.kept_angles(_at(rows.query_places(), rows_at), call.cache, device), rows_at)
            if key is not None:
                j = _at(rows.key_places(self.kv_len), keys_at)
                by_key = Side(key.kept_angles(j, call.cache, device), keys_at)
            self.segments.append(ReadySegment(own.on(device), by_query, by_key))
        if self.temper is not None:
            alone = len(self.segments) == 1
            #: tempered, logits are scaling q . k over plain rows
            self.plain = alone and call.asked == "auto" and spec.gain is None and not spec.softcap
            self.plain = self.plain and self.segments[0].rows.plain is not None
            # a CPU's fused kernel runs twice, for the entropies and for the output, in less time than a row is gone over again
            twice = self.plain and call.query.device.type == "cpu"
            self.at_once = alone and kernel.tempered is not None and not (twice or call.trains) and keepable(call.query)

    @property
    def count(self) -> Tensor:
        return count_keys(self._all, self.kv_len)

    def factor(self, by_row: Tensor) -> float | Tensor:
        """A number where all rows share it and the host knows it."""
        shared = by_row.numel() == 1 and by_row.device.type == "cpu" and keepable(by_row) and not by_row.requires_grad
        return float(by_row) if shared else by_row.to(self.wide)

    def sinks(self, by_head: Tensor) -> Tensor:
        return by_head

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None,
        sinks: Tensor | None,
        keep: Keep | None = None,
    ) -> Tensor:
        calls, kernel = self.calls(query, key, value, factor), self.kernel
        joins = len(calls) > 1 or sinks is not None
        if self.temper is not None:
            if kernel.tempered is not None and self.at_once and sinks is None:
                return kernel.tempered(calls[0], self.temper)
            by_entropy = self.temper(self._entropies(calls))
            calls = [_tempered(call, by_entropy) for call in calls]
            kernel = sdpa.KERNEL if self.plain and sinks is None else kernel
        if kernel.joined is not None and readable(query):
            return kernel.joined(calls, sinks)
        return merge_outputs([self._run(kernel, call._replace(with_lse=joins), value.dtype) for call in calls], sinks)

    def calls(self, query: Tensor, key: Tensor, value: Tensor, factor: float | Tensor | None) -> list[KernelCall]:
        """What the kernel is to compute, but for a temperature by entropy: positions, score, temperature by length."""
        if self.widens:
            query, key = query.to(self.wide), key.to(self.wide)
        calls = [self._turned(segment, query, key, value) for segment in self.segments]
        if self.score is not None:
            calls = [_folded(call, self.score) for call in calls]
        return calls if factor is None else [_scored(call, factor) for call in calls]

    def _turned(self, segment: ReadySegment, query: Tensor, key: Tensor, value: Tensor) -> KernelCall:
        if segment.query is not None:
            query = self.rotation.rotate(query, *segment.query.angles, segment.query.at)  # type: ignore[union-attr]
        if segment.key is not None:
            key = self.rotation.rotate(key, *segment.key.angles, segment.key.at)  # type: ignore[union-attr]
        return KernelCall(query, key, value, segment.rows, self.spec, self.dropout)

    def _entropies(self, calls: list[KernelCall]) -> Tensor:
        """The entropy of every row over its keys; a sink is none."""
        kernel, half = self.kernel if self.kernel.entropies else tiled.KERNEL, calls[0].value.dtype  # type: ignore[union-attr]
        calls = [c._replace(value=None, dropout=0.0, with_lse=len(calls) > 1, with_entropy=True) for c in calls]
        return merge_entropies([self._run(kernel, call, half) for call in calls])

    def _run(self, kernel: Kernel, call: KernelCall, half: torch.dtype) -> Result:
        assert kernel.run is not None
        return kernel.run(call if kernel.wide else call._replace(query=call.query.to(half), key=call.key.to(half)))


def _at(position: Tensor, at: slice | None) -> Tensor:
    return position if at is None else position[..., at]


def _folded(call: KernelCall, score: Score) -> KernelCall:
    """The same with a score of its own in place of scaling q . k."""
    query, key, scaling = score.fold(call.query, call.key)
    return call._replace(query=query, key=key, spec=dataclasses.replace(call.spec, scaling=float(scaling)))


def _scored(call: KernelCall, factor: float | Tensor) -> KernelCall:
    """The same with its scores times a factor for each row: on the query, or after the softcap where the model has one."""
    if isinstance(factor, float):
        if not call.spec.softcap:
            return call._replace(spec=call.spec.sharpened(factor))
        factor = call.query.new_full((1, 1, 1), factor, dtype=torch.promote_types(call.query.dtype, torch.float32))
    if call.spec.softcap:
        return call._replace(spec=dataclasses.replace(call.spec, row_scale=factor.expand(call.query.shape[:3])))
    return call._replace(query=(call.query * factor[..., None]).to(call.query.dtype))


def _tempered(call: KernelCall, factor: Tensor) -> KernelCall:
    """The same with its finished logits times a factor for each row, (batch, heads, q_len)."""
    call = _scored(call, factor)
    return call if call.spec.gain is None else call._replace(spec=dataclasses.replace(call.spec, bias_scale=factor))


def _log_shares(results: list[Result], sinks: Tensor | None) -> Tensor:
    """The logarithm of each segment's share of a row's probability, last the sink's: (segments, batch, heads, q_len), finite.

    Fully masked rows without a sink share evenly.
    """
    lse = [lse for _, lse, _ in results]
    if sinks is not None:
        lse.append(sinks.to(lse[0])[:, None].expand_as(lse[0]))
    return torch.log_softmax(torch.stack(lse).clamp(min=MASK_VALUE), 0)


def merge_outputs(results: list[Result], sinks: Tensor | None = None) -> Tensor:
    """The output over all segments from those over each, by their logsumexps: out = Σ share out_segment; a sink's is 0."""
    if len(results) == 1 and sinks is None:
        return results[0][0]
    shares = _log_shares(results, sinks).exp()
    return sum(share[..., None] * out for share, (out, _, _) in zip(shares, results, strict=False))  # type: ignore[return-value]


def merge_entropies(results: list[Result]) -> Tensor:
    """The entropy over all segments, H = Σ share (H_segment - ln share)."""
    if len(results) == 1:
        return results[0][2]
    shares = _log_shares(results, None)
    merged = (shares.exp() * (torch.stack([entropy for _, _, entropy in results]) - shares)).sum(0)
    visible = torch.stack([lse for _, lse, _ in results]).amax(0) > MASK_VALUE
    return torch.where(visible, merged, 0.0)
