"""Exact attention in plain PyTorch that never holds a q_len x kv_len tensor, forward or backward: `tiles` for autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tracing import readable
from . import operators, sdpa
from .by_segment import BySegment
from .kernel import Kernel, KernelCall, Result
from .precision import halves_are_fast
from .tiles import Blocks, dropout_seed


def run(call: KernelCall) -> Result:
    """Attention under a Toeplitz-affine logit map."""
    call = call._replace(seed=dropout_seed(call.dropout))
    if not readable(call.query):
        out, lse, entropy = _operator(*operators.flatten(call))
    elif operators.taped(call):
        out, lse, entropy = _function(*operators.flatten(call))
    else:  # gradients take probabilities that nothing has rounded
        out, lse, entropy = _attend(call, halves_are_fast(call.value))
    return out, lse if call.with_lse else lse.new_zeros(0), entropy


def tempered(call: KernelCall, temper: Callable[[Tensor], Tensor]) -> Tensor:
    """See `BySegment`. Rows are held whole, so that their products with keys are computed once."""
    call = call._replace(seed=dropout_seed(call.dropout))
    return _attend(call, halves_are_fast(call.value), temper)[0]


def _attend(
    call: KernelCall, half: bool = False, temper: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        return Blocks(call, half, temper).attend()


def _gradients(call: KernelCall, *outputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        return Blocks(call).gradients(*outputs)


_operator = operators.attention_operator("tiled", KernelCall, _attend, _gradients)
_function = operators.attention_function("tiled", KernelCall, _attend, _gradients)

KERNEL = Kernel(
    "tiled",
    functools.partial(BySegment, run=run, wide=True, tempered=tempered, product=sdpa.run),
    preferred=lambda _: True,
)
