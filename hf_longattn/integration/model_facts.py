"""Facts about a model for its methods: shape, trained length, rotation, and its own temperature."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ..slots.method import ModelFacts
from .layers import Layer, View
from .rope import check_built
from .rotation import find_rotary
from .trained_length import ORIGINAL, rope_settings, trained

#: What models call the norm of their queries, inside an attention module.
QUERY_NORMS = ("q_norm", "q_layernorm", "q_layer_norm", "query_layernorm", "qk_norm")


def facts_of(view: View, layers: list[Layer], train_length: int | None) -> ModelFacts:
    """Return the facts about these layers of a model; train_length: its trained length as the user knows it.

    ValueError: its config has rotary settings that it does not rotate by.
    """
    check_built(view.model)
    config = layers[0].config
    read = {kind: trained(config, kind, train_length) for kind in dict.fromkeys(x.type for x in layers)}
    # of several types the one under which remaps are refused, or the full one
    kind, known = min(read.items(), key=lambda x: (x[1].rotation_is_own, x[0] != "full_attention"))
    rope = rope_settings(config, kind)
    own, heads = _layer_config(layers[0]), num_heads(layers[0])
    return ModelFacts(
        num_layers=num_layers(config),
        num_heads=heads,
        num_kv_heads=_first(own, "decoder_num_key_value_heads", "num_key_value_heads") or heads,
        head_dim=_head_dim(layers[0]),
        value_dim=_value_dim(layers[0]),
        train_length=known.length,
        train_length_source=known.source,
        assumed=known.assumed,
        rotation_is_own=known.rotation_is_own,
        own_temperature=own_temperature(view, layers),
        rope_type=rope.get("rope_type", "default") if find_rotary(view.modules, config, kind) else None,
        qk_norm=any(_normalises(layer.module) for layer in layers),
    )


def facts_of_layer(facts: ModelFacts, layer: Layer) -> ModelFacts:
    """Return a model's facts with the shape of one of its layers, in which layers may differ."""
    return dataclasses.replace(facts, num_heads=num_heads(layer), value_dim=_value_dim(layer))


def inner_size(config: Any) -> int:
    """The features inside a feed-forward layer, of the widest where layers differ."""
    inner = getattr(config, "intermediate_size", None) or 4 * int(config.hidden_size)  # GPT-2 names none
    return max(inner) if isinstance(inner, (list, tuple)) else int(inner)


def num_layers(config: Any) -> int:
    """Return the number of layers that generate text: of an encoder-decoder, whose `num_hidden_layers` is its encoder's."""
    return int(_first(config, "decoder_layers", "decoder_num_hidden_layers", "num_decoder_layers", "num_hidden_layers"))


def num_heads(layer: Layer) -> int:
    """Return the number of query heads of a layer, of all processes that share it."""
    if (by_layer := getattr(layer.config, "num_attention_heads_per_layer", None)) is not None:
        return int(by_layer[layer.index])
    names = ("decoder_attention_heads", "decoder_num_attention_heads", "num_attention_heads")
    return int(_first(_layer_config(layer), *names))


def _layer_config(layer: Layer) -> Any:
    """Return the config of one layer where layers differ in their settings, which the whole config then refuses to say."""
    config = layer.config
    return config.per_layer_config[layer.index] if getattr(config, "is_heterogeneous", False) else config


def _first(config: Any, *names: str) -> Any:
    """Return the first of these settings that a config has; None: it has none."""
    return next((x for name in names if (x := getattr(config, name, None)) is not None), None)


def _normalises(attention: nn.Module) -> bool:
    """Tell whether an attention module has a norm over its queries (and keys), by the names that models give it."""
    return any(
        isinstance(part, nn.Module) and not isinstance(part, nn.Identity)
        for part in (getattr(attention, name, None) for name in QUERY_NORMS)
    )


def own_temperature(view: View, layers: list[Layer]) -> str | None:
    """Describe the temperature that a model itself applies to the scores of these layers; None: it applies none.

    It is in their queries and keys when attention gets them, so it goes by true positions p under every remap.
    """
    config, found = layers[0].config, list[str]()
    for layer in {x.type: x for x in layers}.values():
        rope, rotary, module = rope_settings(config, layer.type), find_rotary(view.modules, config, layer.type), layer.module
        turned = 1.0 if rotary is None else getattr(rotary.module, rotary.buffer.replace("inv_freq", "attention_scaling"), 1.0)
        # DeepSeek's models have it in their scaling
        plain = not rope.get("mscale_all_dim") or module.scaling == getattr(module, "qk_head_dim", _head_dim(layer)) ** -0.5
        if turned != 1 or not plain:
            found.append(f"{rope['rope_type']}'s attention factor")
        if beta := rope.get("llama_4_scaling_beta"):
            found.append(f"1 + {beta:g} ln(1 + floor(p / {rope[ORIGINAL]:,}))")
    if getattr(config, "attn_temperature_tuning", False):
        factor = f"1 + {config.attn_scale:g} ln(1 + floor((p + 1) / {config.floor_scale:,.0f}))"
        found.append(f"{factor} in layers that do not rotate")
    if floor := getattr(config, "log_scaling_n_floor", None):
        found.append(f"1 + {config.log_scaling_alpha:g} ln(max((p + 1) / {floor:,}, 1))")
    if any(hasattr(x.module, "softmax_scaling") for x in layers):
        found.append("s ln(p + 1) + b, learned for each head")
    return " and ".join(dict.fromkeys(found)) or None


def _head_dim(layer: Layer) -> int:
    own, config = getattr(layer.module, "head_dim", None), _layer_config(layer)
    return int(own or config.hidden_size // config.num_attention_heads)


def _value_dim(layer: Layer) -> int:
    return int(getattr(_layer_config(layer), "v_head_dim", None) or _head_dim(layer))
