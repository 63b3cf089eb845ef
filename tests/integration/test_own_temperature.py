"""Temperatures that models ship: known, shown, never doubled; and sparse attention, refused for what it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import closed_form
import pytest
import torch
from helpers import close, feed, tokens
from tiny_configs import tiny
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.trained_length import trained
from hf_longattn.slots.method import ModelFacts

REROPE = LongAttnConfig.preset("rerope", window=7)


def config_of(model_type: str, **changes: Any) -> Any:
    """A tiny config; what `rope_parameters` says is added to its own."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"{model_type} came later to transformers")
    config, rope = tiny(CONFIG_MAPPING[model_type]), changes.pop("rope_parameters", {})
    vars(config).update(changes)
    if rope:
        config.rope_parameters = config.rope_parameters | rope
    return config


def ministral(beta: float = 0.3, original: int = 4) -> Any:
    """Trained at 192 tokens; its temperature rises with every `original` of them."""
    rope = {"factor": 192 / original, "original_max_position_embeddings": original, "llama_4_scaling_beta": beta}
    torch.manual_seed(0)
    config = config_of("ministral3", max_position_embeddings=192, rope_parameters=rope | {"rope_theta": 100.0})
    return AutoModelForCausalLM.from_config(config).eval()


SHIPPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama 4": ("llama4_text", {}, "1 + 0.1 ln(1 + floor((p + 1) / 8,192)) in layers that do not rotate"),
    "gpt-oss": ("gpt_oss", {"max_position_embeddings": 131072}, "yarn's attention factor"),
    "DeepSeek V3": (
        "deepseek_v3",
        {"max_position_embeddings": 163840}
        | {
            "rope_parameters": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
            | {"mscale": 1.0, "mscale_all_dim": 1.0}
        },
        "yarn's attention factor",
    ),
}


def test_ministral_brings_a_temperature_and_its_yarn_none() -> None:
    model = ministral()
    assert model.model.rotary_emb.attention_scaling == 1
    assert "own temperature: 1 + 0.3 ln(1 + floor(p / 4))" in str(hf_longattn.describe(model))
    assert hf_longattn.describe(ministral(beta=0.0)).own_temperature is None
    with pytest.raises(ValueError, match=r"has a temperature of its own \(1 \+ 0.3 ln\(1 \+ floor\(p / 4\)\)\)"):
        hf_longattn.apply(model, "rerope+infoscale")
    assert hf_longattn.get_config(hf_longattn.extend(model, to=768)).name == "rerope"
    assert hf_longattn.get_config(hf_longattn.extend(ministral(beta=0.0), to=768)).name == "rerope+infoscale"


@pytest.mark.parametrize("kind", SHIPPED)
@pytest.mark.filterwarnings("ignore:rerope remaps rotary distances", "ignore:.* is taken for trained in")
def test_shipped_temperatures_are_shown_and_not_doubled(kind: str) -> None:
    model_type, changes, words = SHIPPED[kind]
    model = AutoModelForCausalLM.from_config(config_of(model_type, **changes)).eval()
    assert hf_longattn.describe(model).own_temperature == words
    with pytest.raises(ValueError, match="has a temperature of its own"):
        hf_longattn.apply(model, "infoscale")
    length = 16 * trained(model.config).length
    with pytest.warns(UserWarning, match="never shown to read well"):
        assert hf_longattn.get_config(hf_longattn.extend(model, to=length)).name == "rerope"


@torch.no_grad()
def test_a_temperature_that_acts_among_the_first_tokens_hides_no_rotation() -> None:
    """It is 2 here by the fifth token, and positions are its true ones: beside the closed form, with a cache too."""
    ids, plain, model = tokens(), ministral(beta=1.5), ministral(beta=1.5)
    before = plain(ids).logits
    want = closed_form.attach(plain, REROPE)(ids, use_cache=False).logits
    hf_longattn.apply(model, REROPE)
    close(model(ids).logits, want)
    close(feed(model, ids, [17, 3, 1, 3]), want)
    assert (want - before).abs().max() > 1e-2
    assert (want - hf_longattn.apply(ministral(beta=0.0), REROPE)(ids).logits).abs().max() > 1e-2


def test_yarn_beyond_brings_a_temperature_that_does_not_join_another() -> None:
    facts = ModelFacts(
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, train_length=64, rope_type="default"
    )
    own = dataclasses.replace(facts, own_temperature="a temperature")
    LongAttnConfig.preset("yarn_beyond").bind(facts)
    with pytest.raises(ValueError, match=r"\(a temperature\); yarn_beyond's attention factor on top.*attention_factor=1.0"):
        LongAttnConfig.preset("yarn_beyond").bind(own)
    LongAttnConfig.preset("yarn_beyond", attention_factor=1.0).bind(own)


# what is refused -------------------------------------------------------------------------------------------------------

INDEXED = r"cannot go into \w+: its queries see the keys that an indexer picks"
REFUSED = {
    "deepseek_v4": r"cannot go into \w+: its queries see keys that stand for several tokens each \(compressed attention\)",
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
    "mistral_large4_text": INDEXED,
    "inkling_text": r"cannot go into the layers .*a learned bias \(position_bias\) joins their logits",
}


@pytest.mark.parametrize("model_type", REFUSED)
@pytest.mark.filterwarnings("ignore:.* is taken for trained in")
def test_sparse_attention_is_refused_with_the_true_reason(model_type: str) -> None:
    kind = AutoModel if model_type == "mistral_large4_text" else AutoModelForCausalLM
    model = kind.from_config(config_of(model_type)).eval()
    for method in ("rerope", "logn", "windowed", "rerope+infoscale"):
        with pytest.raises(ValueError, match=REFUSED[model_type]):
            hf_longattn.apply(model, method)
    with pytest.raises(ValueError, match=REFUSED[model_type]):
        hf_longattn.extend(model, to="2M")


def test_temperatures_of_refused_models_are_known_too() -> None:
    inkling = AutoModelForCausalLM.from_config(config_of("inkling_text", log_scaling_n_floor=128000))
    assert hf_longattn.describe(inkling).own_temperature == "1 + 0.1 ln(max((p + 1) / 128,000, 1))"
    large = AutoModel.from_config(config_of("mistral_large4_text"))
    assert hf_longattn.describe(large).own_temperature == "s ln(p + 1) + b, learned for each head"


def test_mistral_large_4_was_trained_with_its_yarn() -> None:
    """From a window of 512: no scaling put in for inference."""
    if "mistral_large4" not in CONFIG_MAPPING:
        pytest.skip("mistral_large4 came later to transformers")
    known = trained(CONFIG_MAPPING["mistral_large4"]().get_text_config())
    assert (known.length, known.assumed, known.rotation_is_own) == (1_048_576, None, True)
