"""The definition: dense attention in plain PyTorch, in the dtype it is given (float64 in, float64 out).

Every fast path is tested against this file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig
from ..methods.base import EntropyTemperature, KeyBands, LengthTemperature
from .call import Call
from .geometry import Rows
from .rotary import Rotation
from .tracing import readable


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: LongAttnConfig,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    query_start: int | None = None,
    key_start: int = 0,
    backend: str = "reference",
    rotation: Rotation | None = None,
    position_ids: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Causal attention under `config`, by its definition; the signature of `hf_longattn.attention`.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim); kv_heads divides heads.
        config: parameters per layer already reduced (`config.for_layer(i)`).
        scaling: factor on q . k, default head_dim ** -0.5.
        attention_mask: bool, broadcastable to (batch, heads, q_len, kv_len), True = visible, on top of causality.
        query_start: position of the first query, default key_start + kv_len - q_len.
        key_start: position of the first key.
        backend: here always the reference.
        rotation: how query and key are rotated; needed where the config remaps rotary distances.
        position_ids: int64 (batch or 1, length), growing: distances are then differences of positions.
        sink_logits: (heads,), the model's learned sinks: exp(sink) is one more term in the denominator of every softmax; no
            method acts on it.

    Returns:
        (batch, heads, q_len, head_dim) in the dtype of query; fully masked rows are 0, before any output norm.
    """
    if backend not in ("auto", "reference"):
        raise ValueError(f"reference_attention is the reference; backend={backend!r} belongs to hf_longattn.attention")
    where = (scaling, attention_mask, query_start, key_start, backend, rotation, position_ids)
    return dense_attention(Call.causal(query, key, value, config, *where, sink_logits))[0]


def dense_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, q_len, head_dim) and attention weights (batch, heads, q_len, kv_len).

    Order of the stages: positions, score, the model's own softcap, temperature by length, logit map, visibility,
    temperature by entropy (of the keys alone), softmax with the model's learned sinks, dropout, output norm. Computes in
    float32 for half precisions.
    """
    query, key, value, config, rows, scaling = call.query, call.key, call.value, call.config, call.rows, call.scaling
    dtype = query.dtype
    compute = torch.promote_types(dtype, torch.float32)
    heads, kv_len = query.shape[1], key.shape[2]
    group = heads // key.shape[1]
    query, key, value = (
        query.to(compute),
        key.to(compute).repeat_interleave(group, 1),
        value.to(compute).repeat_interleave(group, 1),
    )

    i, j = rows.query_positions()[:, :, None], rows.key_positions(kv_len)[:, None]
    rows, excess = _banded(config, rows, i, j)
    if config.score is not None:
        query, key, scaling = config.score.fold(query, key)
    if excess is None:
        logits = scaling * (query @ key.transpose(-1, -2))
    else:
        logits = scaling * remapped_scores(query, key, excess, require_rotation(call.rotation), config.remap, i, j)
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if (factor := length_factor(config, rows.count(kv_len), query, call.learned)) is not None:
        logits = factor[..., None] * logits
    if config.logit_map is not None:
        t = rows.distance(kv_len)
        length = int(t.max()) + 1 if readable(t) and t.numel() else kv_len + t.shape[1]
        gain, bias = (x[:, t].transpose(0, 1).to(compute) for x in config.logit_map.tables(heads, length, t.device))
        sinks = rows.sinks(kv_len, config.logit_map.sink_tokens)[:, None]
        logits = torch.where(sinks, logits, gain * logits + bias)
    visible = rows.visible(kv_len)
    if isinstance(config.temperature, EntropyTemperature):
        weights = _softmax(logits, visible)
        entropy = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)  # xlogy's gradient at 0 is NaN
        logits = config.temperature.factor(entropy)[..., None] * logits
    weights = torch.nn.functional.dropout(_softmax(logits, visible, sink_of(call)), call.dropout)
    return finish(config, weights @ value, call.learned).to(dtype), weights


def _banded(config: LongAttnConfig, rows: Rows, i: Tensor, j: Tensor) -> tuple[Rows, Tensor | None]:
    """Rows that see what the config shows, and by how much the distance shown exceeds the true one, None: not at all.

    The excess is (batch or 1, kv_heads or 1, q_len, kv_len).
    """
    if config.visibility is not None:
        rows = rows.masked(config.visibility.visible(i, j)[:, None])
    if config.remap is None:
        return rows, None
    distance = config.remap.distance(i, j)
    distance = distance[..., None] if distance.ndim == 3 else distance
    return rows, (distance - (i - j)[..., None]).movedim(-1, 1)


def remapped_scores(
    query: Tensor, key: Tensor, excess: Tensor, rotation: Rotation, remap: KeyBands | None, i: Tensor, j: Tensor
) -> Tensor:
    """q . k for vectors whose distance is to appear as `excess` more than it is: q^T R k, pair of features by pair.

    Where `remap` rescales them, pairs are turned by its spectrum, and scaled.
    """
    excess = excess.repeat_interleave(query.shape[1] // excess.shape[1], 1)
    q1, q2, q_rest = rotation.split(query)
    k1, k2, k_rest = rotation.split(key)
    scores = q_rest @ k_rest.transpose(-1, -2)
    frequencies = rotation.inv_freq.double()
    late = None if remap is None else remap.rescaled(i, j)
    shown, factor = (frequencies, 1.0) if remap is None else remap.spectrum(frequencies)
    for f, frequency in enumerate(frequencies):
        angle = excess * frequency
        if late is not None:
            angle = angle + late[:, None] * (excess + (i - j)[:, None]) * (shown[f] - frequency)
        cos, sin = angle.cos().to(query.dtype), angle.sin().to(query.dtype)
        if late is not None:
            cos, sin = (torch.where(late[:, None], factor**2 * x, x) for x in (cos, sin))
        (a, b), (c, d) = ((x[..., f, None] for x in pair) for pair in ((q1, q2), (k1, k2)))
        c, d = c.transpose(-1, -2), d.transpose(-1, -2)
        scores = scores + cos * (a * c + b * d) + sin * (a * d - b * c)
    return scores


def require_rotation(rotation: Rotation | None) -> Rotation:
    if rotation is None:
        raise ValueError("a remap of rotary distances needs rotation=hf_longattn.Rotation(inv_freq): the model's frequencies")
    return rotation


def length_factor(
    config: LongAttnConfig, visible: Tensor, query: Tensor, learned: Mapping[str, nn.Module] | None
) -> Tensor | None:
    """The temperature for rows that see `visible` keys, (batch or 1, heads or 1, q_len) in the logits' dtype, or None."""
    if not isinstance(config.temperature, LengthTemperature):
        return None
    factor = config.temperature.factor(visible.double(), query.shape[-1])
    if learned is not None and "temperature" in learned:
        factor = learned["temperature"](factor)
    return factor.to(torch.promote_types(query.dtype, torch.float32))


def sink_of(call: Call) -> Tensor | None:
    """The logarithm of what joins the denominators, (heads,): the config's sink and the model's own, if there are any."""
    return joint_sink(call.config, call.query, call.learned, call.sink_logits)


def joint_sink(
    config: LongAttnConfig, query: Tensor, learned: Mapping[str, nn.Module] | None, sink_logits: Tensor | None
) -> Tensor | None:
    """`sink_of`, of a call in parts."""
    if config.sink is None:
        return sink_logits
    own = config.sink.logits(query.shape[1], query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32)))
    if learned is not None and "sink" in learned:
        own = learned["sink"](own)
    return own if sink_logits is None else torch.logaddexp(own, sink_logits.to(own))


def finish(config: LongAttnConfig, output: Tensor, learned: Mapping[str, nn.Module] | None) -> Tensor:
    """The stages after the weighted sum of values: the output norm."""
    if config.output_norm is None:
        return output
    affine = learned["output_norm"] if learned is not None and "output_norm" in learned else None
    return config.output_norm.normalise(output, affine)


def _softmax(logits: Tensor, visible: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    logits = logits.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        sink = sink_logits.to(logits)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.softmax(logits, dim=-1)[..., : visible.shape[-1]]
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)  # softmax over nothing is NaN
