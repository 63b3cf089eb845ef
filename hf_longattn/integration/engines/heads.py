"""Heads split across processes, by tensor parallelism or by Ulysses' exchange: which of a layer's heads are computed here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce  # the one with a gradient

from ...config import LongAttnConfig
from ...slots.method import Heads
from ..internals import deepspeed_group
from . import ulysses


def of_these_heads(
    module: nn.Module, count: int, of: int, config: LongAttnConfig, learned: dict[str, nn.Module]
) -> tuple[LongAttnConfig, dict[str, Any], Callable[[Tensor], Tensor]]:
    """A layer's config and learned parts as this process's `count` of `of` heads use them, and their part of a parameter."""
    rank, group, alone = _split_by(module, count, of)
    heads = Heads(rank * count, count, of, _mean_over(group))
    config = _config(config, heads)
    if not (alone and torch.is_grad_enabled()):
        return config, {slot: functools.partial(part, own=heads.own) for slot, part in learned.items()}, heads.own

    def summed(parameter: Tensor) -> Tensor:
        return _SumGradients.apply(parameter, group)  # type: ignore[no-any-return, no-untyped-call]

    parts = {slot: _Part(part, heads.own, summed) for slot, part in learned.items()}
    return config, parts, lambda parameter: heads.own(summed(parameter))


@dataclass(frozen=True)
class _Part:
    """A learned part in training: every parameter gets the gradients of all heads, also one that they share."""

    func: nn.Module  # as a partial calls it
    own: Callable[[Tensor], Tensor]
    summed: Callable[[Tensor], Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = {name: self.summed(x) for name, x in self.func.named_parameters() if x.requires_grad}
        return torch.func.functional_call(self.func, parameters, args, kwargs | {"own": self.own})


_config: Callable[[LongAttnConfig, Heads], LongAttnConfig] = functools.lru_cache(maxsize=1024)(LongAttnConfig.for_heads)


@functools.lru_cache(maxsize=64)  # one function for each group: configs are known by it
def _mean_over(group: Any) -> Callable[[Tensor], Tensor]:
    size = torch.distributed.get_world_size(group)
    return lambda x: all_reduce(x, group=group) / size


def _split_by(module: nn.Module, count: int, of: int) -> tuple[int, Any, bool]:
    """This process's rank among those that share a layer, their group, and whether nobody else sums their gradients."""
    if (here := ulysses.rank_and_world(module)) is not None and here[1] * count == of:
        return here[0], ulysses.group_of(module) or deepspeed_group(), False  # as tokens are split too
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        for weight in module.parameters():
            if isinstance(weight, DTensor) and any(p.is_shard() for p in weight.placements):
                mesh = weight.device_mesh
                mesh = mesh if mesh.ndim == 1 else mesh["tp"]
                if mesh.size() * count == of:
                    return mesh.get_local_rank(), mesh.get_group(), True
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
