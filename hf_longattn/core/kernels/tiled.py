"""Exact attention in plain PyTorch that never holds a q_len x kv_len tensor, forward or backward: `tiles` for autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tracing import keepable, readable
from . import intervals, operators
from .kernel import Kernel, KernelCall, Result
from .tiles import Blocks, dropout_seed, halves_are_fast


def run(call: KernelCall) -> Result:
    """Attention under a Toeplitz-affine logit map."""
    call, spec = call._replace(seed=dropout_seed(call.dropout)), call.spec
    tensors = (call.query, call.key, call.value, spec.row_scale, spec.bias_scale)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not readable(call.query):
        out, lse, entropy = _tiled(*operators.flatten(call))
    elif needs_grad or not keepable(call.query):
        out, lse, entropy = _Tiled.apply(*operators.flatten(call))  # type: ignore[no-untyped-call]
    else:
        half = halves_are_fast(call.value)  # gradients take probabilities that nothing has rounded
        call = call._replace(rows=call.rows.simplified(call.key.shape[2]))
        out, lse, entropy = intervals.attend(call) if not half and intervals.serves(call) else _attend(call, half)
    return out, lse if call.with_lse else lse.new_zeros(0), entropy


def tempered(call: KernelCall, temper: Callable[[Tensor], Tensor]) -> Tensor:
    """See `Kernel.tempered`. Rows are held whole, so that their products with keys are computed once."""
    call = call._replace(rows=call.rows.simplified(call.key.shape[2]), seed=dropout_seed(call.dropout))
    return _attend(call, halves_are_fast(call.value), temper)[0]


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


KERNEL = Kernel("tiled", lambda _: None, run, picked=lambda _: True, wide=True, entropies=True, tempered=tempered)
