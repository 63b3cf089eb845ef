"""The parameters that methods bring into attention modules: put there, kept over a change, and known to accelerate."""

from __future__ import annotations

from torch import nn

from ..slots.learned import START, LearnedParts, learned_parts
from ..slots.method import ModelFacts
from ..telling import warn
from .layers import Layer, View
from .offload import device_of, held, keep_learned
from .state import plan_of


def bring(view: View, facts: ModelFacts) -> None:
    """Give the layers of a model the learned parts of what they are planned to run."""
    for layer in view.of_target:
        config = plan.config if (plan := plan_of(layer.module)) is not None else None
        made = {m.slot: m.module(facts) for m in (config.methods if config is not None else ())}
        attach(view.model, layer, {slot: part for slot, part in made.items() if part is not None})
    keep_learned(view)


def attach(model: nn.Module, layer: Layer, learned: dict[str, nn.Module]) -> None:
    """Give an attention module these learned parts as `module.longattn`, keeping those that it has already.

    Warns if parameters are dropped that training has changed.
    """
    module = layer.module
    present = learned_parts(module)
    shapes, own = ({s: [(n, p.shape) for n, p in x.named_parameters()] for s, x in of.items()} for of in (present, learned))
    for slot, part in learned.items():
        if shapes.get(slot) == own[slot]:
            learned[slot] = present[slot]
        else:
            like, device = next(module.parameters()), device_of(module)
            dtype = like.dtype if like.is_floating_point() else None  # not a quantised one's
            if any(p.device != device or p.dtype != (dtype or p.dtype) for p in part.parameters()):
                part.to(device=device, dtype=dtype)
    if learned == present:  # then PEFT's wrapper around them stays, too
        return
    dropped = {slot: part for slot, part in present.items() if learned.get(slot) is not part}
    names = [f"{slot}.{name}" for slot, part in dropped.items() for name, _ in part.named_parameters()]
    values = (held(model, f"{layer.name}.longattn.{name}") for name in names)
    if any(p is not None and bool((p != START[n.rpartition(".")[2]]).any()) for n, p in zip(names, values, strict=True)):
        warn(
            f"dropping the trained parameters {', '.join(names)} of layer {module.layer_idx}: "
            "they belong to the method that is being replaced",
        )
    if present:
        if (plan := plan_of(module)) is not None and plan.state.plans is not None:
            plan.state.plans.parts.setdefault(module, present)
        del module.longattn
    if learned:
        module.longattn = LearnedParts(learned)
