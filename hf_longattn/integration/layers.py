"""Finding a model's attention: its modules, what kind each is, and their configs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .trained import hides

#: What the types in a config's layer_types say: all keys before the query are seen, or a window of them.
_KINDS = {
    "full_attention": "full",
    "hybrid": "full",  # beside a recurrent mixer in the same layer
    "sliding_attention": "window",
    "chunked_attention": "window",
    "hybrid_sliding": "window",
    "window_attention": "window",
}


@dataclass(frozen=True)
class Layer:
    """One attention module of a model, as transformers calls it."""

    name: str
    module: Any

    @property
    def index(self) -> int:
        """Its number; of modules that do not know theirs (Zamba) the one in the name."""
        own = self.module.layer_idx
        return int(own) if own is not None else next(int(part) for part in self.name.split(".") if part.isdigit())

    @property
    def why_never(self) -> str | None:
        """Why no method can apply here, or None."""
        if getattr(self.module, "is_cross_attention", False) or "cross_attention_states" in _code(self.module).co_varnames:
            return "cross-attention"
        if not hasattr(self.module, "layer_idx"):
            return "not causal"  # no KV cache: towers whose is_causal says nothing
        return None if getattr(self.module, "is_causal", True) else "not causal"

    @property
    def own_mask(self) -> bool:
        """Whether the module reads the mask itself, before attention gets it (Doge; the indexers of sparse attention)."""
        return any(getattr(self.module, name, None) is not None for name in ("prepare_dynamic_mask", "indexer"))

    @property
    def refusal(self) -> str | None:
        """What its softmax does that no method computes, or None."""
        if _passes(self.module, "position_bias"):
            return "a learned bias (position_bias) joins their logits"
        if self.kind not in ("full", "window"):
            return f"the config calls their attention {self.kind!r}, which is not known to see all keys or a window of them"
        return None

    @property
    def type(self) -> str | None:
        """The entry in the config's layer_types, if it has them."""
        types = getattr(self.module.config, "layer_types", None)
        return None if types is None or self.why_never else types[self.index]

    @property
    def kind(self) -> str:
        """ "full", "window", or a layer type that stands for neither; a window that hides nothing is none."""
        if self.windowed:
            return "window" if hides(self.module.config) else "full"
        return "full" if self.type is None else _KINDS.get(self.type, self.type)

    @property
    def windowed(self) -> bool:
        """Whether it has a window at all, which its calls announce."""
        if self.type is not None:
            return _KINDS.get(self.type) == "window"
        return getattr(self.module.config, "sliding_window", None) is not None

    @property
    def why_not(self) -> str | None:
        """Why `layers="full_attention"` leaves it alone, or None."""
        return self.why_never or {"full": None, "window": "sliding window"}.get(self.kind, self.kind)


def pretrained(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT, DDP or compile wrappers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"this takes a model, got {model!r}")
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model")


def layers_of(model: nn.Module) -> Iterator[Layer]:
    for name, module in model.named_modules():
        if hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in getattr(_code(module), "co_names", ()):
            yield Layer(name, module)


def bodies_of(model: nn.Module) -> list[PreTrainedModel]:
    """The models inside a model that hold all of its attention: what its head reads the output of, and what that one calls."""
    attention = {x.module for x in layers_of(model)}
    inside = (m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel))
    return [m for m in inside if attention <= set(m.modules())]


def innermost(model: PreTrainedModel) -> PreTrainedModel:
    """The innermost model around the language model's attention: without heads and towers, it is given all positions."""
    modules = {x.module for x in candidates_of(model)}
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and modules <= set(m.modules())][-1]


def _code(module: nn.Module) -> Any:
    """The code of a module's forward function."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _passes(module: nn.Module, argument: str) -> bool:
    """Whether a module's forward function hands on something under this name."""
    return any(argument == c or (isinstance(c, tuple) and argument in c) for c in _code(module).co_consts)


def all_configs(model: nn.Module) -> list[Any]:
    """The distinct config objects in a model: of submodels and of attention modules."""
    result = (getattr(m, "config", None) for m in model.modules())
    return list({id(c): c for c in result if isinstance(c, PreTrainedConfig)}.values())


def candidates_of(model: PreTrainedModel) -> list[Layer]:
    """The layers that a method may go into: the causal self-attention of the language model; all share one config object.

    Other causal parts (speech codecs, talkers) are left alone. Empty where none of several parts is the language model.
    """
    result = [x for x in layers_of(model) if not x.why_never]
    text = language_config(model.config)
    named = [x for x in result if x.module.config is text]
    return named or (result if len({id(x.module.config) for x in result}) == 1 else [])


def language_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a composite model's language model; of any other model its own."""
    if not config.sub_configs:
        return config
    try:
        return config.get_text_config()
    except ValueError:  # a text encoder beside a decoder (MusicGen): only the decoder is causal
        return getattr(config, "decoder", config)
