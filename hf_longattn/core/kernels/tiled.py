"""Exact attention in plain PyTorch that never holds a q_len x kv_len tensor, forward or backward: `tiles` for autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import operators, sdpa
from .by_segment import BySegment
from .kernel import Kernel, KernelCall, Result
from .precision import halves_are_fast
from .tiles import TiledCall, dropout_seed


def run(call: KernelCall) -> Result:
    """One segment, tile by tile."""
    half = halves_are_fast(call.value)  # but gradients take probabilities that nothing has rounded
    return _run(call._replace(seed=dropout_seed(call.dropout)), lambda own: TiledCall(own, half).attend())


def tempered(call: KernelCall, temper: Callable[[Tensor], Tensor]) -> Tensor:
    """The output under a temperature by entropy (see `BySegment`): rows are held whole, so that products are computed once."""
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        own = call._replace(seed=dropout_seed(call.dropout))
        return TiledCall(own, halves_are_fast(call.value), temper).attend()[0]


_run = operators.attention(
    "tiled", lambda call: TiledCall(call).attend(), lambda call, *given: TiledCall(call).gradients(*given)
)

KERNEL = Kernel(
    functools.partial(BySegment, run=run, wide=True, tempered=tempered, product=sdpa.run),
    preferred=lambda _: True,
)
