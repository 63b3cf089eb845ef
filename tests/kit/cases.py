"""What the exactness tests run: every method (CASES) and every model family (FAMILIES), crossed with every scenario.

A new method joins by one line in CASES. All families have the same number of layers and heads, so that parameters
given per layer and head fit every one of them.
"""

from __future__ import annotations

import math
from typing import Any

import transformers
from transformers import PreTrainedConfig

from hf_longattn import LongAttnConfig

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW = 4, 4, 2, 8, 97, 8

MEAN = [[0.5 * layer - 0.3 * head for head in range(HEADS)] for layer in range(LAYERS)]
VARIANCE = [[1.0 + 0.5 * layer + 0.25 * head for head in range(HEADS)] for layer in range(LAYERS)]

CASES: dict[str, LongAttnConfig] = {
    "scale_invariant": LongAttnConfig.preset("scale_invariant"),
    "sinks": LongAttnConfig.preset("scale_invariant", tau=3.0, sink_tokens=2),
    "paper_form": LongAttnConfig.preset("scale_invariant", alpha=0.8, beta=1.9, tau=2.0),
    "calibrated": LongAttnConfig.preset(
        "scale_invariant", logit_mean=MEAN, logit_variance=VARIANCE, decay=0.7, tau=2.0, sink_tokens=1
    ),
    "strength": LongAttnConfig.preset("scale_invariant", strength=0.5, tau=1.0),
    "alibi": LongAttnConfig.preset("alibi"),
    "infoscale": LongAttnConfig.preset("infoscale", train_length=4, epsilon=0.2, clamp=False),
    "logn": LongAttnConfig.preset("logn", train_length=5),
    "ssmax": LongAttnConfig.preset("ssmax", train_length=5, scale=0.6, exponent=1.5, clamp=False),
    "logn_learned": LongAttnConfig.preset("logn", train_length=5, learned=True),
    "log_length": LongAttnConfig.preset("log_length"),
    "softmax_plus": LongAttnConfig.preset("softmax_plus", train_length=4),
    "yarn_temperature": LongAttnConfig.preset("yarn_temperature", train_length=100, clamp=False),
    "cosscale": LongAttnConfig.preset("cosscale", scale=6.0),
    "adaptive_temperature": LongAttnConfig.preset("adaptive_temperature"),
    "adaptive_saturated": LongAttnConfig.preset(
        "adaptive_temperature", coefficients=[-1.0, 3.0, 0.5], threshold=0.2, beyond="saturate"
    ),
    "attention_sink": LongAttnConfig.preset("attention_sink", logit=MEAN),
    "attention_sink_learned": LongAttnConfig.preset("attention_sink", logit=0.5, learned=True),
    "output_standardise": LongAttnConfig.preset("output_standardise", deviation=VARIANCE, mean=MEAN, per_head=True),
    "output_layer_norm": LongAttnConfig.preset("output_layer_norm", deviation=0.4),
    "infoscale+cosscale": LongAttnConfig.preset("infoscale+cosscale", train_length=4, scale=5.0),
    "mapped+adaptive": LongAttnConfig.preset("scale_invariant+adaptive_temperature", tau=10.0, sink_tokens=1),
    "rerope": LongAttnConfig.preset("rerope", window=7),
    "leaky_rerope": LongAttnConfig.preset("leaky_rerope", window=7, stretch=2.5),
    "leaky_by_layer": LongAttnConfig.preset("leaky_rerope", window=7, stretch=[2.5, math.inf, 1, [1.5, "inf"]]),
    "self_extend": LongAttnConfig.preset("self_extend", window=6, group=3),
    "dual_chunk": LongAttnConfig.preset("dual_chunk", chunk=10, local=3),
    "string_remap": LongAttnConfig.preset("string_remap", shift=9, window=4),
    "yarn_beyond": LongAttnConfig.preset("yarn_beyond", factor=8.0, train_length=9, beta_fast=2.0, beta_slow=0.01),
    "windowed": LongAttnConfig.preset("windowed", window=7),
    "streaming": LongAttnConfig.preset("streaming", window=6, sinks=2),
    "lm_infinite": LongAttnConfig.preset("lm_infinite", window=6, sinks=2),
    "rerope+infoscale+cosscale": LongAttnConfig.preset("rerope+infoscale+cosscale", window=7, train_length=8, scale=5.0),
    "leaky_rerope+scale_invariant": LongAttnConfig.preset("leaky_rerope+scale_invariant", window=7, sink_tokens=1, offset=7),
    "streaming+adaptive": LongAttnConfig.preset("streaming+adaptive_temperature", window=9, sinks=2),
    "sink+rerope+adaptive": LongAttnConfig.preset("rerope+adaptive_temperature+attention_sink", window=9, logit=0.5),
    "all_slots": LongAttnConfig.preset(
        "scale_invariant+infoscale+cosscale+output_standardise", train_length=4, tau=2.0, scale=5.0, deviation=0.3
    ),
}
DEFAULT = "scale_invariant"
#: The families that every case but the default one runs on: plain, softcap, sliding, shared keys, learned positions.
SUBSET = ("llama", "gemma2", "gemma3", "gemma4", "gpt2")


def families(case: str) -> tuple[str, ...]:
    """Those that a case runs on: remaps need rotary positions, YaRN those of plain RoPE."""
    config = CASES[case]
    if config.remap is None:
        return SUBSET
    without = {"gpt2", "gemma4"} if case.startswith("yarn_") else {"gpt2"}
    return (*(f for f in SUBSET if f not in without), "qwen3", "mistral", "nanochat")


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,  # logits of order one, so that a wrong distance shows
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "sliding_window": WINDOW}
_LAYERED = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1024.0**2},
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HEADS * HEAD_DIM,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "n_inner": 48,
    "scale_attn_by_inverse_layer_idx": True,
    **{key: _COMMON[key] for key in ("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")},
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "gemma": ("GemmaConfig", _COMMON),
    "gemma2": ("Gemma2Config", _COMMON | _MIXED | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 5}),
    "gemma3": ("Gemma3TextConfig", _COMMON | _MIXED | {"query_pre_attn_scalar": 5}),
    "gemma3n": ("Gemma3nTextConfig", _COMMON | _MIXED | _LAYERED | {"laurel_rank": 4}),
    "gemma4": ("Gemma4TextConfig", _COMMON | _MIXED | _LAYERED | {"global_head_dim": 16, "rope_parameters": _ROPE}),
    "gpt2": ("GPT2Config", _GPT2),
    "mistral": ("MistralConfig", _COMMON | {"sliding_window": None}),
    "nanochat": ("NanoChatConfig", {k: v for k, v in _COMMON.items() if k != "head_dim"}),
    "qwen2": ("Qwen2Config", {k: v for k, v in _COMMON.items() if k != "head_dim"}),
    "qwen3": ("Qwen3Config", _COMMON),
}

_LATENT = {"num_key_value_heads": HEADS, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 6}
_LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": HEAD_DIM, "qk_head_dim": 10 + HEAD_DIM}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_EXPERTS |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
_SINKS = _MIXED | {
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
#: Those on which transformers' own tests run besides: latent attention, learned sinks, fused projections, layers without RoPE.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3Config", _COMMON | _LATENT | _EXPERTS),
    "gpt_oss": ("GptOssConfig", _COMMON | _SINKS),
    "phi3": ("Phi3Config", {k: v for k, v in _COMMON.items() if k != "head_dim"}),
    "smollm3": ("SmolLM3Config", _COMMON | {"no_rope_layers": [1, 0] * (LAYERS // 2), "use_sliding_window": False}),
}


def model_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A tiny config of the family."""
    name, arguments = (FAMILIES | OTHERS)[family]
    arguments = {k: dict(v) if isinstance(v, dict) else v for k, v in (arguments | changes).items()}
    return getattr(transformers, name)(**arguments)
