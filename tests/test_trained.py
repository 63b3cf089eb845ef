"""The trained length of published checkpoints, by their settings in tiny models; and remaps of rotations that are trained in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import hf_longattn
from hf_longattn.integration.trained import trained

CHECKPOINTS = {c["name"]: c for c in json.loads((Path(__file__).parent / "checkpoints.json").read_text(encoding="utf-8"))}
#: What makes any of them tiny; a config takes what it knows of this.
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}


def tiny_config(checkpoint: dict[str, Any]) -> Any:
    """Its own settings of lengths, windows and rotation, and little else."""
    kind = transformers.CONFIG_MAPPING[checkpoint["model_type"]]
    known = kind().to_dict().keys()
    rope = copy.deepcopy(checkpoint["rope_parameters"])
    for key in ("short_factor", "long_factor"):
        if isinstance(rope.get(key), str):
            rope[key] = [{"ones": 1.0, "fours": 4.0}[rope[key]]] * (TINY["head_dim"] // 2)
    heads = {"num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    settings = {k: v for k, v in TINY.items() if k in known} | heads | checkpoint["config"]
    return kind(**settings, max_position_embeddings=checkpoint["max_position_embeddings"], rope_parameters=rope)


def tiny(checkpoint: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(checkpoint)).eval()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_trained_length_of_published_checkpoints(name: str) -> None:
    known = trained(tiny_config(CHECKPOINTS[name]))
    assert known.length == CHECKPOINTS[name]["trained"]
    assert known.assumed is None


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_extend_takes_half_the_trained_length(name: str) -> None:
    """Or says why it cannot; the model is then what it was."""
    model, length = tiny(CHECKPOINTS[name]), CHECKPOINTS[name]["trained"]
    before = model.config._attn_implementation
    try:
        hf_longattn.extend(model, to=2 * length)
    except ValueError:
        assert CHECKPOINTS[name]["may_refuse"]
        assert model.config._attn_implementation == before
    else:
        config = hf_longattn.config_of(model)
        assert config.positions.window == length // 2
        assert (config.train_length, config.trained) == (length, trained(tiny_config(CHECKPOINTS[name])).reason)
