"""Few queries against many keys on CUDA, as in decoding: all logits, what a method does to them, a softmax, the sum of values.

One Triton program gives the finished logits of a segment: it turns queries and keys as it reads them, divides by norms, caps,
and maps by distance. Another makes weights of them, under a temperature by their entropy and beside a sink. Nothing is read by
the host, so that all goes into a CUDA graph, and nothing is kept between tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..plan import AttentionPlan
from ..rotated_keys import Keep
from ..tracing import readable, sent
from . import programs


class FewOnCUDA:
    """A `Computation` of few queries; rows of a key head are the queries that share it, (kv_heads, group * q_len)."""

    def __init__(self, plan: AttentionPlan) -> None:
        query, rows, self.kv_len = plan.query, plan.rows, plan.kv_len
        device, rotation, known = query.device, plan.rotation, readable(plan.rows.index)
        self.spec, self.fold, self.cosine, self.temper = plan.logits, plan.fold, plan.cosine, plan.temper
        self.polynomial = plan.polynomial
        self.features = None if rotation is None else rotation.features
        self.group = query.shape[1] // plan.key.shape[1]
        self.segments: list[programs.DeviceSegment] = []
        for segment in plan.segments:
            own = segment.rows
            if known and own.seen(self.kv_len) is None:
                continue
            tensors = own.allowed, own.query_ids, own.key_ids
            allowed, query_ids, key_ids = (None if x is None else sent(x, device) for x in tensors)
            turns = ((segment.query, rows.query_places()), (segment.key, rows.key_places(self.kv_len)))
            angles = (None if delta is None else delta.kept_angles(at, plan.tables, device) for delta, at in turns)
            self.segments.append(programs.DeviceSegment(own.int32_index(device), allowed, query_ids, key_ids, *angles))
        self._known: dict[Hashable, Any] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None,
        sinks: Tensor | None,
        _keep: Keep | None,
    ) -> Tensor:
        shape, dtype, scaling, normed = query.shape[:3], query.dtype, self.spec.scaling, self.cosine is not None
        if not self.segments:  # nothing is visible
            return query.new_zeros(*shape, value.shape[3])
        if self.cosine is not None:
            scaling = self.cosine
        elif self.fold is not None:
            query, key, scaling = self.fold(query, key)
        if isinstance(factor, float):
            if self.spec.softcap:
                factor = query.new_full((1, 1, 1), factor, dtype=torch.float32)
            else:
                scaling, factor = scaling * factor, None
        if query.dtype != key.dtype:
            query = query.to(key.dtype)
        logits = programs.scores(query, key, self.segments, self.spec, scaling, factor, normed, self.features, self._known)
        by_entropy = self.temper(programs.entropies(logits)) if self.temper is not None and not self.polynomial else None
        weights = programs.weights(logits, by_entropy, sinks, value.dtype, self.polynomial, self._known)
        out = self._averaged(weights.view(-1, self.group * shape[2], weights.shape[3]), value.flatten(0, 1)).view(*shape, -1)
        return out if out.dtype == dtype else out.to(dtype)

    def _averaged(self, weights: Tensor, value: Tensor) -> Tensor:
        """The sum of values, the last few by themselves: a product over no multiple of ALIGNED takes ten times as long."""
        whole = self.kv_len // programs.ALIGNED * programs.ALIGNED
        if whole in (0, self.kv_len):
            return torch.bmm(weights[..., : self.kv_len], value)
        out = torch.bmm(weights[..., :whole], value[:, :whole])
        return out.baddbmm_(weights[..., whole : self.kv_len], value[:, whole:])
