"""Queries and keys turned by angles: in place of what is made, by one Triton program on CUDA."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..rotary import Rotation
from ..tracing import keepable
from . import programs
from .kernel import KernelFailure
from .operators import NO_FORWARD


def rotate(rotation: Rotation, x: Tensor, cos: Tensor, sin: Tensor, at: slice | None = None) -> Tensor:
    """x (batch, heads, n, head_dim) rotated by angles (batch or 1, n, key heads or 1, pairs).

    In float32 at least; on CUDA, outside of graphs, rounded to the dtype of x.

    Args:
        at: which vectors the angles are for; the others become 0. None: all.
    """
    cos, sin = (y.to(torch.promote_types(x.dtype, torch.float32)) for y in (cos, sin))
    if keepable(x):
        return _Rotated.apply(x, cos, sin, rotation, at)  # type: ignore[no-untyped-call]
    own = (x if at is None else x[:, :, at]).to(cos.dtype).unflatten(1, (cos.shape[2], -1))
    cos, sin = (y.transpose(1, 2)[:, :, None] for y in (cos, sin))
    first, second, rest = rotation.split(own)
    out = rotation.join(first * cos - second * sin, second * cos + first * sin, rest).flatten(1, 2)
    return out if at is None else torch.nn.functional.pad(out, (0, 0, at.start, x.shape[2] - at.stop))


class _Rotated(torch.autograd.Function):
    """`rotate` in place of what it makes, in a third of its passes over memory."""

    @staticmethod
    def forward(ctx, x, cos, sin, rotation, at):  # type: ignore[no-untyped-def]
        ctx.arguments, ctx.dtype = (cos, sin, rotation, at), x.dtype
        if x.is_cuda and programs.why_not(x) is None:
            with contextlib.suppress(KernelFailure):
                return programs.turned(x, cos, sin, rotation.features, at)
        at = slice(0, x.shape[2]) if at is None else at
        out = x.new_empty(x.shape, dtype=cos.dtype)
        out[:, :, : at.start], out[:, :, at.stop :] = 0.0, 0.0
        own, into = (y[:, :, at].unflatten(1, (cos.shape[2], -1)) for y in (x.to(cos.dtype), out))
        cos, sin = (y.transpose(1, 2)[:, :, None] for y in (cos, sin))
        pairs = slice(rotation.first, rotation.first + 2 * rotation.inv_freq.shape[0])
        for rest in (slice(0, pairs.start), slice(pairs.stop, x.shape[3])):
            into[..., rest] = own[..., rest]
        (first, second, _), (a, b, _) = rotation.split(own), rotation.split(into)
        torch.mul(first, cos, out=a).addcmul_(second, sin, value=-1.0)
        torch.mul(second, cos, out=b).addcmul_(first, sin)
        return out

    @staticmethod
    def jvp(ctx, *tangents):  # type: ignore[no-untyped-def]
        raise NotImplementedError(NO_FORWARD.format("fused"))

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        cos, sin, rotation, at = ctx.arguments
        d = _Rotated.apply(d, cos, -sin, rotation, at)  # type: ignore[no-untyped-call]
        return d.to(ctx.dtype), None, None, None, None
