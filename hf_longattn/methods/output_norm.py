"""Output norms: standardise the attention output, so that its spread does not shrink with the number of keys."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..slots.base import OutputNorm
from ..slots.learned import FeatureAffine
from ..slots.method import Heads, ModelFacts, numbers, require_in, require_positive


@dataclass(frozen=True, kw_only=True)
class OutputStandardise(OutputNorm):
    """y = deviation (x - mean(x)) / std(x) + mean, statistics over the features of one token, before W_O.

    Args:
        per_head: statistics over each head's features instead of over all heads' together (the paper has one head, where both
            are the same).
        deviation, mean: constants that restore the model's own scale: a number, or one per
            (layer, head); 1 and 0 as published, measured values from `hf_longattn.calibrate` for a pretrained model.
        epsilon: added to the variance (in the paper to the deviation).

    Li et al., "On Vanishing Variance in Transformer Length Generalization", Sections 2 and 3.2.
    """

    name: ClassVar[str] = "output_standardise"
    summary: ClassVar[str] = "mean 0 and variance 1 before the output projection"
    paper: ClassVar[str] = "Li et al. 2025, On Vanishing Variance in Transformer Length Generalization, arXiv:2504.02827"
    by_head: ClassVar[tuple[str, ...]] = ("deviation", "mean")

    per_head: bool = False
    deviation: float | tuple[Any, ...] = 1.0
    mean: float | tuple[Any, ...] = 0.0
    epsilon: float = 1e-5
    _over_processes: ClassVar[Any] = None  # the mean over those that hold the other heads

    def validate(self) -> None:
        require_positive(epsilon=self.epsilon)
        for value in numbers(self.deviation):
            require_positive(deviation=value)
        for value in numbers(self.mean):
            require_in("mean", value, -math.inf, math.inf)

    @property
    def needs_training(self) -> bool:
        return self.deviation == 1.0 and self.mean == 0.0

    def for_heads(self, heads: Heads) -> Self:
        out = super().for_heads(heads)
        if not self.per_head:
            out = dataclasses.replace(out)  # not the method of all heads
            object.__setattr__(out, "_over_processes", heads.mean)
        return out

    def constants(self, like: Tensor) -> tuple[Tensor, ...]:
        if (self.deviation, self.mean) == (1.0, 0.0):
            return ()
        deviation, mean = (torch.as_tensor(v, dtype=like.dtype, device=like.device) for v in (self.deviation, self.mean))
        return deviation.reshape(-1, 1, 1), mean.reshape(-1, 1, 1)

    def normalise(self, output: Tensor, affine: nn.Module | None = None, *constants: Tensor) -> Tensor:
        by_head, wide = output.transpose(1, 2), torch.promote_types(output.dtype, torch.float32)
        constants = constants or self.constants(output.new_empty(0, dtype=wide))
        x = by_head if self.per_head else by_head.flatten(2)
        at_once = self._over_processes is None and (affine is None or not self.per_head)
        # else nothing comes behind the kernel, which is as wide by itself; on a CPU not in what it keeps for gradients
        if constants or not at_once or not output.is_cuda:
            x = x.to(wide)
        if affine is not None and at_once:
            x = affine(x, epsilon=self.epsilon)
        elif self._over_processes is None:
            x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=self.epsilon)
        else:
            variance, own = torch.var_mean(x, -1, correction=0, keepdim=True)
            mean = self._over_processes(own)
            variance = self._over_processes(variance + (own - mean).square())
            x = (x - mean) * torch.rsqrt(variance + self.epsilon)
        if affine is not None and not at_once:
            x = affine(x.flatten(2))
        x = x.view(by_head.shape).transpose(1, 2)
        if constants:
            deviation, mean = constants
            x = torch.addcmul(mean, x, deviation)
        return x.to(output.dtype)


@dataclass(frozen=True, kw_only=True)
class OutputLayerNorm(OutputStandardise):
    """`OutputStandardise` with a learned weight (from 1) and bias (from 0) per feature: y = deviation (γ x̂ + β) + mean.

    Li et al., "On Vanishing Variance in Transformer Length Generalization", Section 3.2: "+ LN".
    """

    name: ClassVar[str] = "output_layer_norm"
    summary: ClassVar[str] = "mean 0 and variance 1, then a learned weight and bias"
    paper: ClassVar[str] = "Li et al. 2025, On Vanishing Variance in Transformer Length Generalization, arXiv:2504.02827"

    def module(self, facts: ModelFacts) -> nn.Module | None:
        return FeatureAffine(facts.num_heads * facts.value_dim)
