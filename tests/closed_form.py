"""The methods once more, in NumPy and from the papers: an oracle that shares no code with the package.

`attach` runs it as the attention of a whole model, for one plain forward pass: no cache, no padding, so that token i
simply stands at position i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hf_longattn import LongAttnConfig

Formula = Callable[..., np.ndarray]


def scale_invariant(p: dict[str, Any], layer: int, s: np.ndarray, t: np.ndarray, key: np.ndarray) -> np.ndarray:
    """s (batch, heads, q_len, kv_len), t the distances, key the positions of the keys."""
    growth = np.log(1 + np.abs(t) / p["tau"])
    if p["logit_mean"] is None and p["logit_variance"] is None and p["decay"] is None:
        alpha, beta = (np.exp(0.5), np.exp(0.5)) if p["alpha"] is None else (p["alpha"], p["beta"])
        square = 2 * (growth - np.log(alpha) + beta / alpha)
        mapped = np.sqrt(square) * s - square + beta / alpha
    else:
        mean, variance = (
            np.asarray(default if p[name] is None else p[name], dtype=float)
            for name, default in (("logit_mean", 0.0), ("logit_variance", 1.0))
        )
        mean, variance = (x[layer][:, None, None] if x.ndim == 2 else x for x in (mean, variance))
        decay = 1.0 if p["decay"] is None else p["decay"]
        gain = np.sqrt(1 + 2 * decay / variance * growth)
        mapped = mean + gain * (s - mean) - 2 * decay * growth
    mapped = (1 - p["strength"]) * s + p["strength"] * mapped
    return np.where(key < p["sink_tokens"], s, mapped)


#: By method name. A method without an entry is compared with `reference_attention` alone.
FORMULAS: dict[str, Formula] = {"scale_invariant": scale_invariant}


def covers(config: LongAttnConfig) -> bool:
    return all(m.name in FORMULAS for m in config.methods)


def logits(config: LongAttnConfig, layer: int, s: np.ndarray, t: np.ndarray, key: np.ndarray) -> np.ndarray:
    for method in config.methods:
        s = FORMULAS[method.name](method.to_dict(), layer, s, t, key)
    return s


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    group, n = query.shape[1] // key.shape[1], query.shape[2]
    assert key.shape[2] == n
    q, k, v = (x.detach().double().numpy() for x in (query, key, value))
    s = (query.shape[-1] ** -0.5 if scaling is None else scaling) * q @ np.repeat(k, group, 1).swapaxes(-1, -2)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    position = np.arange(n)
    t = position[:, None] - position
    if sliding_window is None:
        s = logits(module.closed_form, module.layer_idx, s, t, position)
    s = np.where((t >= 0) & (t < (sliding_window or n)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    out = p / p.sum(-1, keepdims=True) @ np.repeat(v, group, 1)
    return torch.from_numpy(out).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("closed_form", _attention)
AttentionMaskInterface.register("closed_form", sdpa_mask)


def attach(model: Any, config: LongAttnConfig) -> Any:
    """Make the model compute the closed form of `config`; returns the model."""
    model.set_attn_implementation("closed_form")
    for module in model.modules():
        module.closed_form = config
    return model
