"""Proving on the model itself the rotations that its layers' plans rely on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention import Call
from ..config import LongAttnConfig
from ..tracing import readable
from .dispatch import LayerPlan
from .layers import Layer, all_configs, layers_of
from .names import is_ours
from .rotation import PROBE, RotarySource, find_rotary, prove


def rotation_of(model: nn.Module, config: Any, layers: list[Layer]) -> RotarySource | None:
    """The rotation of layers of one type: the one that they run, where all of them were proven by it, else one to prove."""
    source = find_rotary(model, config, layers[0].type)
    running = {_source(layer) for layer in layers}
    known = running.pop() if len(running) == 1 else None
    return known if source is not None and known is not None and known.same_as(source) else source


@torch.no_grad()
def prove_rotations(model: PreTrainedModel) -> None:
    """Check every rotation that a plan relies on, by a forward pass of a few equal tokens.

    Attention over equal values returns that value whatever the weights, so every layer sees the same vector at every
    position, and its queries and keys differ by their rotation alone.
    """
    unproven = [x for x in layers_of(model) if (s := _source(x)) is not None and not s.proven]
    if not unproven or not _computes(model):
        return
    plans = {id(x.module): x.module.longattn_plan for x in unproven}
    computed: dict[str, Call] = {}
    for layer in unproven:
        plan = plans[id(layer.module)]
        seen = functools.partial(computed.__setitem__, layer.name)
        layer.module.longattn_plan = dataclasses.replace(plan, config=LongAttnConfig(), rotary=None, observer=seen)
    training = model.training
    try:
        model.eval()
        device = model.get_input_embeddings().weight.device
        ids = torch.ones(1, PROBE, dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        type(model).forward(model, input_ids=ids, use_cache=False)  # the instance's may be a trainer's
    finally:
        model.train(training)
        for layer in unproven:
            layer.module.longattn_plan = plans[id(layer.module)]
    for source in dict.fromkeys(plan.rotary for plan in plans.values()):
        assert source is not None
        names = [x.name for x in unproven if plans[id(x.module)].rotary is source]
        prove(source, [(name, vectors) for name in names for vectors in (computed[name].query, computed[name].key)])


def _computes(model: nn.Module) -> bool:
    """Whether a forward pass gives values. Weights on the meta device do not hinder it where accelerate's hooks fetch them."""
    offloaded = any("_hf_hook" in m.__dict__ for m in model.modules())
    return readable(torch.empty(0)) and (offloaded or all(readable(p) for p in model.parameters()))


def _source(layer: Layer) -> RotarySource | None:
    plan: LayerPlan | None = layer.module.__dict__.get("longattn_plan")
    return None if plan is None else plan.rotary


def prove_at_first_call(model: PreTrainedModel) -> None:
    """While a model is built it has no weights to prove anything with; its first forward pass has."""
    waiting = any("longattn_proof" in m.__dict__ for m in model.modules())
    if waiting or not any((s := _source(x)) is not None and not s.proven for x in layers_of(model)):
        return

    def first(module: Any, args: Any) -> None:
        # without a method it is switched off for the moment
        runs_ours = any(is_ours(c._attn_implementation) for c in all_configs(module))
        if _computes(module) and runs_ours:
            module.__dict__.pop("longattn_proof").remove()
            try:
                prove_rotations(module)
            except ValueError:
                prove_at_first_call(module)  # it must not wear off
                raise

    model.longattn_proof = model.register_forward_pre_hook(first)  # type: ignore[assignment]
