"""What the layers of a forward pass share of their attention, prepared once; then a layer is its tensors alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..slots.base import LengthTemperature, LogitMap
from .call import Call
from .geometry import Rows
from .kernels.kernel import MARGIN, Computation, Kernel, LogitSpec
from .segments import BySegment, Segment
from .stages import finish, joint_sinks, learned_part
from .tables import SHARED, TableCache
from .tracing import keepable, readable, sent, shareable
from .turned import Keep

#: Ways to attend that are kept prepared for a call's rows: tables by head are as large as a layer's logits.
PREPARED = 4

Learned: TypeAlias = Mapping[str, nn.Module] | None


def prepared(rows: Rows) -> dict[Hashable, Prepared]:
    """All that is prepared for a call's rows, by the keys that `named` makes."""
    known: dict[Hashable, Prepared] = rows.once("prepared", dict)
    return known


def named(
    kind: Hashable,
    query: Tensor,
    key: Tensor,
    scaling: float,
    softcap: float | None,
    learned: Learned,
    sinks: Tensor | None,
    dropout: float = 0.0,
    trains: bool = False,
) -> Hashable:
    """A key: calls over the same rows with equal keys share one `Prepared`. kind stands for the config and the rotation."""
    shapes = query.shape, key.shape, query.dtype
    return kind, shapes, scaling, softcap, tuple(learned or ()), sinks is None, dropout, trains


class Prepared:
    """What rows, config, rotation and shapes of a call give: segments and their angles, tables by distance, factors by row.

    It holds no tensor of a layer, and computes every layer whose call has the same key (see `named`).
    """

    def __init__(self, call: Call, kernel: Kernel) -> None:
        config, spec = call.config, LogitSpec(float(call.scaling), call.softcap)
        if (logit_map := config.logit_map) is not None:
            heads, length = call.query.shape[1], table_length(call.rows, call.kv_len)
            gain, bias = distance_tables(logit_map, heads, length, call.query, call.cache, call.strength)
            spec = dataclasses.replace(spec, gain=gain, bias=bias, sinks=logit_map.sink_tokens)
        self.config = config
        segments = Segment.of(call)
        self.compute: Computation
        if kernel.together is None:
            self.compute = BySegment(call, segments, spec, kernel)
        else:
            self.compute = kernel.together(call, segments, spec)
        #: the temperature, float64 (batch or 1, heads or 1, q_len), before its learned part
        self.by_length: Tensor | None = None
        if isinstance(config.temperature, LengthTemperature):
            self.by_length = config.temperature.factor(self.compute.count.double(), call.query.shape[3])
        learned = set(call.learned or ())
        self.learns_factor = "temperature" in learned
        if self.by_length is not None and (self.learns_factor or self.by_length.numel() > 1):
            self.by_length = sent(self.by_length, call.query.device)
        self.learns_sinks = "sink" in learned or call.sink_logits is not None
        self.factor = None if self.learns_factor else self.factor_of(None)
        self.sinks = None if self.learns_sinks else self.sinks_of(call.query, None, None)

    @classmethod
    def of(cls, call: Call, kernel: Kernel) -> Prepared:
        """The one of the call's rows; made anew where nothing may be kept."""
        if not shareable(call.query) or call.strength is not None:
            return cls(call, kernel)
        kind = (call.config, call.rotation, call.asked) if call.kind is None else call.kind
        asked = call.query, call.key, call.scaling, call.softcap, call.learned, call.sink_logits
        made, name = prepared(call.rows), named(kind, *asked, call.dropout, call.trains)
        if (own := made.get(name)) is None:
            if len(made) >= PREPARED:
                made.clear()
            own = made[name] = cls(call, kernel)
        return own

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        learned: Learned,
        sink_logits: Tensor | None,
        keep: Keep | None = None,
    ) -> Tensor:
        """The output, (batch, heads, q_len, head_dim) like query; arguments as of `Call`."""
        factor = self.factor_of(learned) if self.learns_factor else self.factor
        sinks = self.sinks_of(query, learned, sink_logits) if self.learns_sinks else self.sinks
        out = self.compute(query, key, value, factor, sinks, keep)
        return finish(self.config, out, learned).to(query.dtype)

    def factor_of(self, learned: Learned) -> Any:
        """The temperature by length, as it is computed with; None without one."""
        if self.by_length is None:
            return None
        return self.compute.factor(learned_part(learned, "temperature", self.by_length))

    def sinks_of(self, query: Tensor, learned: Learned, sink_logits: Tensor | None) -> Any:
        """The logarithm of what joins the denominators, likewise."""
        by_head = joint_sinks(self.config, query, learned, sink_logits)
        return None if by_head is None else self.compute.sinks(by_head)


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
