"""Verifying on a model itself the rotations that its layers' plans rely on."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.call import Call
from ..attention.tracing import readable
from ..config import LongAttnConfig
from ..telling import warn
from .layers import Layer, all_configs, layers_of
from .names import is_ours
from .passes import Probing, is_under
from .rotation import PROBE, Convention, RotarySource, find_rotary, settle
from .state import AttentionState, Plans, plan_of, set_plan, turn

#: Why a layer is not remapped, or left alone where nothing else changes it.
NOT_ROTATED = "no rotary encoding"


def rotation_of(model: nn.Module, config: Any, layers: list[Layer]) -> RotarySource | None:
    """The rotation of layers of one type: the one that all of them run, which may be verified, else one to verify."""
    source = find_rotary(model, config, layers[0].type)
    running = {_source(layer) for layer in layers}
    known = running.pop() if len(running) == 1 else None
    same = (
        source is not None
        and known is not None
        and not known.still
        and (known.module, known.buffer) == (source.module, source.buffer)
    )
    return known if same else source


@torch.no_grad()
def verify_rotations(model: PreTrainedModel) -> None:
    """Check every rotation that a plan relies on, by a forward pass of a few tokens.

    Every attention module gets the first token's hidden state at every position, whatever the layers before made of it
    (recurrent ones tell equal tokens apart), so its queries and keys differ by their rotation alone.

    Raises:
        ValueError: a rotation is not understood.
    """
    layers = _unverified(layers_of(model))
    if not layers or not _computes(model):
        return
    sources = {layer.name: _source(layer) for layer in layers}
    computed: dict[str, Call] = {}
    plans = {x.module: plan for x in layers if (plan := plan_of(x.module)) is not None}
    for layer in layers:
        plan = plans[layer.module]
        observer = functools.partial(computed.__setitem__, layer.name)
        plans[layer.module] = dataclasses.replace(plan, config=LongAttnConfig(), rotary=None, observer=observer)
    probing = Plans(plans[layers[0].module].state, plans, (), {})
    hook = functools.partial(_with_equal_tokens, probing)
    equal = [x.module.register_forward_pre_hook(hook, with_kwargs=True) for x in layers_of(model) if not x.why_never]
    try:
        device = model.get_input_embeddings().weight.device
        ids = torch.ones(1, PROBE, dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        with evaluating(model), Probing(probing):
            type(model).forward(model, input_ids=ids, use_cache=False)  # the instance's may be a trainer's
    finally:
        for handle in equal:
            handle.remove()
    settled: list[tuple[RotarySource, Convention | None, list[Layer]]] = []
    for source in dict.fromkeys(sources.values()):
        assert source is not None
        names = [name for name, x in sources.items() if x is source]
        if missing := [name for name in names if name not in computed]:
            raise ValueError(f"cannot remap rotary distances here: {missing[0]} takes no part in a forward pass over text")
        convention, still = settle(source, [(name, computed[name].query, computed[name].key) for name in names])
        settled.append((source, convention, [x for x in layers if x.name in still]))
    unrotated = [x for _, _, alone in settled for x in alone]
    _tell_of_nothing(type(model).__name__, [x for x in layers_of(model) if not x.why_never], unrotated)
    for source, convention, alone in settled:
        source.convention = convention
        leave_unrotated(source, alone)


def _tell_of_nothing(model: str, layers: list[Layer], unrotated: list[Layer]) -> None:
    """Where a remap finds no layer that rotates: raise, or warn if others do, within windows of their own."""
    config = next((plan.config for x in unrotated if (plan := plan_of(x.module)) is not None), None)
    names = {x.name for x in unrotated}
    others = [x for x in layers if x.name not in names]
    if config is None or config.positions is None or any(_source(x) is not None for x in others):
        return
    nothing = (
        f"{config.positions.name} remaps rotary distances, and there is nothing to remap in {model}: the "
        f"layers {[x.index for x in unrotated]} that it goes into do not rotate their queries and keys"
    )
    if not others or config.layers != "full_attention":
        raise ValueError(f"{nothing}. Take a window (windowed, streaming) or a temperature (infoscale, logn)")
    warn(
        f"{nothing}, and the others have windows: no distance that the model rotates by grows with the text. It runs as it "
        "did; a temperature (infoscale, logn) acts in those layers",
    )


def leave_unrotated(source: RotarySource, layers: list[Layer]) -> None:
    """No remap for layers that do not rotate; windows and sinks show what they show, at no distances."""
    unrotated = dataclasses.replace(source, still=True)
    for layer in layers:
        plan = plan_of(layer.module)
        assert plan is not None
        assert plan.config is not None
        config = dataclasses.replace(plan.config, positions=None)
        rotary = unrotated if config.remap is not None else None
        own = config if config.methods else None
        set_plan(layer.module, dataclasses.replace(plan, config=own, reason=NOT_ROTATED, rotary=rotary))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While open, the model is in evaluation mode; afterwards each of its modules is in the mode that it was in."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def verify_at_first_call(state: AttentionState, model: Any) -> None:
    """Where a model was built without weights: once it computes, its rotations are verified."""
    with turn(state):
        # without one of our names it is disabled; without `unverified`, another thread has done it
        ours = any(is_ours(c._attn_implementation_internal) for c in all_configs(model))
        if state.unverified is not None and ours and _computes(model):
            verify_rotations(model)
            state.publish(model)
            state.unverified = None


def _with_equal_tokens(
    probing: Plans, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Arguments of an attention module's call, with the first hidden state in place of all; (batch, PROBE, width)."""
    if not is_under(probing):
        return None  # another thread's

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
    return None if (plan := plan_of(layer.module)) is None else plan.rotary


def _unverified(layers: Iterable[Layer]) -> list[Layer]:
    return [x for x in layers if (source := _source(x)) is not None and not source.verified]
