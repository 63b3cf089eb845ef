"""Exact attention in plain PyTorch that never holds a q_len x kv_len tensor, forward or backward: `tiles` for autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry import Rows
from ..tracing import keepable, readable
from . import intervals, operators
from .lowered import Kernel, KVSegment, LoweredAttention
from .spec import KernelCall, LogitSpec, Result
from .tiles import Blocks, dropout_seed, halves_are_fast


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    rows: Rows,
    spec: LogitSpec,
    *,
    dropout: float = 0.0,
    with_lse: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention under a Toeplitz-affine logit map.

    Args:
        query: (batch, heads, q_len, head_dim); key, value: (batch, kv_heads, kv_len, head_dim), any float dtype;
            logits are float32 (float64 for float64 inputs).
        value: None to leave the output empty, which saves its product.
        with_lse, with_entropy: compute the logsumexp and the entropy (nats) of every row, before dropout,
            differentiable; otherwise they come back empty.

    Returns:
        output like query, logsumexp and entropy (batch, heads, q_len) in the logits' dtype. Fully masked rows give
        0, -inf and 0.
    """
    call = KernelCall(query, key, value, rows, spec, dropout, dropout_seed(dropout), with_lse, with_entropy)
    tensors = (query, key, value, spec.row_scale, spec.bias_scale)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not readable(query):
        out, lse, entropy = _tiled(*operators.flatten(call))
    elif needs_grad or not keepable(query):
        out, lse, entropy = _Tiled.apply(*operators.flatten(call))  # type: ignore[no-untyped-call]
    else:
        half = halves_are_fast(value)  # gradients take probabilities that nothing has rounded
        call = call._replace(rows=rows.simplified(key.shape[2]))
        out, lse, entropy = intervals.attend(call) if not half and intervals.serves(call) else _attend(call, half)
    return out, lse if with_lse else lse.new_zeros(0), entropy


def tempered(call: LoweredAttention, temper: Callable[[Tensor], Tensor]) -> Tensor:
    """The output of a call of one segment, without gradients, whose finished logits are multiplied by a factor of each row's
    entropy: from the entropies, (heads, group, rows) of some heads and rows, to the factors.

    Rows are held whole, so that their products with keys are computed once.
    """
    (segment,), value, seed = call.segments, call.value, dropout_seed(call.dropout)
    rows = segment.rows.simplified(segment.key.shape[2])
    own = KernelCall(segment.query, segment.key, value, rows, call.spec, call.dropout, seed, False, False)
    return _attend(own, halves_are_fast(value), temper)[0]


def _attend(
    call: KernelCall, half: bool = False, temper: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        return Blocks(call, half, temper).attend()


def _gradients(call: KernelCall, *outputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        return Blocks(call).gradients(*outputs)


_tiled = operators.attention_operator("tiled", KernelCall, _attend, _gradients)


class _TiledBackward(torch.autograd.Function):
    """The gradients outside of graphs; theirs are refused."""

    @staticmethod
    def forward(*arguments):  # type: ignore[no-untyped-def]
        outputs, flat = arguments[:6], arguments[6:]
        return _gradients(operators.rebuild(KernelCall, iter(flat)), *outputs)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "the tiled kernel has no second derivatives: use backend='reference', as in hf_longattn.update(model, backend=...)"
        )


class _Tiled(torch.autograd.Function):
    """`_tiled` outside of graphs, where the transforms of torch.func take gradients of a Function, but not of an operator."""

    @staticmethod
    def forward(*flat):  # type: ignore[no-untyped-def]
        return _attend(operators.rebuild(KernelCall, iter(flat)))

    @staticmethod
    def vmap(*arguments):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "the tiled kernel does not go through vmap: give it the batch dimension itself, or use backend='reference'"
        )

    @staticmethod
    def backward(ctx, *d):  # type: ignore[no-untyped-def]
        return operators.differentiate(ctx, KernelCall, _TiledBackward.apply, *d)

    setup_context = staticmethod(operators.save)


def run(call: LoweredAttention, segment: KVSegment) -> Result:
    query, key, rows = segment.query, segment.key, segment.rows
    options = {"with_lse": call.with_lse, "with_entropy": call.of_entropy}
    return tiled_attention(query, key, call.value, rows, call.spec, dropout=call.dropout, **options)


KERNEL = Kernel("tiled", lambda _: None, run, picked=lambda _: True, wide=True, entropies=True)
