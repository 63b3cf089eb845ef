"""Proving on the model itself the rotations that its layers' plans rely on."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.attend import Call
from ..attention.tracing import readable
from ..config import LongAttnConfig
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
    """Check every rotation that a plan relies on, by a forward pass of a few tokens.

    Every attention module gets the first token's hidden state at every position, whatever the layers before made of it
    (recurrent ones tell equal tokens apart), so its queries and keys differ by their rotation alone.
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
    equal = [
        x.module.register_forward_pre_hook(_with_equal_tokens, with_kwargs=True) for x in layers_of(model) if not x.why_never
    ]
    training = model.training
    try:
        model.eval()
        device = model.get_input_embeddings().weight.device
        ids = torch.ones(1, PROBE, dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        type(model).forward(model, input_ids=ids, use_cache=False)  # the instance's may be a trainer's
    finally:
        model.train(training)
        for handle in equal:
            handle.remove()
        for layer in unproven:
            layer.module.longattn_plan = plans[id(layer.module)]
    for source in dict.fromkeys(plan.rotary for plan in plans.values()):
        assert source is not None
        names = [x.name for x in unproven if plans[id(x.module)].rotary is source]
        if missing := [name for name in names if name not in computed]:
            raise ValueError(f"cannot remap rotary distances here: {missing[0]} takes no part in a forward pass over text")
        prove(source, [(name, vectors) for name in names for vectors in (computed[name].query, computed[name].key)])


def _with_equal_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of an attention module's call, with the first hidden state in place of all; (batch, PROBE, width)."""

    def equal(states: Tensor) -> Tensor:
        return states[:, :1].expand_as(states).contiguous()

    if args:
        return (equal(args[0]), *args[1:]), kwargs
    name = list(inspect.signature(type(module).forward).parameters)[1]
    return args, kwargs | {name: equal(kwargs[name])}


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
    unproven = {x.module for x in layers_of(model) if (s := _source(x)) is not None and not s.proven}
    if waiting or not unproven:
        return
    # the innermost model around them: it may be called without the others (their heads)
    inner = [m for m in model.modules() if isinstance(m, PreTrainedModel) and unproven <= set(m.modules())][-1]

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

    inner.longattn_proof = inner.register_forward_pre_hook(first)  # type: ignore[assignment]
