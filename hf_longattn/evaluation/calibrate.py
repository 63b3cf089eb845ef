"""Measuring what methods need to know about a pretrained model's attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..attention.attend import Call
from ..config import LongAttnConfig
from ..integration.layers import Layer
from ..integration.observe import observe
from ..integration.planning import bound_config
from ..methods import LeakyReRope, OutputStandardise, ScaleInvariant
from .measures.blocks import blocks
from .measures.heads import copying_heads

#: What a model is measured on: keyword arguments of its forward, or input ids alone; one of these, or several.
Batches: TypeAlias = Mapping[str, Any] | Tensor | Iterable[Mapping[str, Any] | Tensor]
#: The least share of attention on the expected token at which a head counts as one that copies.
COPIES = 0.02


@dataclass(frozen=True)
class Measurements:
    """Statistics of unmodified attention, each a float64 tensor of shape (layers, heads); NaN where a layer was not seen.

    Padding is left out. Logits are scaling q . k (after the model's softcap) over all visible pairs but those with a sink
    key. Entropy (nats) and sink_mass are means over query rows; output_mean and output_deviation are means over tokens of
    the mean and standard deviation of one head's output features, before the output projection. all_heads_* are those over
    all heads' features, (layers,).
    """

    logit_mean: Tensor
    logit_variance: Tensor
    entropy: Tensor
    sink_mass: Tensor
    output_mean: Tensor
    output_deviation: Tensor
    all_heads_mean: Tensor
    all_heads_deviation: Tensor
    tokens: int


@torch.no_grad()
def measure(model: nn.Module, batches: Batches, sink_tokens: int = 1) -> Measurements:
    """Run `batches` through a model once and measure the attention of every layer that a method would change.

    Args:
        batches: keyword arguments of the model's forward ({"input_ids": ...}), or input ids alone, int64 (batch, length):
            one of these, or an iterable of them.
        sink_tokens: the first keys of each sequence, left out of the logit statistics and measured as the sink.

    Memory: blocks of query rows; never a tensor of q_len x kv_len.
    """
    sums: dict[int, dict[str, Tensor]] = {}

    def seen(layer: Layer, call: Call) -> None:
        real = call.rows.tokens(call.key.shape[2])
        result = _statistics(call, real, sink_tokens) | _output_statistics(call.output, real)
        total = sums.setdefault(layer.index, {name: torch.zeros_like(x) for name, x in result.items()})
        for name, x in result.items():
            total[name] += x

    with observe(model, seen) as layers:
        config: Any = layers[0].module.config
        for batch in _batches(batches):
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
            model(**inputs, use_cache=False)
    if not sums:
        raise ValueError("no batches to measure")

    def collect(numerator: str, denominator: str) -> Tensor:
        rows = [sums[i][numerator] / sums[i][denominator] if i in sums else None for i in range(config.num_hidden_layers)]
        like = next(r for r in rows if r is not None)
        return torch.stack([torch.full_like(like, torch.nan) if r is None else r for r in rows]).cpu()

    mean = collect("logit", "pairs")
    return Measurements(
        logit_mean=mean,
        logit_variance=collect("square", "pairs") - mean**2,
        entropy=collect("entropy", "rows"),
        sink_mass=collect("sink", "rows"),
        output_mean=collect("mean", "tokens"),
        output_deviation=collect("deviation", "tokens"),
        all_heads_mean=collect("all_mean", "tokens")[:, 0],
        all_heads_deviation=collect("all_deviation", "tokens")[:, 0],
        tokens=int(next(iter(sums.values()))["tokens"]),
    )


def calibrate(
    model: nn.Module,
    batches: Batches,
    method: str | LongAttnConfig = "scale_invariant",
    **parameters: Any,
) -> LongAttnConfig:
    """A config whose methods are set to the statistics of this model on these batches.

    The scale-invariant map gets logit_mean and logit_variance per layer and head, and sink_tokens=1 unless given; output
    norms get deviation and mean, per layer and head if they work per head. leaky_rerope, where its stretch
    is one number, gets one per key head: a cap where a head copies (`evaluation.copying_heads` at COPIES or more), which has
    to find keys from anywhere, that number elsewhere.

    Args:
        model: without a method in it, or with one: the logits measured are the model's own either way.
        batches: see `measure`; one or two thousand tokens of ordinary text are enough, for leaky_rerope about 4096.
        method: a preset name with its parameters, or a config.

    Raises:
        ValueError: none of the methods has anything to calibrate.
    """
    config = LongAttnConfig.of(method, **parameters)
    texts = _batches(batches)
    changes: dict[str, Any] = {}
    remap, logit_map, norm = config.positions, config.logit_map, config.output_norm
    if isinstance(remap, LeakyReRope) and not isinstance(remap.stretch, tuple):
        changes["positions"] = dataclasses.replace(remap, stretch=_stretches(model, texts, remap.stretch))
    if isinstance(logit_map, ScaleInvariant) and "sink_tokens" not in parameters and isinstance(method, str):
        logit_map = dataclasses.replace(logit_map, sink_tokens=1)
    if isinstance(logit_map, ScaleInvariant) or isinstance(norm, OutputStandardise):
        result = measure(model, texts, max(getattr(logit_map, "sink_tokens", 1), 1))
        if isinstance(logit_map, ScaleInvariant):
            mean, variance = _nested(result.logit_mean, 0.0), _nested(result.logit_variance, 1.0)
            changes["logit_map"] = dataclasses.replace(logit_map, logit_mean=mean, logit_variance=variance)
        if isinstance(norm, OutputStandardise):
            changes["output_norm"] = _standing(norm, result)
    if not changes:
        raise ValueError(f"{config.name} has nothing to calibrate; scale_invariant, leaky_rerope and the output norms have")
    return config.replace(**changes)


def _stretches(model: nn.Module, batches: list[Any], stretch: float) -> tuple[float | tuple[float, ...], ...]:
    """The stretch of every layer: one number, or one for each key head where one of its heads copies."""
    _, facts = bound_config(model, LongAttnConfig())
    texts = [batch if isinstance(batch, Tensor) else batch["input_ids"] for batch in batches]
    shares = torch.stack([copying_heads(model, row[None]) for text in texts for row in text]).mean(0)
    copies = shares.unflatten(1, (facts.num_kv_heads, -1)).amax(-1) >= COPIES
    return tuple(
        tuple(math.inf if head else stretch for head in layer) if any(layer) else stretch for layer in copies.tolist()
    )


def _standing(norm: OutputStandardise, result: Measurements) -> OutputStandardise:
    """A norm with the mean and deviation that outputs have, of each head, or of all together."""
    mean, deviation, heads = result.output_mean, result.output_deviation, result.output_mean.shape[1]
    if not norm.per_head:
        mean, deviation = (x[:, None].expand(-1, heads) for x in (result.all_heads_mean, result.all_heads_deviation))
    return dataclasses.replace(norm, deviation=_nested(deviation, 1.0), mean=_nested(mean, 0.0))


def _batches(given: Batches) -> list[Mapping[str, Any] | Tensor]:
    """One batch is a list of one."""
    return [given] if isinstance(given, (Tensor, Mapping)) else list(given)


def _statistics(call: Call, real: Tensor, sink_tokens: int) -> dict[str, Tensor]:
    """Sums over one call, each (heads,) in float64, of the logits that the model would have without a method."""
    names = ("logit", "square", "pairs", "entropy", "sink", "rows")
    total = {name: torch.zeros(call.query.shape[1], dtype=torch.float64, device=call.query.device) for name in names}
    for block in blocks(dataclasses.replace(call, config=LongAttnConfig())):
        visible = block.visible & real[:, None, block.which, None]
        sink = block.rows.sinks(block.logits.shape[-1], sink_tokens)[:, None]
        counted = visible & ~sink
        kept = torch.where(counted, block.logits, 0.0)
        seen = visible.any(-1, keepdim=True)
        p = block.log_p.exp() * seen
        for name, x in (
            ("logit", kept),
            ("square", kept * kept),
            ("pairs", counted.expand_as(kept)),
            ("entropy", -p * block.log_p),
            ("sink", p * sink),
            ("rows", seen.expand_as(kept[..., :1])),
        ):
            total[name] += x.sum(-1).double().sum((0, 2))
    return total


def _output_statistics(out: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of one call; (heads,), or (1,) for all heads together."""
    out, real = out.double(), real.expand(out.shape[0], -1)
    return {
        "mean": (out.mean(-1) * real[:, None]).sum((0, 2)),
        "deviation": (out.std(-1, correction=0) * real[:, None]).sum((0, 2)),
        "all_mean": (out.mean((1, 3)) * real).sum()[None],
        "all_deviation": (out.std((1, 3), correction=0) * real).sum()[None],
        "tokens": real.sum().double()[None],
    }


def _nested(values: Tensor, missing: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.nan_to_num(nan=missing).tolist())
