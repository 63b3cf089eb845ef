"""Measuring what methods need to know about a pretrained model's attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..config import NO_METHOD, LongAttnConfig
from ..core.attend import attend
from ..core.call import Call
from ..core.tracing import wide_device, widened
from ..integration.layer_methods import facts_for
from ..integration.layers import Layer, View
from ..integration.observer import observe
from ..methods import LeakyReRope, OutputStandardise, ScaleInvariant
from .measures.heads import by_layer, copying_heads
from .measures.sums import Options, Sums, collect

#: What a model is measured on: keyword arguments of its forward, or input ids alone; one of these, or several.
Batches: TypeAlias = Mapping[str, Any] | Tensor | Iterable[Mapping[str, Any] | Tensor]
#: The least share of attention on the expected token at which a head counts as one that copies.
COPYING = 0.02
#: Of `Measurements`: what is measured of logits, and of outputs.
OF_LOGITS = ("logit_mean", "logit_variance", "entropy", "sink_mass")
OF_OUTPUTS = ("output_mean", "output_deviation", "all_heads_mean", "all_heads_deviation")


@dataclass(frozen=True)
class Measurements:
    """Statistics of unmodified attention, each a float64 tensor of shape (layers, heads); NaN where a layer was not seen.
    Under a method they are what each layer's own attention makes of the inputs that it gets there.

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
    logits: dict[int, Sums] = {}
    outputs: dict[int, dict[str, Tensor]] = {}
    options = Options(("logits", "entropy", "mass"), sinks=sink_tokens)

    def seen(layer: Layer, call: Call, output: Tensor) -> None:
        own = call.under(NO_METHOD)
        output = attend(own) if call.config.methods else output
        logits.setdefault(layer.index, Sums(options)).add(own, output)
        total = outputs.setdefault(layer.index, {})
        for name, x in _output_sums(output, call.rows.on(output.device).real_rows(call.key.shape[2])).items():
            total[name] = total.get(name, 0) + x

    with observe(model, seen) as layers:
        for batch in _batches(batches):
            model(**batch, use_cache=False)
    if not logits:
        raise ValueError("no batches to measure")
    found = collect(logits)
    overall = {q: by_layer(dict(zip(found.layers, found.overall(q), strict=True)), layers) for q in OF_LOGITS}
    means = {name: by_layer({i: x[name] / x["tokens"] for i, x in outputs.items()}, layers) for name in OF_OUTPUTS}
    return Measurements(**overall, **means, tokens=int(next(iter(outputs.values()))["tokens"]))


def calibrate(
    model: nn.Module,
    batches: Batches,
    method: str | LongAttnConfig = "scale_invariant",
    **parameters: Any,
) -> LongAttnConfig:
    """A config whose methods are set to the statistics of this model on these batches.

    The scale-invariant map gets logit_mean and logit_variance per layer and head, and sink_tokens=1 unless given; output
    norms get deviation and mean, per layer and head if they work per head. leaky_rerope, where its stretch
    is one number, gets one per key head: infinity, a cap, for heads that copy (`evaluation.copying_heads` at COPYING or
    more), and that number for the others.

    Args:
        model: without a method in it, or with one: the logits and outputs measured are the model's own either way.
        batches: see `measure`; one or two thousand tokens of ordinary text are enough, for leaky_rerope about 4096.
        method: a preset name with its parameters, or a config.

    Raises:
        ValueError: none of the methods has anything to calibrate.
    """
    config = LongAttnConfig.parse(method, parameters)
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


def _stretches(model: nn.Module, batches: list[Mapping[str, Any]], stretch: float) -> tuple[float | tuple[float, ...], ...]:
    """The stretch of every layer: one number, or one for each key head where one of its heads copies."""
    facts = facts_for(View(model))
    texts = [text for batch in batches for text in _texts(batch)]
    shares = torch.stack([copying_heads(model, text[None]) for text in texts]).mean(0)
    copies = shares.unflatten(1, (facts.num_kv_heads, -1)).amax(-1) >= COPYING
    return tuple(
        tuple(math.inf if head else stretch for head in layer) if any(layer) else stretch for layer in copies.tolist()
    )


def _texts(batch: Mapping[str, Any]) -> list[Tensor]:
    """The token ids of each text of a batch, without padding."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return list(ids) if mask is None or mask.ndim != 2 else [row[real.bool()] for row, real in zip(ids, mask, strict=True)]


def _standing(norm: OutputStandardise, result: Measurements) -> OutputStandardise:
    """A norm with the mean and deviation that outputs have, of each head, or of all together."""
    mean, deviation, heads = result.output_mean, result.output_deviation, result.output_mean.shape[1]
    if not norm.per_head:
        mean, deviation = (x[:, None].expand(-1, heads) for x in (result.all_heads_mean, result.all_heads_deviation))
    return dataclasses.replace(norm, deviation=_nested(deviation, 1.0), mean=_nested(mean, 0.0))


def _batches(given: Batches) -> list[Mapping[str, Any]]:
    """Keyword arguments of a model's forward for each batch; one batch is a list of one. TypeError: one is no tokens."""
    if isinstance(given, nn.Module):
        raise TypeError("the model comes first, then the batches")
    batches: list[Any] = [given] if isinstance(given, (Tensor, Mapping, str)) else list(given)
    for batch in batches:
        if isinstance(batch, Mapping) and "input_ids" not in batch:  # embeddings, say
            continue
        ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
        if isinstance(ids, Tensor) and (ids.ndim != 2 or ids.is_floating_point()):
            raise TypeError(f"a batch is token ids, (batch, length), got {ids.dtype}, {tuple(ids.shape)}")
        if not isinstance(ids, Tensor):
            raise TypeError(
                f"a batch is token ids, (batch, length), or what a tokenizer gives, not a {type(ids).__name__}: "
                'tokenizer(text, return_tensors="pt")'
            )
    return [{"input_ids": batch} if isinstance(batch, Tensor) else batch for batch in batches]


def _output_sums(out: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of one call; (heads,), or of all heads together, ()."""
    out, real = widened(out), real.expand(out.shape[0], -1).to(wide_device(out.device))
    return {
        "output_mean": (out.mean(-1) * real[:, None]).sum((0, 2)),
        "output_deviation": (out.std(-1, correction=0) * real[:, None]).sum((0, 2)),
        "all_heads_mean": (out.mean((1, 3)) * real).sum(),
        "all_heads_deviation": (out.std((1, 3), correction=0) * real).sum(),
        "tokens": real.sum().double(),
    }


def _nested(values: Tensor, missing: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.nan_to_num(nan=missing).tolist())
