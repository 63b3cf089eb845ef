"""Parameters that accelerate keeps elsewhere until a module is called, and that are on the meta device meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..slots.learned import container_of, tensors_of
from .internals import placing_hooks
from .layers import View


def _hooks_of(model: nn.Module, name: str) -> Iterator[tuple[Any, str]]:
    """Find accelerate's hooks that place a parameter, on its module or one around it; each with its name for the parameter."""
    path, module = name.split("."), model
    for depth in range(len(path)):
        for hook in placing_hooks(module):
            if hook.place_submodules or depth == len(path) - 1:
                yield hook, ".".join(path[depth:])
        if depth < len(path) - 1:
            module = module.get_submodule(path[depth])


def is_empty(model: nn.Module) -> bool:
    """Tell whether a model has no weights: it is being built, or described, on the meta device."""
    return any(p.is_meta for p in model.parameters()) and not any(map(placing_hooks, model.modules()))


def refuse_to_save(model: nn.Module) -> None:
    """Raise ValueError for a model whose weights are offloaded so that transformers cannot save them."""
    if any(p.is_meta for p in model.parameters()) and not getattr(model, "hf_device_map", None):
        raise ValueError(
            "the model's weights are offloaded (accelerate.cpu_offload, disk_offload), and transformers cannot save them so: "
            "accelerate.hooks.remove_hook_from_submodules(model) brings them back"
        )


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that a module computes in, by its tensors beside quantised weights; None: they do not show it."""
    return next((x.dtype for _, x in tensors_of(module) if x.is_floating_point() and x.dtype.itemsize > 1), None)


def device_of(module: nn.Module, model: nn.Module) -> torch.device:
    """Return the device of a module's weights when it is called; of a module without weights, its model's."""
    own = next(itertools.chain(tensors_of(module), tensors_of(model)))[1].device  # packed weights may be buffers
    hooks = (hook for m in module.modules() for hook in placing_hooks(m)) if own.type == "meta" else ()
    return next((torch.device(x.execution_device) for x in hooks if x.execution_device is not None), own)


def held(model: nn.Module, name: str) -> Tensor | None:
    """Return the values of a parameter, wherever they are kept; None: it has none."""
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        return parameter
    maps = ((hook.weights_map, own) for hook, own in _hooks_of(model, name) if hook.offload and hook.weights_map is not None)
    return next((kept[own] for kept, own in maps if own in kept), None)


def keep_learned(view: View) -> None:
    """Let accelerate know learned parts, which came after it offloaded the model or which no checkpoint holds."""
    for layer in view.layers:
        if (parts := container_of(layer.module)) is not None:
            for name, _ in parts.named_parameters():
                _keep(view.model, f"{layer.name}.longattn.{name}", parts, name)


def _keep(model: nn.Module, name: str, parts: Any, own_name: str) -> None:
    """Add a learned parameter to the weights that accelerate keeps, with its initial value if it has none yet."""
    parameter = model.get_parameter(name)
    for hook, own in ((hook, own) for hook, own in _hooks_of(model, name) if hook.offload):
        if own not in hook.weights_map:
            start = parts.start() if parameter.is_meta else {}  # by names that PEFT's wrapper puts its own before
            value = next((x for key, x in start.items() if own_name.endswith(key)), parameter.detach())
            _put(hook.weights_map, own, value.to("cpu", parameter.dtype))
            hook.original_devices[own] = torch.device("cpu")


def _put(kept: Any, name: str, value: Tensor) -> None:
    """Add a parameter to one of accelerate's maps, which can only be read."""
    if hasattr(kept, "prefix"):
        _put(kept.dataset, kept.prefix + name, value)
    elif hasattr(kept, "all_keys"):
        kept.state_dict[name] = value
        kept.all_keys.append(name)
    else:
        kept[name] = value
