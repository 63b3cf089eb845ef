"""Methods that fold into query and key, around vLLM's own attention: its fastest kernels, compiled as without a method.

A row at position p sees p + 1 keys; score, length temperature and output norm need to know no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....config import LongAttnConfig
from ....core.stages import finish, learned_part
from ....slots.base import EntropyTemperature, LengthTemperature
from .served import PART, ServedLayer


def folds(config: LongAttnConfig) -> bool:
    """Tell whether a config changes query, key and output alone."""
    entropy = isinstance(config.temperature, EntropyTemperature)
    return not entropy and all(x is None for x in (config.positions, config.logit_map, config.visibility, config.sink))


def attention(original: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """vLLM's attention function with the method of each layer around it."""

    @functools.wraps(original)
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        part: ServedLayer | None = module.__dict__.get(PART)
        if part is None and getattr(module.config, "longattn", None):
            raise ValueError("config.longattn names a method, and this model was not built by hf_longattn's class for vLLM")
        if part is None or not part.folds or not part.config.methods:
            return original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        config, learned, positions = part.config, part.learned, kwargs["position_ids"]
        heads, scale = query.shape[1], query.shape[-1] ** -0.5 if scaling is None else scaling
        if config.score is not None:
            query, key, own = config.score.fold(query, key)
            query = query * (own / scale)
        if isinstance(config.temperature, LengthTemperature):
            factor = config.temperature.factor((positions[:, None] + 1).double(), query.shape[-1])
            factor = learned_part(learned, "temperature", factor).to(torch.promote_types(query.dtype, torch.float32))
            query = (query * factor[..., None]).to(key.dtype)
        out, weights = original(module, query, key, value, attention_mask, scaling=scale, **kwargs)
        split = out.reshape(len(query), query.shape[2], heads, -1).transpose(1, 2)  # vLLM's is (tokens, heads * head_dim)
        return finish(config, part.tables, split, learned).transpose(1, 2).reshape(out.shape), weights

    return forward
