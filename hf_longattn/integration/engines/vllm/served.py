"""Methods of a served model's attention layers, decided on an empty model as Transformers would build it."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from vllm.config import CompilationConfig, CompilationMode, set_current_vllm_config

from ....config import LongAttnConfig
from ....core.tables import TableCache
from ...layers import Layer, candidates_of, layers_of
from ...model import apply
from ...names import SERVED, is_longattn_name, short
from ...rotation import RotarySource
from ...state import LayerMethod, method_of, set_method
from ...trained_length import ORIGINAL, rope_settings
from ...verify import NOT_ROTATED, unrotated

#: Under this name an attention module of vLLM's model holds its `ServedLayer`.
PART = "_longattn"
#: Kinds of layers that vLLM's Transformers backend tells apart.
LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, eq=False)
class ServedLayer:
    """The method of one attention layer, for the heads that this process has.

    Args:
        learned: the learned parts of its methods, by slot.
        rotary: how the layer rotates, where its config remaps that.
        tables: the model's.
        folds: whether `fold` computes it; else `backend`.
    """

    config: LongAttnConfig
    learned: dict[str, Any]
    rotary: RotarySource | None
    tables: TableCache
    folds: bool


def is_served(config: Any) -> bool:
    """Tell whether a config that vLLM has read is that of a checkpoint with a method."""
    text = config.get_text_config()
    name = getattr(text, "_attn_implementation", None)
    return is_longattn_name(name) or (name in SERVED and bool(getattr(text, "longattn", None)))


def config_of(config: Any) -> LongAttnConfig:
    """The method of a checkpoint."""
    text = config.get_text_config()
    name = text._attn_implementation
    return LongAttnConfig.parse(short(name) if is_longattn_name(name) else "longattn", text.longattn)


def served_methods(vllm_config: Any) -> dict[str, tuple[LayerMethod, nn.Module | None]]:
    """The method of every attention module by its name in the model, and its learned parts, on the meta device.

    Args:
        vllm_config: vLLM's, of everything.

    Raises:
        ValueError: the method does not fit the model, or vLLM cannot serve it, by name.
    """
    model_config = vllm_config.model_config
    config = copy.deepcopy(model_config.hf_config)
    uncompiled = copy.copy(vllm_config)  # classes that vLLM has built before ask for it
    uncompiled.compilation_config = CompilationConfig(mode=CompilationMode.NONE)
    with set_current_vllm_config(uncompiled):
        with torch.inference_mode(False), torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=model_config.trust_remote_code)
        layers = candidates_of(model)
        _refuse(model_config, model, layers)
        remapped = [x for x in layers if (method := method_of(x.module)) is not None and method.rotary is not None]
        if remapped:
            _rotate_as_small_model(config.get_text_config(), remapped)
    methods = {
        x.name: (method, getattr(x.module, "longattn", None)) for x in layers_of(model) if (method := method_of(x.module))
    }
    model_config.hf_config.get_text_config().longattn = layers[0].module.config.longattn  # bound, for `is_served` later
    return methods


def _refuse(model_config: Any, model: nn.Module, layers: list[Layer]) -> None:
    """Raise for models that vLLM would compute otherwise than transformers does."""
    text = model_config.hf_text_config
    known = [method for x in layers if (method := method_of(x.module)) is not None and method.config is not None]
    methods = known[0].config
    assert methods is not None
    narrow = methods.output_norm is not None and getattr(text, "v_head_dim", None) not in (None, text.head_dim)
    remaps = any(method.rotary is not None for method in known)
    kinds = set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES
    border = min((_border(text, x.type) for x in layers), default=math.inf)
    unfit = {
        "latent attention as vLLM computes it (set VLLM_MLA_DISABLE=1)": model_config.use_mla,
        "an output norm over values narrower than keys": narrow,
        f"layers of the kinds {sorted(kinds)}": bool(kinds),
        "M-RoPE under a remap": remaps and model_config.uses_mrope,
        f"rotations that change where a text grows beyond {border:.0f} tokens, and would for all requests of a step (set "
        f"max_model_len={border:.0f})": model_config.max_model_len > border,
    }
    if named := [name for name, value in unfit.items() if value]:
        raise ValueError(f"{methods.name} cannot be served in vLLM on {type(model).__name__}, which has {', '.join(named)}")


def _border(text: Any, layer_type: str | None) -> float:
    """Up to how many tokens layers of a type rotate by one and the same frequencies."""
    rope = rope_settings(text, layer_type)
    kind = rope.get("rope_type")
    if kind == "longrope" and rope["short_factor"] != rope["long_factor"]:
        return float(rope[ORIGINAL])
    return float(text.max_position_embeddings) if kind == "dynamic" else math.inf


def _rotate_as_small_model(text: Any, remapped: list[Layer]) -> None:
    """Give the remapped layers of an empty model the rotation that a small one of its kind shows."""
    small = _small(text)
    with torch.inference_mode(False), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            twin = AutoModel.from_config(small, dtype=torch.float32, attn_implementation="eager")
        except Exception as error:
            raise ValueError(f"cannot build a small {type(text).__name__} to see how it rotates: {error}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a method that is not the checkpoint's
            rerope = LongAttnConfig.preset("rerope", window=1, stack=True, layers=tuple(x.index for x in remapped))
            layers = {x.index: method_of(x.module) for x in candidates_of(apply(twin, rerope))}
    alone: dict[RotarySource, dict[nn.Module, LayerMethod]] = {}
    for layer in remapped:
        seen, method = layers[layer.index], method_of(layer.module)
        assert seen is not None
        assert method is not None
        assert method.rotary is not None
        if seen.reason == NOT_ROTATED:
            alone.setdefault(method.rotary, {})[layer.module] = method
        else:
            assert seen.rotary is not None
            method.rotary.convention = seen.rotary.convention
    for source, still in alone.items():
        for module, own in unrotated(source, still).items():
            set_method(module, own)


def _small(text: Any) -> Any:
    """The config of a model that rotates as this one does, in as many layers, of a few million weights."""
    settings = text.to_dict()
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    small: dict[str, Any] = {key: 16 for key, value in settings.items() if key.endswith("intermediate_size") and value}
    small |= {"vocab_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 2 * head_dim}
    small |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "longattn", "attn_implementation"))
    small = {key: value for key, value in small.items() if key in settings or value is None}
    if "quantization_config" in settings:
        small["quantization_config"] = None
    return type(text).from_dict(settings | small)
