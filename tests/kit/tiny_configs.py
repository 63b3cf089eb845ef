"""A tiny config for any language model that transformers knows, by shrinking the fields of its default config."""

from __future__ import annotations

import copy
import re
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW = 4, 4, 2, 8, 97, 8
WIDTH = HEADS * HEAD_DIM

#: Field names, as whole-name patterns, and what they become; the first that fits counts.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(unpadded_|decoder_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"hidden_size_per_layer_input|laurel_rank|ple_embed_dim", 8),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|embedding_dim|word_embed_proj_dim|emb_dim|lru_width", WIDTH),
    (
        r"adapter_in_dim|adapter_out_dim|adapter_input_size|attention_hidden_size|input_embedding_size|output_embedding_size|backbone_hidden_size",
        WIDTH,
    ),
    (r"((dense|moe|shared|shared_expert|shared_experts|moe_shared_expert)_)?intermediate_size(_mlp)?", 48),
    (r"(encoder_|decoder_)?ffn_dim|n_inner|d_inner|dff|dim_ff|(expert_)?ffn_hidden_size|feed_forward_size", 48),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks|(encoder|decoder)_layers|num_(encoder|decoder)_layers", LAYERS),
    (r"(swa_)?num_attention_heads|n_heads?|num_heads|attention_heads|num_(encoder|decoder)_attention_heads", HEADS),
    (r"(encoder|decoder)_attention_heads", HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups", KV_HEADS),
    (r"(swa_|global_|attention_)?head_dim|attention_head_size|d_head|dim_head|kv_channels|v_head_dim", HEAD_DIM),
    (r"qk_rope_head_dim|qk_nope_head_dim|index_head_dim", HEAD_DIM),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 16),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length|max_target_positions", 128),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk", 2),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"sliding_window(_size)?|window_size|attention_window_size|local_attention", WINDOW),
    (r"(linear|index)_(n|num|num_key|num_value)_heads|linear_num_(key|value)_heads", HEADS),
    (r"linear_(key_|value_)?head_dim", HEAD_DIM),
    (r"index_topk", 64),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"num_kv_shared_layers", LAYERS // 2),
    (r"mamba_(n|num)_heads|n_mamba_heads", HEADS),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"mamba_d_head|mamba_head_?dim", 2 * WIDTH // HEADS),
    (r"(mamba_)?n_?groups", 1),
    (r"(mamba_)?chunk_size", 16),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"initializer_range|init_std|initializer_std", 0.12),
    (r"pad_token_id|bos_token_id|eos_token_id|(forced|decoder_start|sep)_\w+_id", 0),
    (r"\w*(dropout|pdrop|layerdrop|_drop)\w*", 0.0),
)
#: Lists with one entry a layer: every kind in turn.
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "layer_rope_theta", "no_rope_layers")

#: What shrinking alone does not get right, by model_type.
_GLOBAL = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 48}
_BYTES = _GLOBAL | {"vocab_size": VOCAB}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_local_experts": 4},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cosmos3_edge_text": {"rope_parameters": _SECTIONS},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "ernie4_5_vl_moe_text": {"rope_parameters": _SECTIONS | {"mrope_section": [1, 1, 2]}},
    "exaone4_5": {"text_config": _BYTES | {"model_type": "exaone4", "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}},
    "glm4v_moe_text": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}},
    "glm4v_text": {"rope_parameters": _SECTIONS},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "glm_ocr_text": {"rope_parameters": _SECTIONS},
    "granite_docling_text": {"attention_multiplier": 1.0},  # as other Granites; of its own a tiny model shows no remap
    "granite_docling_vision": {"out_hidden_size": WIDTH},
    "hy_v4_vl_text": {"rope_parameters": _SECTIONS},
    "inkling2_vision": {"text_hidden_size": WIDTH},
    "molmo2_adapter": {"vision_feature_layer": [3, 2]},
    "muse_spark_audio": {"out_hidden_size": WIDTH},
    "muse_spark_vision": {"out_hidden_size": WIDTH},
    "wavtokenizer": {"codebook_dim": WIDTH},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "patch_in_forward": False,
        "encoder_config": _BYTES | {"hidden_size_global": WIDTH},
        "decoder_config": _BYTES | {"hidden_size_global": WIDTH},
        "global_config": _GLOBAL,
        "patcher_config": _BYTES,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 48},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {
        **{f"swa_{k}": HEADS for k in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{k}": 16 for k in ("q_lora_rank", "kv_lora_rank", "head_dim")},
        **{f"swa_{k}": HEAD_DIM for k in ("qk_nope_head_dim", "v_head_dim")},
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {"intermediate_size": 48, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kolibri1": {"num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"head_dim": 2 * WIDTH // HEADS},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "mistral": {"sliding_window": None},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [8, WIDTH - 8], "axial_pos_shape": [8, 16], "attn_layers": ["local", "local"]},
    "roc_bert": {
        **{f"{k}_embed_dim": 8 for k in ("pronunciation", "shape")},
        **{f"{k}_vocab_size": VOCAB for k in ("pronunciation", "shape")},
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * WIDTH // HEADS,
        "num_key_value_heads": HEADS,
        "n_mamba_heads": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def families() -> dict[str, type[PreTrainedConfig]]:
    """The config class of every model type in the mapping of causal language models."""
    return {c.model_type: c for c in MODEL_FOR_CAUSAL_LM_MAPPING}


def multimodal() -> dict[str, type[PreTrainedConfig]]:
    """Those of models that read images and text, and are in no other mapping of language models."""
    return {c.model_type: c for c in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if c.model_type not in families()}


def class_of(config: PreTrainedConfig) -> Any:
    """The class of a language model."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return next(mapping[type(config)] for mapping in mappings if type(config) in mapping)


def tiny(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of a few layers and heads; whatever constructing it raises."""
    return cls(**arguments(cls))


def arguments(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    own = copy.deepcopy(OVERRIDES.get(cls.model_type, {}))  # configs write into what they are given
    try:
        default = cls()
    except Exception:
        return own
    out: dict[str, Any] = {}
    for name in {k: None for base in reversed(cls.__mro__) for k in getattr(base, "__annotations__", {})}:
        value = vars(default).get(default.attribute_map.get(name, name))  # per-layer ones may not be read
        if isinstance(value, PreTrainedConfig):
            out[name] = arguments(type(value))
        elif (small := _small(name, value)) is not None:
            out[name] = small
    if "qk_rope_head_dim" in out and "num_key_value_heads" in out:
        out["num_key_value_heads"] = HEADS  # latent attention has no groups
    if hasattr(default, "is_decoder") and not default.is_encoder_decoder:
        out["is_decoder"] = True
    return out | own


def _small(name: str, value: Any) -> Any:
    if name in KINDS and isinstance(value, list) and value:
        kinds = list(dict.fromkeys(value))
        return [kinds[i % len(kinds)] for i in range(LAYERS)]
    if value is None and name in ("head_dim", "num_key_value_heads"):
        value = 0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    for pattern, small in SIZES:
        if re.fullmatch(pattern, name):
            return type(value)(small)
    return None
