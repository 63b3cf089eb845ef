"""A plan segment by segment: each is one run of a kernel, and the runs are joined by their logsumexps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..geometry import AttentionLayout
from ..plan import AttentionPlan, LogitSpec
from ..rotated_keys import Keep
from ..tracing import readable, shareable
from .kernel import MASK_VALUE, KernelCall, Result
from .rotate import rotate

#: Cosines and sines that turn a segment's queries or keys (see `RotationDelta`), and the vectors that they are for; None: all.
Side: TypeAlias = tuple[Tensor, Tensor, slice | None]
#: The computation of one segment.
Run: TypeAlias = Callable[[KernelCall], Result]
#: All rows, and all keys.
ALL: tuple[slice | None, slice | None] = (None, None)


class BySegment:
    """A `Computation` by one run of a kernel for each segment, joined by their logsumexps.

    Args:
        run: computes one segment.
        wide: it computes in float32 at least, so that scores and temperatures are folded in that.
        joined: the output over all segments and sinks, (heads,), where rows may be read; None: runs are merged.
        tempered: computes the only segment under a temperature by entropy at once, without gradients. It takes the call, and
            what gives a factor for entropies (heads, group, rows); None: the entropy takes one run, the output another.
        product: computes the only segment under a temperature by entropy where its logits are scaling q . k over a causal
            triangle; None: `run` does.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        run: Run,
        wide: bool = False,
        joined: Callable[[list[KernelCall], Tensor | None], Tensor] | None = None,
        tempered: Callable[[KernelCall, Callable[[Tensor], Tensor]], Tensor] | None = None,
        product: Run | None = None,
    ) -> None:
        rows, device = plan.rows, plan.query.device
        self.kv_len, self.spec, self.dropout, self.rotation = plan.kv_len, plan.logits, plan.dropout, plan.rotation
        self.run, self.joined = run, joined
        folds = plan.fold is not None or plan.by_length is not None or plan.temper is not None
        self.fold, self.temper = plan.fold, plan.temper
        if plan.cosine is not None and plan.keepable:
            self.fold = functools.partial(_units, plan.cosine)
        self.wide, self.runs_wide, self.widens = plan.wide, wide, wide and folds and device.type == "cpu"
        #: those of which some row may see a key: rows, and what is turned of queries and of keys
        self.segments: list[tuple[AttentionLayout, Side | None, Side | None]] = []
        for segment in plan.segments:
            own, query, key = segment.rows, segment.query, segment.key
            seen = own.seen(self.kv_len) if readable(own.index) else ALL
            if self.segments and seen is None:
                continue
            by_query: Side | None = None
            by_key: Side | None = None
            rows_at, keys_at = ALL if seen is None else seen
            if query is not None:
                by_query = (*query.kept_angles(_at(rows.query_places(), rows_at), plan.tables, device), rows_at)
            if key is not None:
                j = _at(rows.key_places(self.kv_len), keys_at)
                by_key = (*key.kept_angles(j, plan.tables, device), keys_at)
            self.segments.append((own.on(device), by_query, by_key))
        alone = self.temper is not None and len(self.segments) == 1
        products = alone and plan.asked == "auto" and self.spec.gain is None and not self.spec.softcap
        products = products and self.segments[0][0].causal_columns is not None
        # a CPU's fused kernel runs twice, for the entropies and for the output, in less time than a row is gone over again
        at_once = alone and not (products and device.type == "cpu") and not plan.trains and plan.keepable
        #: the arguments of these names where they compute this plan; else None
        self.product, self.tempered = product if products else None, tempered if at_once else None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float | Tensor | None,
        sinks: Tensor | None,
        _keep: Keep | None,
    ) -> Tensor:
        calls, run, joined, wide = self.calls(query, key, value, factor), self.run, self.joined, self.runs_wide
        joins = len(calls) > 1 or sinks is not None
        if self.temper is not None:
            if self.tempered is not None and sinks is None:
                return self.tempered(calls[0], self.temper)
            by_entropy = self.temper(self._entropies(calls))
            calls = [_tempered(call, by_entropy) for call in calls]
            if self.product is not None and sinks is None:
                run, joined, wide = self.product, None, False
        if joined is not None and readable(query):
            return joined(calls, sinks)
        each = (call._replace(with_lse=joins) for call in calls)
        results = [run(call if wide else _rounded(call, value.dtype)) for call in each]
        return merge_outputs(results, None if sinks is None else sinks.clamp(min=MASK_VALUE))

    def calls(self, query: Tensor, key: Tensor, value: Tensor, factor: float | Tensor | None) -> list[KernelCall]:
        """Make a kernel call of each segment, with positions, score and temperature by length, but none by entropy."""
        if self.widens:
            query, key = query.to(self.wide), key.to(self.wide)
        if isinstance(factor, Tensor) and self.fold is None and not self.spec.softcap:
            query, factor = _scaled(query, factor), None  # once for all segments: a rotation leaves the factor as it is
        spec = self.spec
        if self.fold is not None:  # before anything is turned: a fold need not treat all directions alike
            query, key, scaling = self.fold(query, key)
            spec = dataclasses.replace(spec, scaling=float(scaling))
        calls = [self._turned(*segment, query, key, value, spec) for segment in self.segments]
        return calls if factor is None else [_scored(call, factor) for call in calls]

    def _turned(
        self,
        rows: AttentionLayout,
        by_query: Side | None,
        by_key: Side | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spec: LogitSpec,
    ) -> KernelCall:
        if self.rotation is not None and by_query is not None:
            query = rotate(self.rotation, query, *by_query)
        if self.rotation is not None and by_key is not None:
            key = rotate(self.rotation, key, *by_key)
        return KernelCall(query, key, value, rows, spec, self.dropout)

    def _entropies(self, calls: list[KernelCall]) -> Tensor:
        """The entropy of every row over its keys; a sink is none."""
        half = calls[0].query.dtype if calls[0].value is None else calls[0].value.dtype
        calls = [c._replace(value=None, dropout=0.0, with_lse=len(calls) > 1, with_entropy=True) for c in calls]
        return merge_entropies([self.run(call if self.runs_wide else _rounded(call, half)) for call in calls])


def _at(position: Tensor, at: slice | None) -> Tensor:
    return position if at is None else position[..., at]


def _rounded(call: KernelCall, dtype: torch.dtype) -> KernelCall:
    return call._replace(query=call.query.to(dtype), key=call.key.to(dtype))


def _scored(call: KernelCall, factor: float | Tensor) -> KernelCall:
    """Multiply scores by a factor for each row: on the query, or after the softcap where the model has one."""
    if isinstance(factor, float):
        if not call.spec.softcap:
            return call._replace(spec=call.spec.sharpened(factor))
        factor = call.query.new_full((1, 1, 1), factor, dtype=torch.promote_types(call.query.dtype, torch.float32))
    if call.spec.softcap:
        return call._replace(spec=dataclasses.replace(call.spec, row_scale=factor.expand(call.query.shape[:3])))
    return call._replace(query=_scaled(call.query, factor))


def _scaled(query: Tensor, factor: Tensor) -> Tensor:
    """Multiply queries by a factor for each row, rounded once: in one pass over memory, and one for their gradients."""
    taped = torch.is_grad_enabled() and (query.requires_grad or factor.requires_grad)
    if not shareable(query) or (taped and query.dtype == factor.dtype):
        return (query * factor[..., None]).to(query.dtype)
    if taped:
        return _Scaled.apply(query, factor)  # type: ignore[no-any-return, no-untyped-call]
    return torch.mul(query, factor[..., None], out=torch.empty_like(query))


class _Scaled(torch.autograd.Function):
    """`_scaled`, of which autograd would keep, and read again, what is wider than queries."""

    @staticmethod
    def forward(ctx, query, factor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(query if ctx.needs_input_grad[1] else None, factor)
        return torch.mul(query, factor[..., None], out=torch.empty_like(query))

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        query, factor = ctx.saved_tensors
        by_row = (d.to(factor.dtype) * query).sum(-1).sum_to_size(factor.shape) if ctx.needs_input_grad[1] else None
        return _scaled(d, factor), by_row


def _units(scale: float, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
    """The fold of a score that is scale cos(q, k): each side is written once, rounded."""
    return _Unit.apply(query), _Unit.apply(key), scale  # type: ignore[no-untyped-call]


class _Unit(torch.autograd.Function):
    """x / |x|; a zero vector stays zero, with the gradient of x itself. Norms in float32 at least."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        norm = _norm(x)
        norm.clamp_(min=torch.finfo(norm.dtype).tiny)
        ctx.save_for_backward(x, norm)
        return torch.div(x, norm, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        x, norm = ctx.saved_tensors
        twice = torch.is_grad_enabled()  # second derivatives go through the norm, too
        norm = _norm(x) if twice else norm
        d, norm = d.to(norm.dtype), norm.masked_fill(norm <= torch.finfo(norm.dtype).tiny, 1.0)
        along = (d * x).sum(-1, keepdim=True) / (norm * norm)
        across = torch.addcmul(d, x, along, value=-1.0)
        return (across / norm).to(x.dtype) if twice else torch.div(across, norm, out=torch.empty_like(x))


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))


def _tempered(call: KernelCall, factor: Tensor) -> KernelCall:
    """Multiply finished logits by a factor for each row, (batch, heads, q_len)."""
    call = _scored(call, factor)
    return call if call.spec.gain is None else call._replace(spec=dataclasses.replace(call.spec, bias_scale=factor))


def merge_outputs(results: list[Result], sinks: Tensor | None = None) -> Tensor:
    """The output over all segments from those over each, by their logsumexps: out = Σ share out_segment; a sink's is 0.

    Fully masked rows without a sink share evenly.

    Args:
        sinks: (heads,), finite.
    """
    out, lse, _ = results[0]
    if len(results) == 1:
        return out if sinks is None else out * torch.sigmoid(lse - sinks[:, None])[..., None]
    each = [lse for _, lse, _ in results]
    if sinks is not None:
        each.append(sinks.to(lse)[:, None].expand_as(lse))
    shares = torch.softmax(torch.stack(each).clamp(min=MASK_VALUE), 0)
    return sum(share[..., None] * out for share, (out, _, _) in zip(shares, results, strict=False))  # type: ignore[return-value]


def merge_entropies(results: list[Result]) -> Tensor:
    """The entropy over all segments, H = Σ share (H_segment - ln share)."""
    if len(results) == 1:
        return results[0][2]
    shares = torch.log_softmax(torch.stack([lse for _, lse, _ in results]).clamp(min=MASK_VALUE), 0)
    merged = (shares.exp() * (torch.stack([entropy for _, _, entropy in results]) - shares)).sum(0)
    visible = torch.stack([lse for _, lse, _ in results]).amax(0) > MASK_VALUE
    return torch.where(visible, merged, 0.0)
