"""Exact attention in plain PyTorch that never holds a q_len x kv_len tensor, forward or backward: `tiles` for autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..geometry import Rows
from ..tracing import keepable, readable
from . import operators
from .spec import KernelCall, LogitSpec
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
        # gradients take probabilities that nothing has rounded
        out, lse, entropy = _attend(call, halves_are_fast(value))
    return out, lse if with_lse else lse.new_zeros(0), entropy


def _attend(call: KernelCall, half: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        return Blocks(call, half).attend()


_SCHEMA = operators.schema(KernelCall)


def _forward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _attend(operators.rebuild(KernelCall, iter(flat)))


_tiled = torch.library.custom_op(
    "hf_longattn::tiled", _forward, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)


@_tiled.register_fake
def _(*flat):  # type: ignore[no-untyped-def]
    call = operators.rebuild(KernelCall, iter(flat))
    query, value = call.query, call.value
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((0,) if value is None else (*query.shape[:-1], value.shape[-1]))
    rows = [query.new_empty(query.shape[:-1] if asked else (0,), dtype=dtype) for asked in (True, call.with_entropy)]
    return out, *rows


def _gradients(
    d_out: Tensor, d_lse: Tensor | None, d_entropy: Tensor | None, out: Tensor, lse: Tensor, entropy: Tensor, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
        return Blocks(operators.rebuild(KernelCall, iter(flat))).gradients(d_out, d_lse, d_entropy, out, lse, entropy)


_backward = torch.library.custom_op(
    "hf_longattn::tiled_backward",
    _gradients,
    mutates_args=(),
    schema="(Tensor d_out, Tensor? d_lse, Tensor? d_entropy, Tensor out, Tensor lse, Tensor entropy, "
    f"{_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _(d_out, d_lse, d_entropy, out, lse, entropy, *flat):  # type: ignore[no-untyped-def]
    call = operators.rebuild(KernelCall, iter(flat))
    d_query, d_key, d_value = (
        lse.new_empty(0, dtype=call.key.dtype) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (call.query, call.key, call.value)
    )
    scales = (call.spec.row_scale, call.spec.bias_scale)
    return d_query, d_key, d_value, *(lse.new_empty(0 if x is None else lse.shape) for x in scales)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    operators.save(ctx, inputs, output)


def _autograd(ctx, d_out, d_lse, d_entropy, run=_backward):  # type: ignore[no-untyped-def]
    outputs, flat = operators.saved(ctx, 3)
    given = dict(zip(operators.names(KernelCall), flat, strict=True))
    results = run(d_out, d_lse, d_entropy if given["with_entropy"] else None, *outputs, *flat)
    taken = ("query", "key", "value", "row_scale", "bias_scale")
    gradients = {n: d.to(given[n].dtype) for n, d in zip(taken, results, strict=True) if given[n] is not None}
    return tuple(gradients.get(name) for name in given)


_tiled.register_autograd(_autograd, setup_context=_setup_context)


class _TiledBackward(torch.autograd.Function):
    """The gradients outside of graphs; theirs are refused."""

    @staticmethod
    def forward(*arguments):  # type: ignore[no-untyped-def]
        return _gradients(*arguments)

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
    def forward(*arguments):  # type: ignore[no-untyped-def]
        return _forward(*arguments)

    @staticmethod
    def vmap(*arguments):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "the tiled kernel does not go through vmap: give it the batch dimension itself, or use backend='reference'"
        )

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(functools.partial(_autograd, run=_TiledBackward.apply))
