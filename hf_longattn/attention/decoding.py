"""Few queries against many keys, as in decoding: dense over keys, and nothing is prepared twice.

What depends on positions alone (bands, rotations, factors by length, gain and bias of each key) is prepared once for a call's
rows, which the layers of a forward pass share; a layer is then a few products. Keys are re-rotated, and divided by their
norms, as they are read, so that no second KV cache is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..slots.base import EntropyTemperature, LengthTemperature
from .bands import Bands
from .call import Call
from .geometry import Rows
from .kernels.spec import MASK_VALUE
from .lowering import FEW_QUERIES, distance_tables, table_length
from .stages import finish, joint_sink
from .tracing import keepable

#: Elements of keys that are worked on at a time where more than a product is to be done with them: what a core's cache holds.
KEY_ELEMENTS = 1 << 19
#: Keys of a head that are then worked on at a time at least; as many heads as fit share the reading of their angles.
KEYS = 1 << 9
#: Ways to attend that are kept prepared for a call's rows: tables by head are as large as a layer's logits.
PREPARED = 4

Learned: TypeAlias = Mapping[str, nn.Module] | None


def serves(query: Tensor, dropout: float) -> bool:
    """Whether a call without gradients is computed here."""
    if dropout or query.device.type != "cpu" or not keepable(query):  # first: a graph for any length compares no length
        return False
    return 0 < query.shape[2] <= FEW_QUERIES


def decode(call: Call) -> Tensor:
    """`attend` for calls that `serves` names."""
    query, key, sinks = call.query, call.key, call.sink_logits
    kind = (call.config, call.rotation, call.asked) if call.kind is None else call.kind
    made, name = prepared(call.rows), named(kind, query, key, call.scaling, call.softcap, call.learned, sinks)
    if (decoding := made.get(name)) is None:
        if len(made) >= PREPARED:
            made.clear()
        decoding = made[name] = Decoding(call)
    return decoding(query, key, call.value, call.learned, sinks)


def prepared(rows: Rows) -> dict[Hashable, Decoding]:
    """The `Decoding`s that are prepared for a call's rows, by the keys that `named` makes."""
    known: dict[Hashable, Decoding] = rows.once("prepared", dict)
    return known


def named(
    kind: Hashable, query: Tensor, key: Tensor, scaling: float, softcap: float | None, learned: Learned, sinks: Tensor | None
) -> Hashable:
    """A key: calls over the same rows with equal keys share one `Decoding`. kind stands for the config and the rotation."""
    return kind, query.shape, key.shape, query.dtype, scaling, softcap, tuple(learned or ()), sinks is None


class Decoding:
    """Attention over a call's rows, prepared once; it computes every layer whose call has the same key (see `named`).

    Inside, the queries that share a key head are rows of it: (batch, kv_heads, group * q_len, head_dim).
    """

    def __init__(self, call: Call) -> None:
        config, query, rows, kv_len = call.config, call.query, call.rows, call.key.shape[2]
        names = ("bands", config.positions, config.visibility, kv_len, query.shape[3], query.dtype, call.rotation)
        bands: Bands = rows.once(names, functools.partial(Bands.of, config, query, kv_len, rows, call.rotation, call.cache))
        self.config, self.scaling, self.softcap = config, call.scaling, call.softcap
        self.parts, self.blind = bands.parts, bands.blind
        self.columns = None if bands.columns == slice(0, kv_len) else bands.columns
        self.kv_heads, self.group = call.key.shape[1], query.shape[1] // call.key.shape[1]
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.entropy = config.temperature if isinstance(config.temperature, EntropyTemperature) else None
        self.length = None  # the temperature by length, float64 (batch or 1, heads or 1, q_len), before its learned part
        if isinstance(config.temperature, LengthTemperature):
            self.length = config.temperature.factor(bands.count.double(), query.shape[3])
        self.learns = {"temperature", "sink"} & set(call.learned or ())
        self.factor = None if "temperature" in self.learns else self._factor(None)
        acting = config.score, config.logit_map, config.sink, call.softcap, call.sink_logits, self.entropy
        turned = any(part.turn is not None for part in bands.parts)
        self.fuses = acting == (None,) * 6 and not turned and call.asked == "auto"
        if self.fuses:
            self._prepare_fused(bands.hidden, query.shape[2])
        else:
            self._prepare(call, bands)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, learned: Learned, sink_logits: Tensor | None) -> Tensor:
        """The output, (batch, heads, q_len, head_dim) like query; arguments as of `Call`."""
        if self.columns is not None:
            key, value = key[:, :, self.columns], value[:, :, self.columns]
        if not self.parts:  # nothing is visible
            out = query.new_zeros(*query.shape[:3], value.shape[3])
        else:
            factor = self._factor(learned) if "temperature" in self.learns else self.factor
            compute = self._fused if self.fuses else self._dense
            out = compute(query, key, value, factor, learned, sink_logits)
        if self.blind is not None:
            out = out.masked_fill(self.blind, 0.0)
        return finish(self.config, out, learned).to(query.dtype)

    def _factor(self, learned: Learned) -> float | Tensor | None:
        """The temperature by length: a number, or (batch or 1, heads or 1, q_len, 1)."""
        if (factor := self.length) is None:
            return None
        if learned is not None and "temperature" in learned:
            factor = learned["temperature"](factor)
        return float(factor) if factor.numel() == 1 else factor.to(self.wide)[..., None]

    def _grouped(self, x: Tensor) -> Tensor:
        """(batch or 1, heads or 1, q_len, m) so that it fits (batch, kv_heads, group * q_len, m)."""
        if x.shape[1] > 1:
            return x.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)  # of no keys too
        return x if x.shape[2] == 1 else x.repeat(1, 1, self.group, 1)

    # by sdpa: nothing but a factor on queries acts between them and the softmax ----------------------------------------------

    def _prepare_fused(self, hidden: Tensor | None, q_len: int) -> None:
        """Query heads that share a key head are so many queries of it, where there is one query."""
        self.together = q_len == 1 and self.group > 1
        self.allowed = None if hidden is None else ~(self._grouped(hidden) if self.together else hidden)

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, factor: float | Tensor | None, *_: Learned | Tensor | None
    ) -> Tensor:
        shape, scaling = query.shape, self.scaling
        if isinstance(factor, Tensor):
            query = (query * factor).to(query.dtype)
        elif factor is not None:
            scaling *= factor
        if self.together:
            query = query.reshape(shape[0], self.kv_heads, self.group, shape[3])
        grouped = self.group > 1 and not self.together
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(query, key, value, self.allowed, scale=scaling, enable_gqa=grouped)
        return out.view(*shape[:3], -1) if self.together else out

    # all else ----------------------------------------------------------------------------------------------------------------

    def _prepare(self, call: Call, bands: Bands) -> None:
        ends = [(one.columns.stop, other.columns.start) for one, other in itertools.pairwise(self.parts)]
        #: no key lies among the columns of two parts; some keys lie among those of none, and are not computed
        self.apart, self.gaps = all(a <= b for a, b in ends), any(a < b for a, b in ends)
        self.gaps &= self.apart
        where = [torch.arange(part.columns.start, part.columns.stop) for part in self.parts]
        columns = torch.cat(where) if self.gaps else slice(None)
        hidden = None if bands.hidden is None else bands.hidden[..., columns]
        self.hidden = None if hidden is None or not hidden.any() else self._grouped(hidden)
        self.own = [None if self.apart or part.own is None else self._grouped(part.own) for part in self.parts]
        self._prepare_turns(call.query.shape[3])
        self.sinks = None if "sink" in self.learns or call.sink_logits is not None else self._sinks(call.query, None, None)
        self.map = None if call.config.logit_map is None else self._map(call, bands.columns, columns)

    def _prepare_turns(self, width: int) -> None:
        """All matrices that queries are multiplied by, side by side, and which columns of the product are each part's."""
        turns = [[x for x in (part.turn, part.half) if x is not None] for part in self.parts]
        ends = [0, *itertools.accumulate(width * len(x) for x in turns)]
        self.places = [slice(*ends) for ends in itertools.pairwise(ends)]
        self.turns: Tensor | None = None
        if several := list(itertools.chain(*turns)):
            shape = tuple(
                max(sizes) for sizes in zip(*(x.shape for x in several), strict=True)
            )  # torch's own takes as long as ten of these
            joined = torch.cat([x.expand(shape) for x in several], -1)
            self.turns = joined[0, 0, 0] if shape[:3] == (1, 1, 1) else joined

    def _map(self, call: Call, shown: slice, columns: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Gain and bias of each key, MASK_VALUE of hidden ones."""
        logit_map, rows, kv_len = call.config.logit_map, call.rows, call.key.shape[2]
        assert logit_map is not None
        own = distance_tables(logit_map, call.query.shape[1], table_length(rows, kv_len), call.query, call.cache)
        t = rows.distance(kv_len)[..., shown][..., columns]
        gain, bias = (x[:, t].transpose(0, 1) for x in own)
        if logit_map.sink_tokens:
            which = rows.sinks(kv_len, logit_map.sink_tokens)[:, None, :, shown][..., columns]
            gain, bias = gain.masked_fill(which, 1.0), bias.masked_fill(which, 0.0)
        gain, bias = self._grouped(gain), self._grouped(bias)
        return gain, bias if self.hidden is None else bias.masked_fill(self.hidden, MASK_VALUE)

    def _sinks(self, query: Tensor, learned: Learned, sink_logits: Tensor | None) -> Tensor | None:
        """The logarithm of what joins the denominators, (1, kv_heads, group * q_len, 1)."""
        own = joint_sink(self.config, query, learned, sink_logits)
        return None if own is None else self._grouped(own.to(self.wide)[None, :, None, None].expand(1, -1, query.shape[2], 1))

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None,
        learned: Learned,
        sink_logits: Tensor | None,
    ) -> Tensor:
        batch, heads, n, width = query.shape
        logits = self._logits(query.reshape(batch, self.kv_heads, -1, width).to(self.wide), key, factor)
        if self.map is not None:
            logits = torch.addcmul(self.map[1], logits, self.map[0], out=logits)
        elif self.hidden is not None:
            logits = logits.masked_fill_(self.hidden, MASK_VALUE)
        sinks = self._sinks(query, learned, sink_logits) if self.sinks is None else self.sinks
        if self.entropy is not None:
            logits = self._by_entropy(logits, (batch, heads, n), sinks is not None)
        share = None if sinks is None else torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sinks)
        out = self._averaged(torch.softmax(logits, -1), value.to(self.wide))
        return (out if share is None else out.mul_(share)).view(batch, heads, n, -1)

    def _logits(self, rows: Tensor, key: Tensor, factor: float | Tensor | None) -> Tensor:
        """(batch, kv_heads, group * q_len, keys) from score to temperature by length."""
        scaling, normed, score = self.scaling, False, self.config.score
        factor = self._grouped(factor) if isinstance(factor, Tensor) else factor
        if score is not None:
            own = score.over_norms(rows)
            if normed := own is not None:
                rows, scaling = own
            else:
                rows, key, scaling = score.fold(rows, key.to(self.wide))
        logits = self._products(rows * (scaling if factor is None or self.softcap else scaling * factor), key, normed)
        if self.softcap:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
            logits = logits if factor is None else logits.mul_(factor)
        return logits

    def _products(self, rows: Tensor, key: Tensor, normed: bool) -> Tensor:
        """q . k over all bands, (batch, kv_heads, group * q_len, keys), divided by |k| if `normed`; 0 where there is none."""
        turned, scores = rows if self.turns is None else self._turned(rows), []
        for part, place in zip(self.parts, self.places, strict=True):
            own = rows if part.turn is None else turned[..., place]
            scores.append(_scores(own, key if len(self.parts) == 1 else key[:, :, part.columns], part.angles, normed))
        if self.apart:
            return scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        logits = rows.new_zeros(*rows.shape[:3], key.shape[2])
        for part, visible, one in zip(self.parts, self.own, scores, strict=True):
            into = logits[..., part.columns]
            into.copy_(one if visible is None else torch.where(visible, one, into))
        return logits

    def _turned(self, rows: Tensor) -> Tensor:
        """Rows times all `turns`, side by side."""
        turns = self.turns
        assert turns is not None
        if turns.ndim == 2:
            return rows @ turns
        by_query = rows.unflatten(2, (self.group, -1))
        return (by_query[..., None, :] @ turns[:, :, None]).flatten(2, 4)

    def _by_entropy(self, logits: Tensor, shape: tuple[int, int, int], sinks: bool) -> Tensor:
        """Logits times the temperature, up to a constant for each row unless there are sinks."""
        assert self.entropy is not None
        log_p = torch.log_softmax(logits, -1)
        entropy = -torch.linalg.vecdot(log_p.exp(), log_p)  # terms of one sign: nothing cancels
        factor = self.entropy.factor(entropy.view(shape)).view(*entropy.shape, 1)
        logits = (logits if sinks else log_p).mul_(factor)
        return logits if self.hidden is None else logits.masked_fill_(self.hidden, MASK_VALUE)

    def _averaged(self, weights: Tensor, value: Tensor) -> Tensor:
        if not self.gaps:
            return weights @ value
        own = zip(weights.split([part.size for part in self.parts], -1), self.parts, strict=True)
        return functools.reduce(torch.add, (share @ value[:, :, part.columns] for share, part in own))


def _scores(rows: Tensor, key: Tensor, angles: tuple[Tensor, Tensor] | None, normed: bool) -> Tensor:
    """q . k of one band, (batch, kv_heads, rows, keys).

    Args:
        rows: under `angles` beside each query what their sine part is multiplied by, (..., 2 head_dim).
    """
    batch, heads, keys, width = key.shape
    if (angles is None and not normed and key.dtype == rows.dtype) or key.numel() <= KEY_ELEMENTS:
        return _read(rows, key, angles, normed)
    out = rows.new_empty(*rows.shape[:3], keys)
    step = max(KEY_ELEMENTS // (batch * heads * width), KEYS)
    at_once = max(KEY_ELEMENTS // (step * width), 1)
    everything = [(slice(None), slice(None))]
    groups = everything if batch * heads <= at_once else list(itertools.product(_pieces(batch, 1), _pieces(heads, at_once)))
    for c in _pieces(keys, step):
        for b, h in groups:
            own = None if angles is None else (_of(angles[0], b, h)[:, :, c], _of(angles[1], b, h)[:, :, c])
            out[b, h, :, c] = _read(rows[b, h], key[b, h, c], own, normed)
    return out


def _read(rows: Tensor, key: Tensor, angles: tuple[Tensor, Tensor] | None, normed: bool) -> Tensor:
    """`_scores` of keys that a core's cache holds."""
    key = key.to(rows.dtype)
    if angles is None:
        out = rows @ key.mT
    elif rows.shape[2] == 1:  # a query of its own for each key takes less than two products
        query, half = rows.chunk(2, -1)
        out = (angles[0] * query).addcmul_(angles[1], half).mul_(key).sum(-1)[:, :, None]
    else:
        out = rows @ torch.cat([angles[0] * key, angles[1] * key], -1).mT
    return out.div_(torch.linalg.vector_norm(key, dim=-1).clamp_(min=1e-30)[:, :, None]) if normed else out


def _pieces(length: int, step: int) -> list[slice]:
    return [slice(first, first + step) for first in range(0, length, step)]


def _of(x: Tensor, b: slice, h: slice) -> Tensor:
    """A part of what may be the same for all batch entries, and for all key heads."""
    return x[b if x.shape[0] > 1 else slice(None), h if x.shape[1] > 1 else slice(None)]
