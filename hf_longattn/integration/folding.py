"""Folding head gains into the weights of a model, which then needs no plugin."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention.call import Call
from ..attention.tracing import readable
from ..methods.learned import learned_parts
from ..methods.output_gain import OutputGain
from .layers import Layer, pretrained
from .model import apply, config_of, knowing, remove
from .observe import observe
from .state import adapters_of, plan_of, transaction
from .verify import evaluating

Model = TypeVar("Model", bound=nn.Module)
_TOKENS = 8


@torch.no_grad()
def fold(model: Model) -> Model:
    """Multiply a model's head gains (`output_gain`) into its output projections, in place, and take the method out.

    The model computes the same, in any engine: other methods that it runs stay. Which projection reads a layer's heads is
    found by running the model on a few tokens, and the logits are compared before and after.

    Returns:
        The same model.

    Raises:
        ValueError: there are no head gains, or a layer's cannot be folded; the model is then unchanged.
    """
    base = pretrained(model)
    config = config_of(base)
    if not isinstance(config.output_norm, OutputGain):
        raise ValueError(f"{config.name} has no head gains to fold: only output_gain folds into the weights")
    if adapters_of(base) or base.__dict__.get("peft_config"):
        raise ValueError("an adapter is on the model, and its output projections are more than their weights: merge it first")
    if not all(map(readable, base.parameters())):
        raise ValueError("the model has no weights here (meta device, or offloaded): load them all first")
    before, found = _probe(base)
    kept = [(p, p.weight.clone()) for p, _ in found]
    for projection, gain in found:
        weight = projection.weight.double()
        weight = gain[:, None] * weight if isinstance(projection, Conv1D) else weight * gain
        projection.weight.copy_(weight)
    rest = dataclasses.replace(config, output_norm=None)
    try:
        with transaction(base), knowing(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dropping the trained parameters")  # they are in the weights now
            after = _logits(apply(base, rest) if rest.methods else remove(base))
            half = before.dtype in (torch.float16, torch.bfloat16)
            if not (after - before).abs().max() <= (0.05 if half else 1e-4) * before.abs().max():
                raise ValueError("the folded weights do not give the logits that the gains gave: please report the model")
    except BaseException:
        for projection, weight in kept:
            projection.weight.copy_(weight)
        raise
    return model


def _probe(model: PreTrainedModel) -> tuple[Tensor, list[tuple[Any, Tensor]]]:
    """Logits of a few tokens, and every projection that reads a layer's heads with the gains of its input features."""
    outputs: dict[str, tuple[Layer, Call]] = {}
    inputs: dict[str, list[tuple[nn.Module, Tensor]]] = {}

    def seen(layer: Layer, call: Call) -> None:
        if plan_of(layer.module).config.output_norm is not None:  # type: ignore[union-attr]
            outputs[layer.name] = layer, call

    handles = []
    try:
        with observe(model, seen) as layers:
            for layer in layers:
                for part in (m for m in layer.module.modules() if m is not layer.module):

                    def reads(part: nn.Module, args: tuple[Any, ...], name: str = layer.name) -> None:
                        if args and isinstance(args[0], Tensor):
                            inputs.setdefault(name, []).append((part, args[0]))

                    handles.append(part.register_forward_pre_hook(reads))
            logits = _logits(model)
    finally:
        for handle in handles:
            handle.remove()
    return logits, [_projection(layer, call, inputs.get(name, [])) for name, (layer, call) in outputs.items()]


def _projection(layer: Layer, call: Call, inputs: list[tuple[nn.Module, Tensor]]) -> tuple[Any, Tensor]:
    """The projection that reads what a layer's heads returned, and the gain of each of its input features, float64."""
    heads = call.output.transpose(1, 2).flatten(2)
    readers = [part for part, x in inputs if x.shape[-1] == heads.shape[-1] and torch.equal(x.reshape(heads.shape), heads)]
    if len(readers) != 1:
        raise ValueError(
            f"{layer.name} has {len(readers)} modules that read what its heads return, and gains fold into exactly one: a "
            "gate or norm may lie between. Keep the method"
        )
    if type(readers[0]) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"{layer.name} hands its heads to a {type(readers[0]).__name__}, whose weights cannot be multiplied: fold before "
            "quantising or wrapping"
        )
    method = call.config.output_norm
    assert isinstance(method, OutputGain)
    gain = method.gains(call.output, learned_parts(layer.module).get("output_norm")).double().flatten()
    count = call.output.shape[1]
    return readers[0], gain.expand(count).repeat_interleave(heads.shape[-1] // count)


def _logits(model: PreTrainedModel) -> Tensor:
    with evaluating(model):
        ids = torch.arange(1, 1 + _TOKENS, device=model.get_input_embeddings().weight.device)[None]
        return type(model).forward(model, input_ids=ids, use_cache=False)[0]  # type: ignore[no-any-return]
