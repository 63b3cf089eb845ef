"""The learned parts of methods. Whichever way a model is built and loaded, they start with the values that their own
constructors give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .method import SLOTS, Method, ModelFacts

#: Parts of a parameter's name that transformers and PEFT read as something else, and would not load again.
_TAKEN = ("lora_", "base_layer", "modules_to_save", "original_module", "weight_g", "weight_v", "LayerNorm.")


class LearnedParts(nn.Module):
    """The learned parts of one attention module, each under the name of its slot.

    Not a ModuleDict, which PEFT refuses in modules_to_save.

    Args:
        methods, facts: what makes them.
    """

    weight = None  # most of PEFT's tuners read it of what they unload

    def __init__(self, parts: Mapping[str, nn.Module], methods: Iterable[Method], facts: ModelFacts) -> None:
        super().__init__()
        self.made_of = tuple(methods), facts
        for slot, part in parts.items():
            self.add_module(slot, part)

    def start(self) -> dict[str, Tensor]:
        """The values that their parameters and buffers start with, by name, on the CPU."""
        with torch.device("cpu"):
            fresh = make_parts(*self.made_of)
        return {f"{slot}.{name}": x.detach() for slot, part in fresh.items() for name, x in tensors_of(part)}


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def make_parts(methods: Iterable[Method], facts: ModelFacts) -> dict[str, nn.Module]:
    """Make the learned parts of methods, by slot; ValueError where one cannot be learned, or not saved and loaded."""
    parts = {m.slot: part for m in methods if (part := m.module(facts)) is not None}
    for method in methods:
        if (part := parts.get(method.slot)) is not None:
            check_part(part, method, f"{method.name}: its module")
    return parts


def check_part(part: Any, method: Method, what: str) -> None:
    """Raise ValueError for a module that a method's slot never calls, or that cannot be learned, or not saved and loaded.

    Args:
        what: names it.
    """
    if not method.learns:
        raise ValueError(
            f"{what} would never be called, and learn nothing: among the base classes LengthTemperature, LogitMap, Sink and "
            "OutputNorm alone have learned parameters"
        )
    if not isinstance(part, nn.Module):
        raise ValueError(f"{what} must be a torch.nn.Module, got {type(part).__name__}")
    for name, x in tensors_of(part):
        if nn.parameter.is_lazy(x):
            raise ValueError(f"{what} has a parameter {name!r} whose shape is not known: make it with a shape")
        if isinstance(x, nn.Parameter) and not x.is_floating_point():
            raise ValueError(f"{what} has a parameter {name!r} of {x.dtype}, which cannot be learned: make it a buffer")
        if taken := next((word for word in _TAKEN if word in name), None):
            raise ValueError(
                f"{what} has a parameter {name!r}, and transformers or PEFT read {taken!r} in a name as something else, so it "
                "would not be loaded again: call it otherwise"
            )


def container_of(attention: Any) -> nn.Module | None:
    """Return the module that holds an attention module's learned parts, or PEFT's wrapper of that module; None: no parts."""
    held: nn.Module | None = attention._modules.get("longattn")  # by attribute an absent one would cost as much as a product
    return held


def learned_parts(attention: Any) -> dict[str, nn.Module]:
    """The learned parts of an attention module by slot; of the active adapter where PEFT has wrapped them."""
    container: Any = container_of(attention)
    if container is None:
        return {}
    plain = type(container) is LearnedParts
    parts = container._modules if plain else {slot: getattr(container, slot, None) for slot in SLOTS}
    return {slot: part for slot, part in parts.items() if part is not None}


def _all(parameter: Tensor) -> Tensor:
    return parameter


class HeadScale(nn.Module):
    """A learned factor per head on a row factor (batch, heads or 1, q_len)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, factor: Tensor, own: Callable[[Tensor], Tensor] = _all) -> Tensor:
        """`own` takes the part of a parameter that belongs to the heads at hand."""
        return factor * own(self.weight)[:, None]


class HeadShift(nn.Module):
    """A learned addend per head: (heads,) to the same."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor, own: Callable[[Tensor], Tensor] = _all) -> Tensor:
        return x + own(self.bias)


class FeatureAffine(nn.Module):
    """A learned weight and bias per feature: (batch, q_len, features) to the same."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor, own: Callable[[Tensor], Tensor] = _all, epsilon: float | None = None) -> Tensor:
        """`own` as above; with epsilon, x is normalised first, which is added to its variance."""
        weight, bias = own(self.weight), own(self.bias)
        if epsilon is None:
            return torch.addcmul(bias.to(x.dtype), x, weight.to(x.dtype))
        wide = torch.promote_types(x.dtype, weight.dtype)
        x, weight, bias = (y.to(wide) for y in (x, weight, bias))
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
