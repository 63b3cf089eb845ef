"""The attention that a model had before its method: what runs it, and the mask that it takes."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .config_records import Before
from .internals import is_of_transformers


class BaseAttention:
    """The attention that a model had before its method, which a call runs where the method changes nothing.

    Args:
        implementation: the attention's name in Transformers.
        arguments: those that `layout_mask` was called with, which the attention's own mask function takes too.
    """

    def __init__(self, implementation: str, arguments: dict[str, Any]) -> None:
        self.implementation, self.arguments = implementation, arguments
        self._functions: dict[type, Any] = {}
        self._masks: dict[torch.device, Any] = {}

    def mask(self, device: torch.device) -> Any:
        """The mask that the attention takes, made once for all layers of a device."""
        if device not in self._masks:
            self._masks[device] = self._made if self._made is None else self._made.to(device)
        return self._masks[device]

    @functools.cached_property
    def _made(self) -> Any:
        return ALL_MASK_ATTENTION_FUNCTIONS[self.implementation](**self.arguments)

    def function(self, module: Any) -> Any:
        """The function that computes the attention in a module."""
        if (found := self._functions.get(type(module))) is None:
            found = self._functions[type(module)] = attention_function(self.implementation, module)
        return found


def attention_function(name: str, module: Any) -> Any:
    """One of transformers' attention functions by its name; "eager" is the one in the module's own file."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def is_masked_by_transformers(name: str) -> bool:
    """Tell whether Transformers makes an attention's masks: its functions take None for a 2-D mask that hides nothing."""
    return is_of_transformers(ALL_MASK_ATTENTION_FUNCTIONS.get(name))


def own_implementation(known: Before | None) -> str:
    """Return the attention that a model would run without a method.

    Args:
        known: the record of its config; None: no method came.
    """
    if known is None or known.implementation in ("sdpa", "eager"):
        return base_implementation(known)  # sdpa would drop a softcap
    return known.implementation


def base_implementation(known: Before | None) -> str:
    """Return the attention of layers that a method leaves alone: sdpa or eager, into whose masks ours can be turned.

    The mask function and the attention function both ask here.

    Args:
        known: as above.
    """
    return "sdpa" if known is None else known.base
