"""vLLM's Transformers classes, with the method of the checkpoint in their attention layers."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import transformers as backends

from ....config import NO_METHOD, TRIPWIRE, LongAttnConfig
from ....core.tables import TableCache
from ....slots.learned import learned_parts
from ....slots.method import Heads
from ...layers import layers_of
from ...offload import device_of
from ...rotation import RotarySource, find_rotary
from ...state import TABLE_BYTES, LayerMethod
from ...trained_length import CHANGING
from . import fold, served, unfit
from .backend import Backend, Implementation
from .served import PART, ServedLayer


class Served:
    """In front of one of vLLM's classes: methods are decided before it is built, and go into its layers afterwards."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        methods = served.served_methods(vllm_config)
        folds = all(method.config is None or fold.folds(method.config) for method, _ in methods.values())
        softcap = getattr(model_config.hf_text_config, "attn_logit_softcapping", None)
        self.__dict__["folds"] = folds and not softcap and not model_config.uses_mrope
        with warnings.catch_warnings():  # of a section whose method transformers does not run
            warnings.filterwarnings("ignore", "config.longattn is set")
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        attach(self.model, methods, self.__dict__["folds"])  # type: ignore[attr-defined]

    def _get_attn_cls(self) -> Any:
        own = super()._get_attn_cls()  # type: ignore[misc]
        if self.__dict__["folds"]:
            return own
        if own is not Attention:
            raise NotImplementedError(f"hf_longattn serves vLLM's Attention layers, and this model has {own.__name__}")
        return functools.partial(Attention, attn_backend=Backend)


def __getattr__(name: str) -> Any:
    base = getattr(backends, name.removeprefix(TRIPWIRE), None)
    if not name.startswith(TRIPWIRE) or base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # vLLM knows its Transformers backend by the names of the classes
    globals()[name] = type(base.__name__, (Served, base), {"__module__": __name__, "__qualname__": name})
    return globals()[name]


def attach(model: Any, methods: Mapping[str, tuple[LayerMethod, nn.Module | None]], folds: bool) -> None:
    """Give every attention module its part, and learned parts for the weights that are loaded next."""
    _hold_frequencies(model)
    tables = TableCache(TABLE_BYTES)
    sources: dict[RotarySource, RotarySource] = {}
    for layer in layers_of(model):
        if layer.name not in methods:
            continue
        method, parts = methods[layer.name]
        config = NO_METHOD if method.config is None else method.config
        if parts is not None:
            device = device_of(layer.module, model)
            layer.module.longattn = copy.deepcopy(parts).to(torch.get_default_dtype()).to_empty(device=device)
        rotary = method.rotary
        if rotary is not None and rotary not in sources:
            found = find_rotary(model.modules(), layer.module.config, layer.type)
            assert found is not None
            sources[rotary] = RotarySource(found.module, found.buffer, rotary.convention, rotary.still)
        config, learned = of_these_heads(config, learned_parts(layer.module), layer.module)
        part = ServedLayer(config, learned, None if rotary is None else sources[rotary], tables, folds)
        layer.module.__dict__[PART] = part
        if folds:
            continue
        if not isinstance(impl := layer.module.attn.impl, Implementation):
            raise NotImplementedError(unfit(f"{layer.name} would run {type(impl).__name__}, without its method"))
        impl.part = part


def _hold_frequencies(model: nn.Module) -> None:
    """Keep the frequencies that a model was built with: `served_methods` refuses lengths at which they would change.

    Before Transformers 5.24 rotary modules branch on the length of each call, which a compiled graph cannot follow.
    """
    for module in model.modules():
        kinds: Any = vars(module).get("rope_type")
        if isinstance(kinds, dict):
            vars(module)["rope_type"] = {layers: "default" if kind in CHANGING else kind for layers, kind in kinds.items()}
        elif kinds in CHANGING:
            vars(module)["rope_type"] = "default"


def of_these_heads(
    config: LongAttnConfig, learned: dict[str, nn.Module], module: Any
) -> tuple[LongAttnConfig, dict[str, Any]]:
    """A layer's config and learned parts as this process's heads use them."""
    count, of = module.attn.num_heads, module.config.num_attention_heads
    if count == of:
        return config, learned
    heads = Heads(get_tensor_model_parallel_rank() * count, count, of, functools.partial(_mean, of // count))
    return config.for_heads(heads), {slot: functools.partial(part, own=heads.own) for slot, part in learned.items()}


def _mean(processes: int, x: Tensor) -> Tensor:
    return tensor_model_parallel_all_reduce(x.clone()) / processes  # on a CPU it sums in place
