"""Calls of kernels: tensors, tables and rows of every geometry, and the dense float64 computation kernels are held against."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import close
from torch import Tensor

from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels.kernel import KernelCall
from hf_longattn.core.plan import LogitSpec
from hf_longattn.core.rotary import Rotation

#: From one block for everything to one of the fewest rows.
BLOCKS = [1 << 21, 3000, 64]
LENGTH = 64
#: For the methods that remap it; of two pairs, so that the rest of a vector is not rotated.
ROTATION = Rotation(torch.tensor([1.0, 0.1], dtype=torch.float64))
#: What four heads put into their sinks.
SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.float64)


def inputs(
    b: int = 2,
    h: int = 4,
    kv: int = 2,
    q: int = 19,
    k: int = 19,
    d: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, h, q, d), (b, kv, k, d), (b, kv, k, d))
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)  # type: ignore[return-value]


def with_gradients(function: Callable[..., Tensor], leaves: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
    """What a function of these and other arguments computes, and the gradients of all leaves, which are left as they are."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*leaves, *others, **options)
    return [out.detach(), *torch.autograd.grad(out.double().sin().sum(), leaves)]


def tables(heads: int, dtype: torch.dtype = torch.float64, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Gains and biases with no pattern, so that a wrong distance or head shows."""
    g = torch.Generator().manual_seed(1)
    return (
        (1 + torch.rand(heads, length, generator=g, dtype=torch.float64)).to(dtype),
        torch.randn(heads, length, generator=g, dtype=torch.float64).to(dtype),
    )


def rows_of(
    position: Tensor, key_start: int, start: Tensor, low: Tensor, high: Tensor, allowed: Tensor | None = None
) -> AttentionLayout:
    columns = torch.broadcast_tensors(position, torch.tensor(key_start), start, low, high)
    return AttentionLayout(torch.stack(columns, -1), allowed)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: AttentionLayout,
    *,
    scaling: float,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    bias_scale: Tensor | None = None,
    sinks: int = 0,
    softcap: float | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp and entropy by the definition in kernels/kernel.py, without a single loop or tile."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = scaling * torch.einsum("bhqd,bhkd->bhqk", query, key)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if row_scale is not None:
        logits = logits * row_scale[..., None]
    position, first, start, low, high = (x[:, None, :, None] for x in rows.index.unbind(-1))
    slot = first + torch.arange(key.shape[2])
    if gain is not None and bias is not None:
        t = (position - slot).abs()[:, 0]
        by_row = 1.0 if bias_scale is None else bias_scale[..., None]
        mapped = logits * gain[:, t].transpose(0, 1) + bias[:, t].transpose(0, 1) * by_row
        logits = torch.where((slot >= start) & (slot < start + sinks), logits, mapped)
    visible = (slot >= low) & (slot <= high)
    if rows.allowed is not None:
        visible = visible & rows.allowed
    logits = torch.where(visible, logits, -math.inf)
    masked = ~visible.any(-1, keepdim=True)
    p = torch.where(masked, 0.0, torch.softmax(torch.where(masked, 0.0, logits), -1))
    log_p = torch.log(torch.where(p > 0, p, 1.0))
    lse = torch.where(masked, -math.inf, torch.logsumexp(torch.where(masked, 0.0, logits), -1, keepdim=True))
    return (p if keep is None else p * keep) @ value, lse[..., 0].expand(p.shape[:-1]), -(p * log_p).sum(-1)


def mask_of(*shape: int, seed: int = 3) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3


def geometries() -> dict[str, tuple[int, int, AttentionLayout]]:
    """Name -> q_len, kv_len and rows, for a batch of two."""
    cpu = torch.device("cpu")
    a = torch.arange(19)
    masked = mask_of(2, 1, 19, 19)
    masked[:, :, [0, 7, 18]] = False
    two = torch.arange(2)[:, None]
    document = torch.tensor([0, 6, 14]).repeat_interleave(torch.tensor([6, 8, 5]))
    causal = AttentionLayout.causal(19, 19, None, 0, cpu).index
    both = rows_of(a[None], 0, two * 0, two * 0, torch.tensor(18)).index
    return {
        "causal": (19, 19, AttentionLayout.causal(19, 19, None, 0, cpu)),
        "decode": (1, 23, AttentionLayout.causal(1, 23, None, 0, cpu)),
        "chunk": (7, 23, AttentionLayout.causal(7, 23, None, 0, cpu)),
        "static cache": (7, 30, AttentionLayout.causal(7, 30, 9, 0, cpu)),
        "empty future": (7, 30, AttentionLayout.causal(7, 30, 0, 0, cpu)),
        "offsets": (9, 12, AttentionLayout.causal(9, 12, 105, 100, cpu)),
        "keys ahead of queries": (5, 9, AttentionLayout.causal(5, 9, 3, 7, cpu)),
        "more queries than keys": (12, 5, AttentionLayout.causal(12, 5, None, 0, cpu)),
        "left padding": (19, 19, rows_of(a[None], 0, two * 4, two * 4, a[None])),
        "right padding": (19, 19, rows_of(a[None], 0, two * 0, two * 0, torch.minimum(a[None], 18 - two * 5))),
        "packed": (19, 19, rows_of(a[None], 0, document[None], document[None], a[None])),
        "window": (19, 19, rows_of(a[None], 0, two * 0, (a - 5).clamp(min=0)[None], a[None])),
        "nothing visible": (19, 19, rows_of(a[None], 0, two * 0, two * 0, torch.where(a % 3 == 0, -1, a)[None])),
        "both directions": (19, 19, AttentionLayout(both)),
        "mask (q, k)": (19, 19, AttentionLayout(causal, mask_of(1, 1, 19, 19))),
        "mask (b, 1, q, k)": (19, 19, AttentionLayout(causal, mask_of(2, 1, 19, 19))),
        "mask (b, h, q, k)": (19, 19, AttentionLayout(causal, mask_of(2, 4, 19, 19))),
        "mask with fully masked rows": (19, 19, AttentionLayout(causal, masked)),
        "mask that looks ahead": (
            19,
            19,
            AttentionLayout(rows_of(a[None], 0, two * 0, two * 0, torch.tensor(18)).index, mask_of(2, 1, 19, 19)),
        ),
    }


GEOMETRIES = geometries()
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tables": {"tables": 1},
    "sinks": {"tables": 4, "sinks": 3},
    "softcap": {"softcap": 0.8, "row_scale": True},
    "row factors": {"tables": 1, "row_scale": True, "bias_scale": True},
    "everything": {"tables": 4, "sinks": 2, "softcap": 1.1, "row_scale": True, "bias_scale": True},
}


def arguments(options: dict[str, Any], query: Tensor) -> dict[str, Any]:
    """Keyword arguments of a kernel from an entry of OPTIONS; row factors of either sign, and 0."""
    out: dict[str, Any] = {"scaling": 0.7, "sinks": options.get("sinks", 0), "softcap": options.get("softcap")}
    if "tables" in options:
        out["gain"], out["bias"] = tables(options["tables"], query.dtype)
    g = torch.Generator().manual_seed(2)
    for name in ("row_scale", "bias_scale"):
        if name in options:
            factor = torch.randn(query.shape[:3], generator=g, dtype=torch.float64)
            out[name] = torch.where(factor.abs() < 0.2, 0.0, factor).to(query.dtype)
    return out


#: Tensors and options in; output, logsumexp, entropy out.
Kernel = Callable[..., tuple[Tensor, ...]]


def by_options(kernel: Kernel) -> Kernel:
    """A kernel that takes the fields of its spec as options."""

    def call(query: Tensor, key: Tensor, value: Tensor | None, rows: AttentionLayout, **options: Any) -> tuple[Tensor, ...]:
        own = {f.name: options.pop(f.name) for f in dataclasses.fields(LogitSpec) if f.name in options}
        return kernel(KernelCall(query, key, value, rows, LogitSpec(**own), **options))

    return call


def check(
    kernel: Kernel, geometry: str, options: str, outputs: int, backward: bool = True, tables: tuple[str, ...] = ()
) -> None:
    """Outputs and, weighting all outputs at random, the gradients of every differentiable input, with those of `tables`."""
    q_len, kv_len, rows = GEOMETRIES[geometry]
    tensors = inputs(q=q_len, k=kv_len)
    fixed = arguments(OPTIONS[options], tensors[0])
    leaves = {"query": tensors[0], "key": tensors[1], "value": tensors[2]}
    leaves |= {name: fixed.pop(name) for name in ("row_scale", "bias_scale", *tables) if name in fixed}

    def run(function: Kernel) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        taped = {name: x.clone().requires_grad_(backward) for name, x in leaves.items()}
        out = function(**taped, rows=rows, **fixed)[:outputs]
        if not backward:
            return [], out
        seen = [torch.where(x.isfinite(), x, 0.0) for x in out]
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype) for x in out]
        loss = sum((x * w).sum() for x, w in zip(seen, weights, strict=True))
        return list(torch.autograd.grad(loss, list(taped.values()))), out

    (want, want_out), (got, got_out) = run(dense), run(kernel)
    for name, a, b in zip(("output", "logsumexp", "entropy"), got_out, want_out, strict=False):
        close(a, b, 1e-11, name)
    for name, a, b in zip(leaves, got, want, strict=False):
        close(a, b, 1e-11, f"gradient of {name}")
