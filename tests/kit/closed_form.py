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
    growth = np.log(1 + np.maximum(np.abs(t) - p["offset"], 0) / p["tau"])
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


def alibi(p: dict[str, Any], layer: int, s: np.ndarray, t: np.ndarray, key: np.ndarray) -> np.ndarray:
    heads = s.shape[1]
    assert heads & (heads - 1) == 0
    slope = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    return s - slope[:, None, None] * np.abs(t)


def _clamped(factor: np.ndarray, p: dict[str, Any]) -> np.ndarray:
    return np.maximum(factor, 1) if p["clamp"] else factor


def infoscale(p: dict[str, Any], n: np.ndarray, d: int) -> np.ndarray:
    def information(length: Any) -> Any:
        return 1 - np.exp(2 * p["epsilon"] / d) * np.asarray(length, dtype=float) ** (-2 / d)

    return _clamped(np.sqrt(np.maximum(information(n), 0) / information(p["train_length"])), p)


def logn(p: dict[str, Any], n: np.ndarray, d: int) -> np.ndarray:
    scale = np.log(p["train_length"]) ** -p["exponent"] if p["scale"] is None else p["scale"]
    return _clamped(scale * np.log(n) ** p["exponent"], p)


def log_length(p: dict[str, Any], n: np.ndarray, d: int) -> np.ndarray:
    return _clamped(np.log(n), p)


def softmax_plus(p: dict[str, Any], n: np.ndarray, d: int) -> np.ndarray:
    return _clamped(np.log(n) / np.log(p["train_length"]), p)


def yarn_temperature(p: dict[str, Any], n: np.ndarray, d: int) -> np.ndarray:
    return _clamped((0.1 * np.log(n / p["train_length"]) + 1) ** 2, p)


def adaptive_temperature(p: dict[str, Any], entropy: np.ndarray) -> np.ndarray:
    held = entropy
    if p["beyond"] == "saturate":
        grid = np.linspace(p["threshold"], 16, 200_001)
        held = np.minimum(entropy, grid[np.polyval(p["coefficients"], grid).argmax()])
    return np.where(entropy > p["threshold"], np.maximum(np.polyval(p["coefficients"], held), 1), 1)


def attention_sink(p: dict[str, Any], layer: int) -> np.ndarray:
    """(heads or 1, 1, 1); a learned part starts as the identity."""
    logit = np.asarray(p["logit"], dtype=float)
    return (logit[layer] if logit.ndim == 2 else logit).reshape(-1, 1, 1)


def output_standardise(p: dict[str, Any], layer: int, out: np.ndarray) -> np.ndarray:
    """out (batch, heads, q_len, head_dim); a learned part, where there is one, starts as the identity."""
    over = -1 if p["per_head"] else (1, 3)
    x = out - out.mean(over, keepdims=True)
    x = x / np.sqrt(out.var(over, keepdims=True) + p["epsilon"])
    deviation, mean = (np.asarray(p[name], dtype=float) for name in ("deviation", "mean"))
    deviation, mean = (c[layer][:, None, None] if c.ndim == 2 else c for c in (deviation, mean))
    return deviation * x + mean


def rerope(p: dict[str, Any], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """The distance seen by the query at i for the key at j."""
    return np.minimum(i - j, p["window"])


def leaky_rerope(p: dict[str, Any], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """(q_len, kv_len), or (heads, q_len, kv_len) with a stretch per head."""
    stretch = np.array(p["stretch"], dtype=float)[..., None, None]
    return np.where(i - j < p["window"], i - j, p["window"] + (i - j - p["window"]) / stretch)


def self_extend(p: dict[str, Any], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    w, g = p["window"], p["group"]
    return np.where(i - j < w, i - j, i // g - j // g + w - w // g)


def string_remap(p: dict[str, Any], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return np.where(i - j < p["shift"], i - j, i - j - p["shift"] + p["window"])


def yarn_scores(
    p: dict[str, Any], q: np.ndarray, k: np.ndarray, t: np.ndarray, inv_freq: np.ndarray, theta: float
) -> np.ndarray:
    """q . k of rotated vectors as if YaRN had rotated them; pairs are halves."""
    pairs, length = len(inv_freq), p["train_length"]
    low, high = (pairs * np.log(length / (turns * 2 * np.pi)) / np.log(theta) for turns in (p["beta_fast"], p["beta_slow"]))
    low, high = (np.floor(low), np.ceil(high)) if p["truncate"] else (low, high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
    new = inv_freq * (1 - ramp) + inv_freq / p["factor"] * ramp
    scale = 0.1 * np.log(p["factor"]) + 1 if p["attention_factor"] is None else p["attention_factor"]
    a, b = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs] for x in (q, k))
    turn = np.exp(1j * t[..., None] * (new - inv_freq))
    rest = q[..., 2 * pairs :] @ k[..., 2 * pairs :].swapaxes(-1, -2)
    return scale**2 * np.einsum("bhqf,qkf,bhkf->bhqk", a, turn, b.conj()).real + rest


def dual_chunk(p: dict[str, Any], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    s, c = p["chunk"], p["chunk"] - p["local"]
    following = np.minimum(i % c + c, s) - j % c
    return np.select([i // c == j // c, i // c == j // c + 1], [i - j, following], min(2 * c - 1, s) - j % c)


def streaming(p: dict[str, Any], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return np.where(i - j < p["window"], i - j, np.minimum(i, p["sinks"] + p["window"] - 1) - j)


def lm_infinite(p: dict[str, Any], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return np.minimum(i - j, p["window"])


def moved_scores(q: np.ndarray, k: np.ndarray, move: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """q . k of rotated vectors as if their distance were larger by `move`, ([kv_heads,] q_len, kv_len).

    Pairs are the two halves, as complex numbers.
    """
    pairs = len(inv_freq)
    a, b = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs] for x in (q, k))
    turn = np.exp(1j * move[..., None] * inv_freq)
    turn = np.repeat(turn, q.shape[1] // len(turn), 0) if turn.ndim == 4 else turn[None].repeat(q.shape[1], 0)
    rotated = np.einsum("bhqf,hqkf,bhkf->bhqk", a, turn, b.conj()).real
    return rotated + q[..., 2 * pairs :] @ k[..., 2 * pairs :].swapaxes(-1, -2)


#: By method name and slot. A method without an entry is compared with `reference_attention` alone.
LOGIT_MAPS: dict[str, Formula] = {"scale_invariant": scale_invariant, "alibi": alibi}
BY_LENGTH: dict[str, Formula] = {f.__name__: f for f in (infoscale, logn, log_length, softmax_plus, yarn_temperature)}
REMAPS: dict[str, Formula] = {
    f.__name__: f for f in (rerope, leaky_rerope, self_extend, string_remap, dual_chunk, streaming, lm_infinite)
}
BY_ENTROPY: dict[str, Formula] = {"adaptive_temperature": adaptive_temperature}
NORMS: dict[str, Formula] = {
    "output_standardise": output_standardise,
    "output_layer_norm": output_standardise,
}


def covers(config: LongAttnConfig) -> bool:
    known = {
        "cosscale",
        "windowed",
        "attention_sink",
        "yarn_beyond",
        *REMAPS,
        *LOGIT_MAPS,
        *BY_LENGTH,
        *BY_ENTROPY,
        *NORMS,
    }
    return all(m.name in known for m in config.methods)


def _softmax(s: np.ndarray, sink: np.ndarray | float = -np.inf) -> np.ndarray:
    """With a sink, one more term in the denominator."""
    most = np.maximum(s.max(-1, keepdims=True), sink)
    p = np.exp(s - most)
    return p / (p.sum(-1, keepdims=True) + np.exp(sink - most))


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
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, position = module.layer_idx, np.arange(n)
    narrow = sliding_window is not None and sliding_window < module.config.max_position_embeddings
    methods = {} if narrow else {m.slot: m.to_dict() for m in module.closed_form.methods}

    if "score" in methods:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        scaling = methods["score"]["scale"]
    t = position[:, None] - position
    visibility = methods.get("visibility", {})
    remap = methods.get("positions", visibility)
    s = q @ k.swapaxes(-1, -2)
    if isinstance(remap.get("stretch"), list):
        remap = remap | {"stretch": remap["stretch"][layer]}
    if remap.get("name") in REMAPS:
        seen = REMAPS[remap["name"]](remap, position[:, None], position)
        s = moved_scores(q, k, seen - t, module.closed_form_frequencies[0])
    if remap.get("name") == "yarn_beyond":
        rope, frequencies = module.config.rope_parameters, module.closed_form_frequencies[0]
        theta = rope.get("full_attention", rope)["rope_theta"]
        yarn = yarn_scores(remap, q, k, t, frequencies, theta)
        s = np.where(position[:, None] >= remap["train_length"], yarn, s)
    s = scaling * s
    visible, n_seen = (t >= 0) & (t < (sliding_window or n)), position + 1
    if visibility:
        sinks, window = visibility.get("sinks", 0), visibility["window"]
        visible &= (t < window) | (position < sinks)
        n_seen = np.minimum(n_seen, window) + np.clip(position - window + 1, 0, sinks)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    temperature = methods.get("temperature", {})
    if (by_length := BY_LENGTH.get(temperature.get("name", ""))) is not None:
        s = by_length(temperature, n_seen, query.shape[-1])[:, None] * s
    if "logit_map" in methods:
        s = LOGIT_MAPS[methods["logit_map"]["name"]](methods["logit_map"], layer, s, t, position)
    s = np.where(visible, s, -np.inf)
    if (by_entropy := BY_ENTROPY.get(temperature.get("name", ""))) is not None:
        p = _softmax(s)
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1, keepdims=True)
        s = np.where(visible, by_entropy(temperature, entropy) * np.where(visible, s, 0), -np.inf)
    sink = attention_sink(methods["sink"], layer) if "sink" in methods else -np.inf
    if (own := kwargs.get("s_aux")) is not None:  # the model's own
        sink = np.logaddexp(sink, own.detach().double().numpy()[:, None, None])
    out = _softmax(s, sink) @ v
    if "output_norm" in methods:
        out = NORMS[methods["output_norm"]["name"]](methods["output_norm"], layer, out)
    return torch.from_numpy(out).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("closed_form", _attention)
AttentionMaskInterface.register("closed_form", sdpa_mask)


def attach(model: Any, config: LongAttnConfig) -> Any:
    """Make the model compute the closed form of `config`; returns the model."""
    model.set_attn_implementation("closed_form")
    turns = -1 if model.config.model_type == "nanochat" else 1  # the other way round
    frequencies = [
        turns * b.double().numpy()
        for n, b in model.named_buffers()
        if n.endswith(("rotary_emb.inv_freq", "full_attention_inv_freq"))
    ]
    for module in model.modules():
        module.closed_form = config
        module.closed_form_frequencies = frequencies
    return model
