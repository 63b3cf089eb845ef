"""The definition: dense attention in plain PyTorch, in the dtype it is given (float64 in, float64 out).

Every fast path is tested against this file, which shares no stage with them: it knows methods, rows and rotations alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..slots.base import EntropyTemperature, KeyBands, LengthTemperature
from .call import Call
from .geometry import Rows
from .rotary import Rotation
from .tracing import readable


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
        if call.rotation is None:
            raise ValueError("a remap of rotary distances needs rotation=, the model's frequencies")
        logits = scaling * remapped_scores(query, key, excess, call.rotation, config.remap, i, j)
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    learned = dict(call.learned or {})
    if isinstance(config.temperature, LengthTemperature):
        factor = config.temperature.factor(rows.count(kv_len).double(), query.shape[-1])
        factor = learned["temperature"](factor) if "temperature" in learned else factor
        logits = factor.to(compute)[..., None] * logits
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
    sink = call.sink_logits
    if config.sink is not None:
        sink = config.sink.logits(heads, query.new_empty(0))
        sink = learned["sink"](sink) if "sink" in learned else sink
        if call.sink_logits is not None:
            sink = torch.logaddexp(sink, call.sink_logits.to(sink))
    weights = torch.nn.functional.dropout(_softmax(logits, visible, sink), call.dropout)
    output = weights @ value
    if config.output_norm is not None:
        output = config.output_norm.normalise(output, learned.get("output_norm"))
    return output.to(dtype), weights


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


def _softmax(logits: Tensor, visible: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    logits = logits.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        sink = sink_logits.to(logits)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.softmax(logits, dim=-1)[..., : visible.shape[-1]]
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)  # softmax over nothing is NaN
