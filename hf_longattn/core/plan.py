"""An attention plan: what the layers of a pass compute, as kernels know it; no method, no config, and no tensor of a layer
but the tables that a logit map has learned there.

    L_ij = row_i gain_t C(scaling q_i . k_j) + bias_t,    out_i = softmax_j(L_ij) v_j,    t = |position_i - position_j|

Keys come in segments: intervals of each row's keys whose queries and keys are turned alike before they meet. `lower` makes a
plan of a config, the rows of a pass, a rotation and shapes; a kernel prepares it once; a layer is then `plan.run`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .geometry import AttentionLayout
from .rotary import Rotation, RotationDelta
from .rotated_keys import Keep
from .tables import TableCache
from .tracing import keepable

#: The learned parts of methods by slot.
Learned: TypeAlias = Mapping[str, nn.Module] | None
#: (query, key, value, factor, sinks, keep) -> the weighted sum of values. factor multiplies the logits of each row: a number,
#: or (batch or 1, heads or 1, q_len); None is 1. sinks: (heads,), the logarithm of one more term in each denominator, or None.
#: keep: finds keys that were turned before (see `rotated_keys`), or None; asked for by computations whose `kept_under` is not
#: None.
Computation: TypeAlias = Callable[[Tensor, Tensor, Tensor, float | Tensor | None, Tensor | None, Keep | None], Tensor]


#: Plans that are kept for the rows of a pass: tables by head are as large as a layer's logits.
MOST_PLANS = 4


def plans(rows: AttentionLayout) -> dict[Hashable, ReadyPlan]:
    """All plans over a pass's rows, by the names that `attend.plan_of` gives them."""
    known: dict[Hashable, ReadyPlan] = rows.once("plans", dict)
    return known


class Operand(NamedTuple):
    """Shape, dtype and device of a layer's tensor, before there is one."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Operand:
        return cls(x.shape, x.dtype, x.device)


@dataclass(frozen=True, eq=False)
class LogitSpec:
    """The logit of query row i and key j at the distance t = |position_i - position_j|:

        L_ij = x_i gain_t C(S_ij) + y_i bias_t,    S = scaling q . k,    C(s) = c tanh(s / c) or s

    Args:
        softcap: c.
        gain, bias: (heads or 1, length) by distance; both or neither; length must exceed every distance.
        row_scale, bias_scale: x and y, (batch, heads, q_len), differentiable; None is 1.
        sinks: the keys at the first positions of a sequence that have gain 1 and bias 0.
        learns: gain and bias are differentiable, too.
        polynomials: gain and bias as polynomials of the distance, as `triton._fits` makes them; None: they are looked up.
    """

    scaling: float
    softcap: float | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None
    row_scale: Tensor | None = None
    bias_scale: Tensor | None = None
    sinks: int = 0
    learns: bool = False
    polynomials: Tensor | None = None
    # init=False: `dataclasses.replace` begins with none, since a score of its own has another scaling in each layer
    _sharpened: dict[float, LogitSpec] = field(default_factory=dict, init=False, repr=False)

    def sharpened(self, factor: float) -> LogitSpec:
        """Multiply scaling by a factor; made once, since every layer of a decoded token asks for it."""
        if (known := self._sharpened.get(factor)) is None:
            known = self._sharpened[factor] = dataclasses.replace(self, scaling=self.scaling * factor)
        return known


class Segment(NamedTuple):
    """An interval of each row's keys, and how both sides are turned to meet.

    Args:
        all_rows: the rows of which it is a part.
        name: tells the segment apart from others of the same rows: what is kept of it is kept under this name.
        first, last: the first and the last position of a key in it for each row, int64 (batch or 1, q_len); None: no limit.
        query, key: how that side is turned; None: it is not.
    """

    all_rows: AttentionLayout
    name: Hashable
    first: Tensor | None = None
    last: Tensor | None = None
    query: RotationDelta | None = None
    key: RotationDelta | None = None

    @property
    def rows(self) -> AttentionLayout:
        """The rows, narrowed to these keys; made once."""
        rows: AttentionLayout = self.all_rows.once(self.name, self._narrowed)
        return rows

    def _narrowed(self) -> AttentionLayout:
        copy = dataclasses.replace(self.all_rows)  # all_rows keep the narrowed rows, which must not keep all_rows
        return copy.narrowed(self.first, self.last)

    def counts(self, kv_len: int) -> Tensor:
        """The number of keys in it that each row sees, int64 (batch or 1, heads or 1, q_len)."""
        rows = self.all_rows if self.first is None and self.last is None else self.rows
        return rows.count(kv_len)

    def visible_columns(self, kv_len: int) -> tuple[slice | None, Tensor | None]:
        """Find the keys that some row sees.

        Returns:
            their columns, from the first to the last; None: no row sees any.
            which of these each row sees, bool (batch or 1, heads or 1, q_len, columns); None: every row sees all of them.
        """
        if (row := self.all_rows.row) is not None:  # as in decoding
            _, key_start, start, low, high = row
            low = low if self.first is None else max(low, start + int(self.first))
            high = high if self.last is None else min(high, start + int(self.last))
            low, high = max(low - key_start, 0), min(high - key_start, kv_len - 1)
            return (slice(low, high + 1) if low <= high else None), None
        visible = self.rows.visible(kv_len)
        some = visible.flatten(0, 2).any(0).nonzero()
        if not len(some):
            return None, None
        columns = slice(int(some[0]), int(some[-1]) + 1)
        own = visible[..., columns]
        return columns, None if own.all() else own


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionPlan:
    """The computation of all layers whose calls share rows, config, rotation and shapes; kernels read it when they are chosen.

    Args:
        query, key, value: (batch, heads, q_len, head_dim), and (batch, kv_heads, kv_len, ...) twice.
        rows: which keys each query sees, and how far away they are.
        segments: disjoint; together they hold all keys that are seen, and more that are not.
        logits: how products become logits, but for the factors of rows.
        fold: from query and key to query, key and scaling of a score of its own; None: it is scaling q . k.
        cosine: the c of a score that is c cos(q, k).
        by_length: a factor on the scores of each row, float64 (batch or 1, heads or 1, q_len), before its learned part; on the
            device of queries unless it is one number that nothing learns from.
        temper: from the entropy of each row, (batch, heads, q_len) in nats, to a factor on its finished logits.
        polynomial: what `temper` computes, where it is one: the entropies that lower and higher ones are held at, then the
            coefficients, the highest power first; empty: it is none.
        sinks: from a query, the learned parts and the model's sink logits to the logarithm of what joins the denominators,
            (heads,), or None.
        finish: from the weighted sum of values and the learned parts to the output; None: it is that.
        learned: the slots whose methods have learned parts.
        model_sinks: whether the model has sink logits of its own.
        names: of methods by slot, for messages.
        rotation: how queries and keys are rotated already; None: nothing is turned.
        trains: whether gradients may be asked for.
        readable, keepable: of the layers' tensors, see `tracing`.
        asked: the backend that is insisted on, or "auto".
        tables: where tables by position are kept.
        method_id: see `Call`; rotated keys are kept by it; None: none are kept.
    """

    query: Operand
    key: Operand
    value: Operand
    rows: AttentionLayout
    segments: list[Segment]
    logits: LogitSpec
    finish: Callable[[Tensor, Learned], Tensor] | None
    sinks: Callable[[Tensor, Learned, Tensor | None], Tensor | None]
    tables: TableCache
    fold: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, float]] | None = None
    cosine: float | None = None
    by_length: Tensor | None = None
    temper: Callable[[Tensor], Tensor] | None = None
    polynomial: tuple[float, ...] = ()
    learned: frozenset[str] = frozenset()
    model_sinks: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    rotation: Rotation | None = None
    dropout: float = 0.0
    trains: bool = False
    readable: bool = True
    keepable: bool = True
    asked: str = "auto"
    method_id: Hashable = None

    @property
    def kv_len(self) -> int:
        """The number of keys of each call."""
        return self.key.shape[2]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of logits."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def has_sinks(self) -> bool:
        """True if anything joins the denominators."""
        return self.model_sinks or "sink" in self.names

    @property
    def is_product(self) -> bool:
        """True if a softmax of scaling q . k is all there is, under factors of rows and a score that is a product."""
        maps = bool(self.logits.softcap) or self.logits.gain is not None or self.temper is not None
        return not (maps or self.has_sinks or self.in_segments)

    @property
    def is_causal_product(self) -> bool:
        """True if sdpa computes it without a mask: a product (see `is_product`) over a causal triangle."""
        return self.is_product and self.rows.causal_columns is not None

    @property
    def in_segments(self) -> bool:
        """True if a method shows keys in segments."""
        return "positions" in self.names or "visibility" in self.names


def row_factor(by_length: Tensor | None, device: torch.device, dtype: torch.dtype, learned: Learned) -> float | Tensor | None:
    """The factor of each row of a layer, a number where all rows share it and the host knows it; None without one."""
    if by_length is None:
        return None
    if learned is not None and "temperature" in learned:
        by_length = learned["temperature"](by_length)
    if by_length.numel() == 1 and by_length.device.type == "cpu" and keepable(by_length) and not by_length.requires_grad:
        return float(by_length)
    return by_length.to(device, dtype)


class ReadyPlan:
    """A plan with its kernel: what each layer of a pass runs. The rows keep it, and it does not refer to them.

    Args:
        kernel: the name of the kernel.
        compute: what the kernel has prepared for the plan.
    """

    def __init__(self, plan: AttentionPlan, kernel: str, compute: Computation) -> None:
        self.kernel, self._compute, self._finish = kernel, compute, plan.finish
        #: whether it asks for keys that were turned before, and whether layers have learned parts
        self.keeps, self.learns = getattr(compute, "kept_under", None) is not None, bool(plan.learned)
        self._factor_of, self._wide = functools.partial(row_factor, plan.by_length, plan.query.device, plan.wide), plan.wide
        self._learns_factor = "temperature" in plan.learned
        self._factor = None if self._learns_factor else self._factor_of(None)
        #: `AttentionPlan.sinks`; None: nothing joins the denominators
        self._sinks = plan.sinks if plan.has_sinks else None
        self._sinks_differ = plan.model_sinks or "sink" in plan.learned  # by layer
        self._known_sinks: Tensor | None = None

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        learned: Learned = None,
        sink_logits: Tensor | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        """The output of one layer, (batch, heads, q_len, head_dim) in the dtype of query.

        Args:
            learned: the layer's learned parts of methods by slot.
            sink_logits: (heads,), the model's learned sinks.
            keep: finds what was made of the layer's keys before (see `rotated_keys`); None: nothing is kept.
        """
        factor = self._factor_of(learned) if self._learns_factor else self._factor
        sinks = None if self._sinks is None else self._sinks_of(query, learned, sink_logits)
        out = self._compute(query, key, value, factor, sinks, keep)
        out = out if self._finish is None else self._finish(out, learned)
        return out if out.dtype == query.dtype else out.to(query.dtype)

    def _sinks_of(self, query: Tensor, learned: Learned, sink_logits: Tensor | None) -> Tensor | None:
        if self._known_sinks is not None:
            return self._known_sinks
        assert self._sinks is not None
        by_head = self._sinks(query, learned, sink_logits)
        by_head = None if by_head is None else by_head.to(self._wide)
        if not self._sinks_differ and keepable(query):
            self._known_sinks = by_head
        return by_head
