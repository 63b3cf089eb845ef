"""Few queries against many keys on CUDA, as in decoding: all logits, what a method does to them, a softmax, the sum of values.

One Triton program gives the finished logits of a segment: it turns queries and keys as it reads them, divides by norms, caps,
and maps by distance. Another makes weights of them, under a temperature by their entropy and beside a sink. Nothing is read by
the host, so that all goes into a CUDA graph, and nothing is kept between tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..tracing import keepable, readable, sent
from . import parts
from .kernel import FEW_QUERIES, Kernel, LogitSpec, count_keys

if TYPE_CHECKING:  # they know methods and configs
    from ..call import Call
    from ..segments import Segment
    from ..turned import Keep


def why_not(call: Call) -> str | None:
    """The reason why a call is not computed here, or None."""
    if (reason := parts.why_not(call.query)) is not None:
        return reason
    if call.dropout:
        return "it has no dropout"
    if torch.compiler.is_exporting():  # before lengths are compared
        return "an exported graph serves every length"
    if not 0 < call.query.shape[2] <= FEW_QUERIES:
        return f"it takes up to {FEW_QUERIES} queries"
    return "it has no gradients" if call.trains else None


class Few:
    """A `Computation` of few queries; rows of a key head are the queries that share it, (kv_heads, group * q_len)."""

    def __init__(self, call: Call, segments: list[Segment], spec: LogitSpec) -> None:
        config, query, rows, self.kv_len = call.config, call.query, call.rows, call.kv_len
        device, known = query.device, readable(call.rows.index)
        self.device, self.shape = device, query.shape[:3]
        self.spec, self.score, turn = spec, config.score, call.rotation
        self.layout = None if turn is None else parts.Layout(turn.first, turn.inv_freq.shape[0], turn.interleaved)
        self.temper: Any = config.temperature.factor if call.by_entropy else None  # type: ignore[union-attr]
        self.group = query.shape[1] // call.key.shape[1]
        self._all = segments
        self.intervals: list[parts.Interval] = []
        for segment in segments:
            own = segment.rows
            if known and own.once(("seen", self.kv_len), functools.partial(own.seen, self.kv_len)) is None:
                continue
            tensors = own.allowed, own.query_ids, own.key_ids
            allowed, query_ids, key_ids = (None if x is None else sent(x, device) for x in tensors)
            turns = ((segment.query, rows.query_places()), (segment.key, rows.key_places(self.kv_len)))
            angles = (None if turn is None else turn.kept_angles(at, call.cache, device) for turn, at in turns)
            self.intervals.append(parts.Interval(own.packed(device), allowed, query_ids, key_ids, *angles))
        self._known: dict[Hashable, list[parts.Launch]] = {}

    @property
    def count(self) -> Tensor:
        return count_keys(self._all, self.kv_len)

    def factor(self, by_row: Tensor) -> float | Tensor:
        """A number, or float32 (batch, heads, q_len)."""
        shared = by_row.numel() == 1 and by_row.device.type == "cpu" and keepable(by_row)
        return float(by_row) if shared and not self.spec.softcap else by_row.to(self.device).float().expand(self.shape)

    def sinks(self, by_head: Tensor) -> Tensor:
        """(heads,)."""
        return by_head.float().contiguous()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None,
        sinks: Tensor | None,
        keep: Keep | None = None,
    ) -> Tensor:
        shape, dtype, scaling, normed = query.shape[:3], query.dtype, self.spec.scaling, False
        if not self.intervals:  # nothing is visible
            return query.new_zeros(*shape, value.shape[3])
        if self.score is not None:
            own = self.score.over_norms(query)
            normed = own is not None
            query, key, scaling = (own[0], key, own[1]) if own is not None else self.score.fold(query, key)
        if isinstance(factor, float):
            scaling, factor = scaling * factor, None
        if query.dtype != key.dtype:
            query = query.to(key.dtype)
        logits = parts.scores(query, key, self.intervals, self.spec, scaling, factor, normed, self.layout, self._known)
        by_entropy = None if self.temper is None else self.temper(parts.entropies(logits))
        weights = parts.weights(logits, by_entropy, sinks, value.dtype)
        out = self._averaged(weights.view(-1, self.group * shape[2], weights.shape[3]), value.flatten(0, 1)).view(*shape, -1)
        return out if out.dtype == dtype else out.to(dtype)

    def _averaged(self, weights: Tensor, value: Tensor) -> Tensor:
        """The sum of values, the last few by themselves: a product over no multiple of ALIGNED takes ten times as long."""
        whole = self.kv_len // parts.ALIGNED * parts.ALIGNED
        if whole in (0, self.kv_len):
            return torch.bmm(weights[..., : self.kv_len], value)
        out = torch.bmm(weights[..., :whole], value[:, :whole])
        return out.baddbmm_(weights[..., whole : self.kv_len], value[:, whole:])


def _picked(call: Call) -> bool:
    """Unless sdpa does it with what it is given: a score of its own would be made of all keys before."""
    if call.query.device.type != "cuda":
        return False
    return call.beyond_product is not None or call.rows.plain is None or call.config.score is not None


KERNEL = Kernel("few", why_not, picked=_picked, together=Few)
