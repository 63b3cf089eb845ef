"""A tiny random model with a config's own lengths, windows, rotation and order of layers: what holds for it holds for all."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..integration.internals import set_implementation
from ..integration.layers import language_config, with_parts

HEADS = 2
#: Sizes that no attention method asks for, by what configs call them: whole-name patterns, and what they become.
SIZES: tuple[tuple[str, int], ...] = (
    (r"\w*vocab_size(_per_layer_input)?", 97),
    (r"(\w+_)?intermediate_size(_mlp)?|ffn_dim|n_inner|(expert_)?ffn_hidden_size", 16),
    (r"(num|n_routed|num_local|moe_num)_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|n_group|topk_group|(n|num|moe_num)_shared_experts", 1),
    (r"kv_lora_rank|q_lora_rank|laurel_rank|hidden_size_per_layer_input", 8),
    (
        r"swa_num_attention_heads|(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_(key|value)_heads|(n_)?mamba_(n_|num_)?heads",
        HEADS,
    ),
    (r"mamba_n_groups|mamba_num_groups", 1),
    (r"\w*(pad|bos|eos)_token_id", 0),
)


def miniature(config: PreTrainedConfig) -> Any:
    """The causal language model of a config (of a composite one the text part), seeded, in float32 and evaluation mode.

    A text part that has no class of its own with a head (Qwen3-VL) comes without one.

    Raises:
        whatever building it raises, where a config does not fit together with other sizes.
    """
    small = copy.deepcopy(language_config(config))
    small.longattn = None
    set_implementation(small, None)
    head_dim, hidden, heads = (_global(small, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    width = HEADS * int(head_dim or hidden // heads)
    for part in with_parts(small):
        for name in [name for name in vars(part) if not name.startswith("_")]:
            _shrink(part, name, width)
        if _global(part, "hidden_size") is not None:
            part.hidden_size = width
    small.num_attention_heads = HEADS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = AutoModelForCausalLM if type(small) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
        return kind.from_config(small, dtype=torch.float32).eval()


def _global(config: PreTrainedConfig, name: str) -> Any:
    """A config's entry, or None; some differ by layer, and may not be read as attributes (Gemma 4)."""
    return vars(config).get(config.attribute_map.get(name, name))


def _shrink(config: PreTrainedConfig, name: str, width: int) -> None:
    value = vars(config)[name]
    few = [*SIZES, (r"mamba_(d_|num_)?head_?(dim)?", 2 * width // HEADS), (r"mamba_d_ssm", 2 * width)]
    size = next((size for pattern, size in few if re.fullmatch(pattern, name)), None)
    if size is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        setattr(config, name, min(value, size))
    elif isinstance(value, list) and all(isinstance(x, int) for x in value):  # one for each layer
        setattr(config, name, [min(x, size) for x in value])
