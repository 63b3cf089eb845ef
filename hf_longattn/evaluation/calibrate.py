"""Measuring what methods need to know about a pretrained model's attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..attention.attend import Call
from ..config import LongAttnConfig
from ..integration.layers import Layer
from ..integration.observe import observe
from ..integration.planning import bound_config
from ..methods import LeakyReRope, LogN, OutputLayerNorm, OutputStandardise, ScaleInvariant
from .measures.blocks import blocks
from .measures.heads import copying_heads

#: What a model is measured on: keyword arguments of its forward, or input ids alone; one of these, or several.
Batches: TypeAlias = Mapping[str, Any] | Tensor | Iterable[Mapping[str, Any] | Tensor]
#: The least share of attention on the expected token at which a head counts as one that copies.
COPIES = 0.02
#: The least number of keys of a row that counts in the growth of gaps: below it ln ln n says little.
FEWEST_KEYS = 16


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


@dataclass(frozen=True)
class LogitGaps:
    """How the gap between a row's largest logit and their mean grows with its n keys: gap(n) = level (ln n)^growth.

    Both float64 (layers, heads); NaN where a layer was not seen. A least-squares line through ln gap over ln ln n, rows
    weighed by 1 / n, so that each doubling of n counts alike. The largest key keeps its share as n grows where the factor on
    the logits goes as ln n / gap(n) = (ln n)^(1 - growth) / level: growth 0 of bounded logits asks for LogN's exponent 1,
    growth 1/2 of Gaussian ones for 1/2.
    """

    growth: Tensor
    level: Tensor


@torch.no_grad()
def logit_gaps(model: nn.Module, batches: Batches, sink_tokens: int = 1) -> LogitGaps:
    """Run `batches` through a model once, as `measure` does, for the gaps of its own logits.

    Args:
        sink_tokens: the first keys of each sequence, left out.
    """
    sums: dict[int, Tensor] = {}

    def seen(layer: Layer, call: Call) -> None:
        sums[layer.index] = sums.get(layer.index, 0) + _gap_sums(call, call.rows.tokens(call.key.shape[2]), sink_tokens)

    config = _run(model, batches, seen)
    if not sums:
        raise ValueError("no batches to measure")
    missing = torch.full_like(next(iter(sums.values())), torch.nan)
    weight, x, y, xx, xy = torch.stack([sums.get(i, missing) for i in range(config.num_hidden_layers)]).cpu().unbind(1)
    growth = (weight * xy - x * y) / (weight * xx - x * x)
    return LogitGaps(growth, torch.exp((y - growth * x) / weight))


def _run(model: nn.Module, batches: Batches, seen: Callable[[Layer, Call], None]) -> Any:
    """The batches through the model, every call of its layers to `seen`; returns the config of those layers."""
    with observe(model, seen) as layers:
        config = layers[0].module.config
        for batch in _batches(batches):
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
            model(**inputs, use_cache=False)
    return config


def _batches(given: Batches) -> Iterable[Mapping[str, Any] | Tensor]:
    """One batch is a list of one."""
    return [given] if isinstance(given, (Tensor, Mapping)) else given


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

    config = _run(model, batches, seen)
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
    logn gets the exponent 1 - growth of the median head's `logit_gaps`, and, where its scale is a number, 1 / level.

    Args:
        model: without a method in it, or with one: the logits measured are the model's own either way.
        batches: see `measure`; one or two thousand tokens of ordinary text are enough, for leaky_rerope about 4096.
        method: a preset name with its parameters, or a config.

    Raises:
        ValueError: none of the methods has anything to calibrate.
    """
    config = (
        method.replace(**parameters) if isinstance(method, LongAttnConfig) else LongAttnConfig.preset(method, **parameters)
    )
    changes: dict[str, Any] = {}
    batches, remap, logit_map, norm = list(_batches(batches)), config.positions, config.logit_map, config.output_norm
    if isinstance(remap, LeakyReRope) and not isinstance(remap.stretch, tuple):
        changes["positions"] = dataclasses.replace(remap, stretch=_stretches(model, batches, remap.stretch))
    if isinstance(config.temperature, LogN):
        changes["temperature"] = _critical(config.temperature, logit_gaps(model, batches))
    if isinstance(logit_map, ScaleInvariant) and "sink_tokens" not in parameters and isinstance(method, str):
        logit_map = dataclasses.replace(logit_map, sink_tokens=1)
    if not isinstance(logit_map, ScaleInvariant) and not isinstance(norm, (OutputStandardise, OutputLayerNorm)):
        if changes:
            return dataclasses.replace(config, **changes)
        raise ValueError(
            f"{config.name} has nothing to calibrate; scale_invariant, logn, leaky_rerope and the output norms have"
        )
    result = measure(model, batches, max(logit_map.sink_tokens, 1) if isinstance(logit_map, ScaleInvariant) else 1)
    if isinstance(logit_map, ScaleInvariant):
        changes["logit_map"] = dataclasses.replace(
            logit_map, logit_mean=_nested(result.logit_mean, 0.0), logit_variance=_nested(result.logit_variance, 1.0)
        )
    if isinstance(norm, OutputStandardise):
        heads = result.output_mean.shape[1]
        mean, deviation = result.output_mean, result.output_deviation
        if not norm.per_head:
            mean, deviation = (x[:, None].expand(-1, heads) for x in (result.all_heads_mean, result.all_heads_deviation))
        changes["output_norm"] = dataclasses.replace(norm, deviation=_nested(deviation, 1.0), mean=_nested(mean, 0.0))
    return dataclasses.replace(config, **changes)


def _stretches(model: nn.Module, batches: list[Any], stretch: float) -> tuple[float | tuple[float, ...], ...]:
    """The stretch of every layer: one number, or one for each key head where one of its heads copies."""
    _, facts = bound_config(model, LongAttnConfig())
    copies = _copying(model, batches).unflatten(1, (facts.num_kv_heads, -1)).amax(-1) >= COPIES
    return tuple(
        tuple(math.inf if head else stretch for head in layer) if any(layer) else stretch for layer in copies.tolist()
    )


def _critical(method: LogN, gaps: LogitGaps) -> LogN:
    """LogN with the median head's exponent, and scale if it has one."""
    exponent = 1 - float(gaps.growth.nanmedian())
    if not exponent > 0:
        raise ValueError(
            f"the gaps between logits grow as (ln n)^{1 - exponent:.2f} in the median head, as fast as ln n or faster: they "
            "outweigh the number of keys by themselves, and logn has nothing to add"
        )
    scale = None if method.scale is None else float(1 / gaps.level.nanmedian())
    return dataclasses.replace(method, exponent=exponent, scale=scale)


def _gap_sums(call: Call, real: Tensor, sink_tokens: int) -> Tensor:
    """Weighted sums over rows of 1, x, y, x² and x y for x = ln ln n and y = ln gap, float64 (5, heads)."""
    total = torch.zeros(5, call.query.shape[1], dtype=torch.float64, device=call.query.device)
    for block in blocks(dataclasses.replace(call, config=LongAttnConfig())):
        counted = block.visible & real[:, None, block.which, None]
        counted = (counted & ~block.rows.sinks(block.logits.shape[-1], sink_tokens)[:, None]).expand_as(block.logits)
        n = counted.sum(-1).double()
        mean = torch.where(counted, block.logits, 0.0).double().sum(-1) / n.clamp(min=1)
        most = block.logits.masked_fill(~counted, -torch.inf).amax(-1).double()
        used = (n >= FEWEST_KEYS) & (most > mean)
        n, gap = torch.where(used, n, FEWEST_KEYS), torch.where(used, most - mean, 1.0)
        x, y, weight = n.log().log(), gap.log(), used / n
        total += torch.stack([(weight * z).sum((0, 2)) for z in (torch.ones_like(x), x, y, x * x, x * y)])
    return total


def _copying(model: nn.Module, batches: list[Any]) -> Tensor:
    """`evaluation.copying_heads`, the mean over texts."""
    texts = [batch if isinstance(batch, Tensor) else batch["input_ids"] for batch in batches]
    return torch.stack([copying_heads(model, row[None]) for text in texts for row in text]).mean(0)


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
