"""Methods that fold into query and key, on vLLM's Transformers backend. Tested against a stand-in only: vLLM has not run here.

The entry point `vllm.general_plugins` calls `register` in every process of vLLM. From then on a checkpoint of ours, whatever
it names as its architecture, goes to `LongAttnForCausalLM`: vLLM's own TransformersForCausalLM, whose attention function is
wrapped. A row at position p sees p + 1 keys; score, length temperature and output norm need to know no more. Everything
else is refused by name when the model is built.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...attention.reference import finish, length_factor
from ...config import LongAttnConfig
from ...methods.base import EntropyTemperature
from ...methods.learned import LearnedParts, learned_parts
from ..layers import candidates_of
from ..names import TRIPWIRE, is_ours, short
from ..planning import facts_of

NAME = "vllm"


def register() -> None:
    """Register our classes with vLLM and wrap its attention function; called by vLLM."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import transformers as _  # noqa: F401  # registers the function that is wrapped

    from ..seams import wrap

    if hasattr(ALL_ATTENTION_FUNCTIONS[NAME], "__wrapped__"):
        return  # vLLM may call it again
    for name in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        ModelRegistry.register_model(TRIPWIRE + name, f"{__name__}:LongAttnForCausalLM")
    wrap(PreTrainedConfig, "from_dict", _from_dict)
    ALL_ATTENTION_FUNCTIONS[NAME] = attention(ALL_ATTENTION_FUNCTIONS[NAME])


def __getattr__(name: str) -> Any:
    if name != "LongAttnForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.model_executor.models.transformers import TransformersForCausalLM

    class LongAttnForCausalLM(TransformersForCausalLM):
        """vLLM's Transformers backend, with the method of the checkpoint in its attention."""

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            text = vllm_config.model_config.hf_config.get_text_config()
            config = LongAttnConfig.parse(short(text._attn_implementation), text.longattn)  # before it becomes "vllm"
            with warnings.catch_warnings():  # of a section whose method transformers does not run
                warnings.filterwarnings("ignore", "config.longattn is set")
                super().__init__(vllm_config=vllm_config, prefix=prefix)
            attach(self.model, config)

    globals()[name] = LongAttnForCausalLM
    return LongAttnForCausalLM


def _from_dict(original: Callable[..., Any], cls: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """Checkpoints that were not saved strictly name a class that vLLM runs natively, without the method."""
    out = original(cls, config_dict, **kwargs)
    config = out[0] if isinstance(out, tuple) else out
    if is_ours(config.get_text_config()._attn_implementation):
        config.architectures = [TRIPWIRE + name.removeprefix(TRIPWIRE) for name in config.architectures or ()]
    return out


def attach(model: Any, config: LongAttnConfig) -> None:
    """Give every attention module its config, and learned parts for the weights that are loaded next.

    Raises:
        NotImplementedError: the method changes more than query, key and output.
    """
    entropy = config.temperature if isinstance(config.temperature, EntropyTemperature) else None
    changes_more = [
        m.name for m in (config.positions, entropy, config.logit_map, config.visibility, config.sink) if m is not None
    ]
    layers = candidates_of(model)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        changes_more.append("a softcap of the model's own")
    if changes_more:
        raise NotImplementedError(
            f"{' and '.join(changes_more)} cannot run in vLLM: its kernels compute softmax(scaling q . k) alone, so methods "
            "must fold into query and key (temperatures by length, cosscale, output norms). Serve it "
            "with `hf-longattn run -- transformers serve`"
        )
    facts = facts_of(model, layers)
    bound = config.bind(facts)
    for layer in layers:
        chosen = config.layers == "all" or (config.layers == "full_attention" and not layer.why_not)
        if not chosen and (isinstance(config.layers, str) or layer.index not in config.layers):
            layer.module.longattn_vllm = LongAttnConfig()
            continue
        layer.module.longattn_vllm = bound.for_layer(layer.index)
        parts = {m.slot: part for m in bound.methods if hasattr(m, "module") and (part := m.module(facts)) is not None}
        if parts:
            like = next(layer.module.parameters())
            layer.module.longattn = LearnedParts(parts).to(device=like.device, dtype=torch.get_default_dtype())


def attention(original: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """vLLM's attention function with the method of each layer around it."""

    @functools.wraps(original)
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        config: LongAttnConfig | None = module.__dict__.get("longattn_vllm")
        if config is None and getattr(module.config, "longattn", None):
            raise ValueError("config.longattn names a method, and this model was not built by hf_longattn's class for vLLM")
        if config is None or not config.methods:
            return original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        heads, scale = query.shape[1], query.shape[-1] ** -0.5 if scaling is None else scaling
        if heads != module.config.num_attention_heads and any(m.head_dependent for m in config.methods):  # type: ignore[union-attr]
            raise NotImplementedError(f"{config.name} has parameters per head, and vLLM splits heads over GPUs: use one GPU")
        positions, learned = kwargs.get("position_ids"), learned_parts(module)
        if config.score is not None:
            query, key, own = config.score.fold(query, key)
            query = query * (own / scale)
        if config.temperature is not None:
            if positions is None or positions.ndim != 2:
                raise NotImplementedError(f"{config.name} needs position_ids (batch, tokens), which did not arrive")
            factor = length_factor(config, positions[:, None] + 1, query, learned)
            assert factor is not None
            query = (query * factor[..., None]).to(key.dtype)
        out, weights = original(module, query, key, value, attention_mask, scaling=scale, **kwargs)
        split = out.reshape(len(query), query.shape[2], heads, -1).transpose(1, 2)  # vLLM's is (tokens, heads * head_dim)
        return finish(config, split, learned).transpose(1, 2).reshape(out.shape), weights

    return forward
