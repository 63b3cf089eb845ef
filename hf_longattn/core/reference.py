"""The definition: dense attention in plain PyTorch, in the dtype it is given (float64 in, float64 out).

Every fast path is tested against this file, which shares no stage with them: it knows methods, rows and rotations alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..slots.base import EntropyTemperature, KeyIntervals, LengthTemperature, Spectrum
from .call import Call
from .geometry import AttentionLayout
from .rotary import Rotation
from .tracing import readable, sent, wide_device


def dense_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, q_len, head_dim) and attention weights (batch, heads, q_len, kv_len).

    Order of the stages: positions, score, the model's own softcap, temperature by length, logit map, visibility,
    temperature by entropy (of the keys alone), softmax with the model's learned sinks, dropout, output norm. Computes in
    float32 for half precisions, under autocast too.
    """
    device = call.query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _dense(call)
    return _dense(call)


def _dense(call: Call) -> tuple[Tensor, Tensor]:
    query, key, value, config, scaling = call.query, call.key, call.value, call.config, call.scaling
    rows, device = call.rows.on(wide_device(query.device)), query.device
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
    distances = None if config.remap is None else _remapped(config.remap, rows, i, j)
    if config.visibility is not None:
        rows = rows.masked(config.visibility.visible(i, j)[:, None])
    if config.score is not None:
        query, key, scaling = config.score.fold(query, key)
    if distances is None:
        logits = scaling * (query @ key.transpose(-1, -2))
    else:
        if call.rotation is None:
            raise ValueError("a remap of rotary distances needs rotation=, the model's frequencies")
        logits = scaling * remapped_scores(query, key, call.rotation, distances)
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    learned = dict(call.learned or {})
    if isinstance(config.temperature, LengthTemperature):
        factor = sent(config.temperature.factor(rows.count(kv_len).double(), query.shape[-1]), device)
        factor = learned["temperature"](factor) if "temperature" in learned else factor
        logits = factor.to(compute)[..., None] * logits
    if config.logit_map is not None:
        t = rows.distance(kv_len)
        length = int(t.max()) + 1 if readable(t) and t.numel() else kv_len + t.shape[1]
        tables = tuple(sent(x.to(compute), device) for x in config.logit_map.checked_tables(heads, length, t.device))
        if "logit_map" in learned:
            tables = learned["logit_map"](*tables)
        t = sent(t, device)
        gain, bias = (x[:, t].transpose(0, 1).to(compute) for x in tables)
        sinks = rows.sinks(kv_len, config.logit_map.sink_tokens)[:, None].to(device)
        logits = torch.where(sinks, logits, gain * logits + bias)
    visible = rows.visible(kv_len).to(device)
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
        constants = config.output_norm.constants(output.new_empty(0))
        output = config.output_norm.normalise(output, learned.get("output_norm"), *constants)
    return output.to(dtype), weights


class RemappedDistances(NamedTuple):
    """How far apart a remap shows queries and keys.

    Args:
        shown: float64 (axes, batch or 1, kv_heads or 1, q_len, kv_len), on each axis of their positions: text has one.
        true: how far apart they are, int64 (axes, batch or 1, q_len, kv_len).
        rescaled: the pairs that are turned by the remap's spectrum, and scaled, bool (batch or 1, q_len, kv_len); None: none.
        spectrum: see `Spectrum`.
    """

    shown: Tensor
    true: Tensor
    rescaled: Tensor | None
    spectrum: Spectrum


def _remapped(remap: KeyIntervals, rows: AttentionLayout, i: Tensor, j: Tensor) -> RemappedDistances:
    """The distances between queries at positions i and keys at j."""
    if rows.query_axes is None or rows.key_axes is None:
        shown, true = remap.distance(i, j), i - j
        shown, true = (shown[..., None] if shown.ndim == 3 else shown)[None], true[None]
    else:
        shown, true = _by_axis(remap, rows.query_axes, rows.key_axes)
    return RemappedDistances(shown.movedim(-1, 2), true, remap.rescaled(i, j), remap.spectrum)


def _by_axis(remap: KeyIntervals, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """The distances shown on several axes, (axes, batch or 1, q_len, kv_len, kv_heads or 1), and the true ones.

    The first axis decides in which interval of a query a key lies; f(i) - g(j) is its distance there, on each axis.
    """
    true = i[..., None] - j[:, :, None]
    distance = true.double()[..., None]
    for interval in remap.intervals(i[0]):
        inside = torch.ones_like(true[0], dtype=torch.bool)
        if interval.first is not None:
            inside = inside & (j[0][:, None] >= interval.first[..., None])
        if interval.last is not None:
            inside = inside & (j[0][:, None] <= interval.last[..., None])
        f, g = (x.double() if to is None else to(x) for to, x in ((interval.query, i), (interval.key, j)))
        f, g = (x if x.ndim == 4 else x[..., None] for x in (f, g))  # heads
        distance = torch.where(inside[..., None], f[:, :, :, None] - g[:, :, None], distance)
    return distance, true


def remapped_scores(query: Tensor, key: Tensor, rotation: Rotation, distances: RemappedDistances) -> Tensor:
    """q . k for vectors whose distances are to appear as those shown: q^T R k, pair of features by pair."""
    distance, true, rescaled, spectrum = distances
    distance = distance.repeat_interleave(query.shape[1] // distance.shape[2], 2)
    q1, q2, q_rest = rotation.split(query)
    k1, k2, k_rest = rotation.split(key)
    scores = q_rest @ k_rest.transpose(-1, -2)
    frequencies = rotation.inv_freq.to(distance.device, torch.float64)
    shown, factor = frequencies, 1.0
    if rescaled is not None:
        shown, factor = spectrum(frequencies)
    for f, frequency in enumerate(frequencies):
        a = 0 if len(distance) == 1 else rotation.known_axis[f]
        angle = (distance[a] - true[a, :, None]) * frequency
        if rescaled is not None:
            angle = angle + rescaled[:, None] * distance[a] * (shown[f] - frequency)
        cos, sin = angle.cos().to(query.dtype), angle.sin().to(query.dtype)
        if rescaled is not None:
            cos, sin = (torch.where(rescaled[:, None], factor**2 * x, x) for x in (cos, sin))
        cos, sin = sent(cos, query.device), sent(sin, query.device)
        (u, v), (x, y) = ((z[..., f, None] for z in pair) for pair in ((q1, q2), (k1, k2)))
        x, y = x.transpose(-1, -2), y.transpose(-1, -2)
        scores = scores + cos * (u * x + v * y) + sin * (u * y - v * x)
    return scores


def _softmax(logits: Tensor, visible: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    logits = logits.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        sink = sink_logits.to(logits)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.softmax(logits, dim=-1)[..., : visible.shape[-1]]
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)  # softmax over nothing is NaN
