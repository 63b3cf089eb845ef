"""The parameters that methods bring into attention modules: put there, kept over a change, and known to accelerate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ..slots.learned import LearnedParts, learned_parts, make_parts, tensors_of
from ..slots.method import Method, ModelFacts
from ..user_warnings import warn
from .internals import is_initialised
from .layers import Layer, View
from .model_facts import facts_of_layer
from .offload import device_of, dtype_of, held, keep_learned
from .state import method_of


def attach_learned_parts(view: View, facts: ModelFacts) -> None:
    """Give the layers of a model the learned parts of the methods that they run."""
    for layer in view.of_target:
        config = method.config if (method := method_of(layer.module)) is not None else None
        attach(view.model, layer, () if config is None else config.methods, facts_of_layer(facts, layer))
    keep_learned(view)


@torch.inference_mode(False)  # parameters are trained later, wherever the method was put in
def attach(model: nn.Module, layer: Layer, methods: Sequence[Method], facts: ModelFacts | None = None) -> None:
    """Give an attention module the learned parts of these methods as `module.longattn`, keeping those that it has already.

    Warns if parameters are dropped that training has changed.
    """
    module = layer.module
    present, again = learned_parts(module), set[str]()
    learned = {} if facts is None else make_parts(methods, facts)
    for slot, part in learned.items():
        there = present.get(slot)
        if there is not None and type(there) is type(part) and _kind(there) == _kind(part):
            learned[slot] = there
            continue
        to_device(part, device_of(module, model), dtype_of(module))
        if there is not None and _kind(there) == _kind(part):  # its class was defined anew, in a notebook
            part.load_state_dict(there.state_dict())
            again.add(slot)
    if learned == present:  # then PEFT's wrapper around them stays, too
        return
    new = [method.name for method in methods if learned.get(method.slot) is not present.get(method.slot)]
    if new and any(isinstance(x, FSDPModule) for x in model.modules()):
        raise ValueError(
            f"{', '.join(new)} brings learned parameters, and fully_shard, called on the model before, would not keep "
            "them the same in all processes: apply the method first, then fully_shard"
        )
    dropped = {slot: part for slot, part in present.items() if learned.get(slot) is not part and slot not in again}
    names = [f"{slot}.{name}" for slot, part in dropped.items() for name, _ in part.named_parameters()]
    start = module.longattn.start() if dropped else {}
    values = {name: held(model, f"{layer.name}.longattn.{name}") for name in names}
    if any(x is not None and not torch.equal(_whole(x).cpu(), start[name].to(x.dtype)) for name, x in values.items()):
        warn(
            f"dropping the trained parameters {', '.join(names)} of layer {module.layer_idx}: "
            "they belong to the method that is being replaced",
        )
    if present:
        del module.longattn
    if learned:
        assert facts is not None
        module.longattn = LearnedParts(learned, methods, facts)


def _whole(x: Tensor) -> Tensor:
    """The values of a parameter, of which each process may hold a part."""
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def to_device(part: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move what is not there yet, as a module's own `to` would."""
    if any(x.device != device or (x.is_floating_point() and x.dtype != (dtype or x.dtype)) for _, x in tensors_of(part)):
        part.to(device=device, dtype=dtype)


def _kind(part: nn.Module) -> tuple[str, list[tuple[str, torch.Size]]]:
    """Return the kind of a learned part: two of a kind differ in their values alone."""
    return f"{type(part).__module__}.{type(part).__qualname__}", [(name, p.shape) for name, p in part.named_parameters()]


def initialise(original: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wraps what transformers calls for each module of a model that is built, or whose checkpoint lacks some of its values."""
    was = is_initialised(module)
    original(self, module, *args, **kwargs)
    if was or not isinstance(module, LearnedParts):
        return
    missing = {name: x for name, x in tensors_of(module) if not (x.is_meta or is_initialised(x))}
    start = module.start() if missing else {}
    with torch.no_grad():
        for name, x in missing.items():  # modules in it came before it, and were given what the model gives to their class
            x.copy_(distribute_tensor(start[name], x.device_mesh, x.placements) if isinstance(x, DTensor) else start[name])
