"""The trained length of published checkpoints, by their settings in tiny models; remaps of rotations that are trained in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import closed_form
import pytest
import torch
import transformers
from helpers import SCENARIOS, close, feed, tokens
from transformers import AutoModelForCausalLM, DynamicCache

import hf_longattn
from hf_longattn import LongAttnConfig
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


# rotations that are trained in -----------------------------------------------------------------------------------------

FOURFOLD = {"factor": 4.0, "original_max_position_embeddings": 48, "rope_theta": 100.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
#: Published checkpoints that were trained at 192 tokens, so to say: what changes of their rotary settings.
TRAINED_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama-3.2-1B", FOURFOLD),
    "yarn": ("DeepSeek-R1-Distill-Qwen-7B", FOURFOLD | {"rope_type": "yarn", "beta_fast": 4.0}),
    "longrope": ("Phi-3-mini-128k", FOURFOLD | LONGROPE),
    "linear, full layers": ("Gemma-3-4b (text)", {"rope_theta": 100.0}),
    "yarn, full layers": ("Olmo-3-7B", FOURFOLD),
    "yarn, sinks": ("gpt-oss-20b", FOURFOLD),
    "yarn, queries scaled by position": (
        "Ministral-3-8B",
        FOURFOLD | {"original_max_position_embeddings": 12, "factor": 16.0},
    ),
}
WAYS = ["without_cache", "with_cache", "dynamic_chunks", "static_chunks", "left_padded", "left_padded_dynamic_chunks"]
REROPE = LongAttnConfig.preset("rerope", window=7)


def trained_in(kind: str, **changes: Any) -> Any:
    name, own = TRAINED_IN[kind]
    checkpoint = copy.deepcopy(CHECKPOINTS[name]) | {"max_position_embeddings": 192}
    settings = checkpoint["rope_parameters"]
    settings.get("full_attention", settings).update(own | changes)
    if checkpoint["config"].get("sliding_window"):
        checkpoint["config"]["sliding_window"] = 9
    if name == "Phi-3-mini-128k":
        checkpoint["config"]["original_max_position_embeddings"] = settings["original_max_position_embeddings"]
    return tiny(checkpoint)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TRAINED_IN)
def test_a_remap_acts_on_a_rotation_that_is_trained_in(kind: str, way: str) -> None:
    """Exact by the closed form, which turns vectors by the model's frequencies; no `stack` is asked for."""
    ids, plain = tokens(), trained_in(kind)
    with torch.no_grad():
        before = plain(ids).logits
        want = closed_form.attach(plain, REROPE)(ids, use_cache=False).logits
    m = hf_longattn.apply(trained_in(kind), REROPE)
    assert (hf_longattn.config_of(m).train_length, hf_longattn.config_of(m).name) == (192, "rerope")
    close(SCENARIOS[way](m, ids), want)
    assert (want - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind", TRAINED_IN)
@torch.no_grad()
def test_below_the_window_the_model_is_what_it_was(kind: str) -> None:
    """Its own temperature included: YaRN's and longrope's attention factor, and queries scaled by position."""
    ids, plain = tokens(1, 90), trained_in(kind)
    m = hf_longattn.extend(trained_in(kind), to=384)
    assert hf_longattn.config_of(m).positions.window == 96
    close(m(ids).logits, plain(ids).logits, 2e-6)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "yarn, queries scaled by position"])
def test_a_temperature_of_the_models_own_is_not_applied_twice(kind: str) -> None:
    with pytest.raises(ValueError, match=r"has a temperature of its own.*stack=True"):
        hf_longattn.apply(trained_in(kind), "rerope+infoscale")
    assert hf_longattn.config_of(hf_longattn.extend(trained_in(kind), to=4096)).name == "rerope"


@torch.no_grad()
def test_longrope_beyond_its_border() -> None:
    """One pass and a cache that began beyond are exact; one that was filled below is refused, and one cut back to there."""
    m, ids, plain = (
        trained_in("longrope", original_max_position_embeddings=16),
        tokens(),
        trained_in("longrope", original_max_position_embeddings=16),
    )
    plain(ids)  # sets the frequencies for this length
    want = closed_form.attach(plain, REROPE)(ids, use_cache=False).logits
    hf_longattn.apply(m, REROPE)
    close(m(ids, use_cache=False).logits, want)
    close(feed(m, ids, [17, 3, 1, 3]), want)
    for chunks in ([16, 8], [9, 9, 6], [1] * 24):
        with pytest.raises(ValueError, match="different sides of 16 tokens"):
            feed(m, ids, chunks)
    cut = m(ids).past_key_values
    cut.crop(-14)
    with pytest.raises(ValueError, match="different sides of 16 tokens"):
        m(ids[:, 10:13], past_key_values=cut)
    feed(hf_longattn.remove(m), ids, [16, 8])  # transformers' own, which mixes
    unknown = DynamicCache(config=m.config)
    m(ids[:, :16], past_key_values=unknown)
    with pytest.raises(ValueError, match="different sides of 16 tokens"):
        hf_longattn.apply(m, REROPE)(ids[:, 16:], past_key_values=unknown)


@torch.no_grad()
def test_generating_across_the_border_of_longrope() -> None:
    """Phi-3's generate() reads the text anew there; each token is that of one full pass."""
    m, ids = hf_longattn.apply(trained_in("longrope", original_max_position_embeddings=16), REROPE), tokens(1, 14)
    out = m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    for step, logits in enumerate(out.logits):
        close(logits, m(out.sequences[:, : 14 + step], use_cache=False).logits[:, -1])
