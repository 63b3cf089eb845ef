"""Finding a model's attention: its modules, what kind each is, their configs, and the facts a method binds to."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import ModelFacts
from .rotation import find_rotary


@dataclass(frozen=True)
class Layer:
    """One attention module of a model, as transformers calls it."""

    name: str
    module: Any

    @property
    def index(self) -> int:
        return int(self.module.layer_idx)

    @property
    def why_never(self) -> str | None:
        """Why no method can apply here, or None."""
        if getattr(self.module, "is_cross_attention", False):
            return "cross-attention"
        return None if getattr(self.module, "is_causal", True) else "not causal"

    @property
    def own_mask(self) -> bool:
        """Whether the module reads the mask itself, before attention gets it (Doge; the indexers of sparse attention)."""
        return any(getattr(self.module, name, None) is not None for name in ("prepare_dynamic_mask", "indexer"))

    @property
    def has_sinks(self) -> bool:
        """Whether a learned logit per head joins the softmax (`s_aux`)."""
        return getattr(self.module, "sinks", None) is not None

    @property
    def type(self) -> str | None:
        """The entry in the config's layer_types, if it has them."""
        types = getattr(self.module.config, "layer_types", None)
        return None if types is None else types[self.index]

    @property
    def windowed(self) -> bool:
        if self.type is not None:
            return self.type != "full_attention"
        return getattr(self.module.config, "sliding_window", None) is not None


def pretrained(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT, DDP or compile wrappers."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model")


def layers_of(model: nn.Module) -> Iterator[Layer]:
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if "ALL_ATTENTION_FUNCTIONS" in names and hasattr(module, "config"):
            yield Layer(name, module)


def all_configs(model: nn.Module) -> list[Any]:
    """The distinct config objects in a model: of submodels and of attention modules."""
    found = (getattr(m, "config", None) for m in model.modules())
    return list({id(c): c for c in found if isinstance(c, PreTrainedConfig)}.values())


def configs_of(model: nn.Module, *, causal: bool) -> list[Any]:
    """The distinct config objects of a model's attention modules, in order; only of causal ones if asked."""
    found = {id(x.module.config): x.module.config for x in layers_of(model) if not (causal and x.why_never)}
    return list(found.values())


def facts_of(model: nn.Module, config: Any, layers: list[Layer]) -> ModelFacts:
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    train = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    head_dim = int(getattr(layers[0].module, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return ModelFacts(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        value_dim=getattr(config, "v_head_dim", None) or head_dim,
        train_length=train,
        own_temperature=_own_temperature(config, rope),
        rope_type=rope.get("rope_type", "default") if find_rotary(model, config, layers[0].type) else None,
    )


def _own_temperature(config: Any, rope: dict[str, Any]) -> str | None:
    """The temperature that a model already applies to its scores, in words, or None."""
    if rope.get("rope_type") in ("yarn", "longrope") and rope.get("attention_factor") != 1.0:
        return f"{rope['rope_type']}'s attention factor"
    if getattr(config, "attn_temperature_tuning", False) or rope.get("llama_4_scaling_beta"):
        return "Llama 4's scaling of queries by position"
    return None
