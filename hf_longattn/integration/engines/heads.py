"""Heads split across processes, by tensor parallelism or by Ulysses' exchange: which of a layer's heads are computed here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...config import LongAttnConfig
from ...methods.method import Heads
from . import ulysses


def of_these_heads(
    module: nn.Module, count: int, of: int, config: LongAttnConfig, learned: dict[str, nn.Module]
) -> tuple[LongAttnConfig, dict[str, Any]]:
    """A layer's config and learned parts as this process's `count` of `of` heads use them."""
    rank, group = _split_by(module, count, of)
    heads = Heads(rank * count, count, of)

    def own(parameter: Tensor) -> Tensor:
        return heads.own(parameter if group is None else _SumGradients.apply(parameter, group))  # type: ignore[no-untyped-call]

    return _config(config, heads), {slot: functools.partial(part, own=own) for slot, part in learned.items()}


_config: Callable[[LongAttnConfig, Heads], LongAttnConfig] = functools.lru_cache(maxsize=1024)(LongAttnConfig.for_heads)


def _split_by(module: nn.Module, count: int, of: int) -> tuple[int, Any]:
    """This process's place among those that share a layer, and their group where each needs the gradients of all."""
    if (here := ulysses.place(module)) is not None and here[1] * count == of:
        return here[0], None  # gradients are summed over processes for every parameter, as tokens are split too
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        for weight in module.parameters():
            if isinstance(weight, DTensor) and any(p.is_shard() for p in weight.placements):
                mesh = weight.device_mesh
                mesh = mesh if mesh.ndim == 1 else mesh["tp"]
                if mesh.size() * count == of:
                    return mesh.get_local_rank(), mesh.get_group()
    raise NotImplementedError(
        f"this layer got {count} of {of} heads, and nothing says which: hf_longattn knows transformers' tensor parallelism "
        '(tp_plan="auto"), by the sharded weights of its projections, and sequences that are split over processes'
    )


class _SumGradients(torch.autograd.Function):
    """A parameter that every process holds whole and uses in part: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
