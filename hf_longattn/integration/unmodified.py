"""A model as it was before any method, for a while: the teacher of a distillation, the base of a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .masks import base_implementation
from .model import _configs, _pretrained
from .names import is_ours


@contextmanager
def unmodified(model: nn.Module, config: Any = None) -> Iterator[None]:
    """While open, a model runs the attention it has without a method, and the rotary encoding of `config` if given.

    Nothing is rebuilt: plans and learned parts wait until the end. An adapter is not turned off; PEFT's disable_adapter is.

    Args:
        config: the model's config before `hf_longattn.rope` changed it.
    """
    base = _pretrained(model)
    ours = {id(c): c for c in (*_configs(base, causal=False), base.config)}.values()
    saved = [(c, c._attn_implementation) for c in ours if is_ours(c._attn_implementation)]
    turned: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for c, _ in saved:
            c._attn_implementation_internal = base_implementation(c)
        for parent, name, rotary in [] if config is None else _rotaries(base):
            fresh = type(rotary)(config=config.get_text_config()).to(next(rotary.buffers()).device)
            setattr(parent, name, fresh)
            turned.append((parent, name, rotary))
        yield
    finally:
        for c, implementation in saved:
            c._attn_implementation_internal = implementation
        for parent, name, rotary in turned:
            setattr(parent, name, rotary)


def _rotaries(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if any(buffer.endswith("inv_freq") for buffer, _ in child.named_buffers(recurse=False)) and hasattr(child, "config")
    ]
