"""Models of other shapes than the families of cases.py: each is exact, or refused with the true reason, also at load."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import parts
import pytest
import tiny_configs
import torch
import transformers
from cases import CASES, DEFAULT, FAMILIES, VOCAB
from helpers import build, close, feed, logits, multimodal, picture, stock, tokens
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

import hf_longattn
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.layers import layers_of
from hf_longattn.integration.names import is_longattn_name

CONFIG = CASES[DEFAULT]
_SMALL = FAMILIES["llama"][1] | {"num_hidden_layers": 2}
_OLD = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB}
_PAIR = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16}
_PAIR |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64}
_PAIR |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": None}


@torch.no_grad()
def exact(m: Any, method: Any = CONFIG, identity: dict[str, Any] | None = None) -> Any:
    """The model under a method, after checking that it is consistent, and its own under an identity of that method."""
    ids = tokens()
    want = m(ids, use_cache=False).logits
    hf_longattn.apply(m, method, **(identity or {"strength": 0.0}))
    close(m(ids, use_cache=False).logits, want, what="identity")
    hf_longattn.update(m, backend="tiled")  # not the model's own attention
    close(m(ids, use_cache=False).logits, want, what="identity, computed")
    hf_longattn.apply(m, method)
    full = m(ids, use_cache=False).logits
    assert (full - want).abs().max() > 1e-3
    close(feed(m, ids, [16, *[1] * 8]), full, what="cached")
    hf_longattn.remove(m)
    close(m(ids, use_cache=False).logits, want, 0.0)
    return hf_longattn.apply(m, method)


def reasons(m: Any) -> dict[str, str]:
    """Why layers are left alone, by the last part of the module's name."""
    return {r[0]: r[2].split(", ")[0] for r in hf_longattn.describe(m).rows if r[1] == "unchanged"}


# names that a model cannot run ----------------------------------------------------------------------------------------

#: No attention through the interface; an own one looked up by name; none at all; one that says it is not causal.
CANNOT: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB},
    "OpenAIGPT": _OLD,
    "Falcon": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCAB},
    "Mamba": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": VOCAB},
    "BigBirdPegasus": _PAIR | {"attention_type": "original_full"},
    "Bert": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": VOCAB,
    },
}


@pytest.mark.parametrize("how", ["apply", "set_attn_implementation", "from_config", "from_pretrained", "constructor"])
@pytest.mark.parametrize("name", CANNOT)
def test_a_name_that_a_model_cannot_run_is_refused(name: str, how: str, tmp_path: Path) -> None:
    """transformers loads some of them without a word, and adds our mask to their scores: with 5 keys, it fits."""
    m = build(name, **CANNOT[name])
    before, ids = m.config._attn_implementation, tokens(1, 5)
    with torch.no_grad():
        want = m(ids)[0]
    m.save_pretrained(tmp_path)
    config = copy.deepcopy(m.config)
    auto, asked = AutoModelForCausalLM, {"attn_implementation": DEFAULT}
    calls = {
        "apply": lambda: hf_longattn.apply(m, CONFIG),
        "set_attn_implementation": lambda: m.set_attn_implementation(DEFAULT),
        "from_config": lambda: auto.from_config(config, **asked),
        "from_pretrained": lambda: auto.from_pretrained(tmp_path, longattn={"tau": 3.0}, **asked),
        "constructor": lambda: type(m)(type(config)(**CANNOT[name], **asked)),
    }
    by_name = how == "constructor" and name == "Falcon"  # transformers' own error, before there is anything to refuse
    says = DEFAULT if by_name else r"applies to 0 layers of \w+: .*interface"
    with pytest.raises(KeyError if by_name else ValueError, match=says):
        calls[how]()
    assert m.config._attn_implementation == before
    with torch.no_grad():
        close(m(ids)[0], want, 0.0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["GPTJ", "CodeGen"])
def test_rotations_by_a_table(name: str) -> None:
    m = build(name, **_OLD | {"rotary_dim": 4})
    if not any(layers_of(m)):
        pytest.skip("this release looks its attention up by name")
    with pytest.raises(ValueError, match=r"no rotary frequencies.*or takes its rotations from a table"):
        hf_longattn.apply(m, "rerope")
    exact(m)


def test_towers_and_encoders_do_not_refuse_for_the_whole(tmp_path: Path) -> None:
    """They are models too, built first, and have no causal attention."""
    m = multimodal()
    m.save_pretrained(tmp_path)
    loaded = Gemma3ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=DEFAULT, longattn=CONFIG.to_dict())
    assert {v for k, v in reasons(loaded).items() if "vision" in k} == {"not causal"}
    with torch.no_grad():
        close(loaded.eval()(**picture()).logits, hf_longattn.apply(m, CONFIG)(**picture()).logits)
    torch.manual_seed(0)
    pair = transformers.BartForConditionalGeneration._from_config(
        transformers.BartConfig(**_PAIR), attn_implementation=DEFAULT
    )
    left = reasons(pair)
    assert set(left.values()) == {"not causal"}
    assert not any("decoder" in name and "self_attn" in name for name in left)
    with torch.no_grad():
        assert pair(tokens(1, 9), decoder_input_ids=tokens(1, 7)).logits.isfinite().all()


def test_a_remap_in_a_decoder_that_reads_an_encoder_is_refused(tmp_path: Path) -> None:
    pair = parts.ENCODERS["t5gemma"]()
    pair.save_pretrained(tmp_path)
    message = r"rerope remaps rotary distances, and how T5Gemma.* rotates cannot be verified"
    with pytest.raises(ValueError, match=message):
        hf_longattn.apply(pair, "rerope", window=7)
    with pytest.raises(ValueError, match=message):
        type(pair).from_pretrained(tmp_path, attn_implementation="rerope:window=7")
    hf_longattn.apply(pair, "windowed", window=7)


@pytest.mark.parametrize("alone", [False, True])
@torch.no_grad()
def test_a_decoder_of_another_shape_than_its_encoder(alone: bool) -> None:
    """Whisper's turbo has 32 layers and 4, DistilBART 12 and 6; the config's numbers are the encoder's."""
    shape = {"decoder_layers": 3, "decoder_attention_heads": 4, "encoder_layers": 1, "encoder_attention_heads": 2}
    torch.manual_seed(0)
    kind = transformers.BartForCausalLM if alone else transformers.BartForConditionalGeneration
    m = kind(transformers.BartConfig(**_PAIR | shape, init_std=0.3)).eval()
    text = {"input_ids": tokens()} if alone else {"input_ids": tokens(2, 9), "decoder_input_ids": tokens()}
    inputs = text | {"use_cache": False}  # the cache of BartForCausalLM has the encoder's layers
    plain = m(**inputs).logits
    logit = [[0.1 * (layer + 1) * (head + 1) for head in range(4)] for layer in range(3)]
    hf_longattn.apply(m, "attention_sink+infoscale", logit=logit, train_length=5)
    changed = m(**inputs).logits
    assert (changed - plain).abs().max() > 1e-3
    hf_longattn.update(m, backend="reference")
    close(m(**inputs).logits, changed)
    hf_longattn.remove(m)
    with pytest.raises(ValueError, match="the model has layers 0 to 2"):
        hf_longattn.apply(m, "alibi", layers=[3])
    assert torch.equal(m(**inputs).logits, plain)
    assert hf_longattn.measure(m, text).output_deviation.shape == (3, 4)


def laguna() -> Any:
    if not hasattr(transformers, "LagunaConfig"):
        pytest.skip("this release has no Laguna")
    config = tiny_configs.tiny(transformers.LagunaConfig)
    config.num_attention_heads_per_layer = [8, 4, 8, 4]
    return transformers.LagunaForCausalLM(config).eval()


def gemma4() -> Any:
    """Its large checkpoints have fewer key heads, of another width, in layers of full attention."""
    kind, values = FAMILIES["gemma4"]
    keys = {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    return AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values | keys)).eval()


@pytest.mark.parametrize("build", [laguna, gemma4])
def test_layers_that_differ_in_the_number_or_the_width_of_their_heads(build: Any) -> None:
    torch.manual_seed(0)
    m = build()
    exact(m)
    hf_longattn.remove(m)
    plain = logits(m)
    for name in ("alibi", "attention_sink:learned=true", "logn:learned=true:train_length=5", "output_layer_norm"):
        changed = logits(hf_longattn.apply(m, name, layers="all"))
        assert (changed - plain).abs().max() > 1e-3
        close(logits(hf_longattn.update(m, backend="reference")), changed)
        hf_longattn.remove(m)


def test_numbers_by_head_where_layers_differ() -> None:
    m, logit = laguna(), [[0.5] * 8] * 4
    with pytest.raises(ValueError, match=r"logit has a number for each of 8 heads, and layer 1 of Laguna.* has 4: give one"):
        hf_longattn.apply(m, "attention_sink", logit=logit, layers="all")
    changed = logits(hf_longattn.apply(m, "attention_sink", logit=logit, layers=[0, 2]))
    close(logits(hf_longattn.update(m, backend="reference")), changed)


def test_a_name_for_the_tower_alone_is_refused() -> None:
    m = multimodal()
    with pytest.raises(ValueError, match=r"left its language model under 'sdpa'"):
        m.set_attn_implementation({"vision_config": DEFAULT})
    assert not any(is_longattn_name(c._attn_implementation) for c in (m.config, m.config.text_config, m.config.vision_config))
    with pytest.raises(ValueError, match=r"left its language model under 'sdpa'"):
        Gemma3ForConditionalGeneration._from_config(m.config, attn_implementation={"vision_config": DEFAULT})


# kinds of layers ------------------------------------------------------------------------------------------------------


def test_types_of_layers_that_are_not_known() -> None:
    m = stock("llama")
    m.config.layer_types = ["full_attention", "indexed_attention", "hybrid", "hybrid_sliding"]
    hf_longattn.apply(m, CONFIG)
    assert list(reasons(m).values()) == ["indexed_attention", "sliding window"]
    for layers in ("all", [1]):
        with pytest.raises(ValueError, match=r"the layers \[1\] of Llama.*'indexed_attention'.*Pass layers=\[0, 2, 3\]"):
            hf_longattn.apply(m, CONFIG, layers=layers)
    hf_longattn.remove(m)
    m.config.layer_types = ["indexed_attention"] * 4
    with pytest.raises(ValueError, match=r"the layers \[0, 1, 2, 3\].*'indexed_attention'.*All layers"):
        hf_longattn.apply(m, CONFIG)


_HYBRID = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
_DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
_MOE = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
#: Recurrent layers before or beside full attention.
HYBRIDS: dict[str, dict[str, Any]] = {
    "FalconH1": _SMALL | _HYBRID | {"mamba_chunk_size": 16},
    "Qwen3Next": _SMALL | _DELTA | _MOE,
    "OlmoHybrid": _SMALL | _DELTA | {"pad_token_id": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_take_methods_and_remaps(name: str) -> None:
    """Layers called "hybrid" are full; recurrent ones tell equal tokens apart, which must not disturb the verification."""
    m = build(name, **HYBRIDS[name])
    exact(m)
    hf_longattn.remove(m)
    exact(m, hf_longattn.LongAttnConfig.preset("rerope", window=7), {"window": 100})


def test_layers_that_do_not_rotate_are_left_alone_by_a_remap() -> None:
    """Whether they are named or not."""
    for layers in ("full_attention", [0]):
        m = build("SmolLM3", **_SMALL | {"no_rope_layers": [1, 0]})
        exact(m, hf_longattn.LongAttnConfig.preset("rerope", window=7, layers=layers), {"window": 100})
        assert list(reasons(m).values()) == [{"full_attention": "no rotary encoding"}.get(str(layers), "not in `layers`")]


# modules with something missing ---------------------------------------------------------------------------------------


def test_a_tower_whose_modules_say_they_are_causal() -> None:
    """Phi-4-multimodal's do, but they have no layer_idx: nothing that keeps a KV cache lacks it."""
    m = multimodal()
    for module in m.model.vision_tower.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    want = hf_longattn.apply(multimodal(), CONFIG)(**picture()).logits
    close(hf_longattn.apply(m, CONFIG)(**picture()).logits, want)


def test_a_tower_beside_a_config_that_is_the_language_models_own() -> None:
    """The top config is the language model's, and setting its implementation must not reach the tower's."""
    m = stock("llama")
    tower = multimodal().model.vision_tower
    m.model.tower, m.config.vision_config = tower, tower.config
    kinds = {"sub_configs": {"vision_config": type(tower.config)}}
    m.config.__class__ = type("WithTower", (type(m.config),), kinds)
    hf_longattn.apply(m, CONFIG)
    assert m.config._attn_implementation == DEFAULT
    assert tower.config._attn_implementation == "sdpa"


def test_attention_that_does_not_know_its_number() -> None:
    """Zamba's attention modules have weights in common, and layer_idx None."""
    sizes = {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}
    arguments = _SMALL | sizes | {"num_key_value_heads": 4, "num_hidden_layers": 4, "use_mamba_kernels": False}
    arguments |= {"layers_block_type": ["mamba", "hybrid"] * 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    del arguments["head_dim"]
    m = exact(build("Zamba", **arguments))
    assert reasons(m) == {}
    hf_longattn.update(m, layers=[1])
    assert reasons(m) == {"model.layers.3.shared_transf.self_attn": "not in `layers`"}
    with pytest.raises(ValueError, match=r"layers names \[2\]"):
        hf_longattn.apply(m, CONFIG, layers=[2])


def test_cross_attention_that_does_not_say_so() -> None:
    """Mllama's gets pictures; a text alone never calls it, so no verification may wait for it."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {k: v for k, v in _SMALL.items() if v is not None and k != "head_dim"}
    config = transformers.models.mllama.MllamaTextConfig(**sizes, cross_attention_layers=[1], rope_parameters=rope)
    m = transformers.MllamaForCausalLM(config).eval()
    exact(m)
    assert list(reasons(m).values()) == ["cross-attention"]
    hf_longattn.remove(m)
    exact(m, hf_longattn.LongAttnConfig.preset("rerope", window=7), {"window": 100})


def test_several_parts_of_which_none_is_the_language_model() -> None:
    """BLT's encoder, decoder and global model have a config each, and the top config's section would reach none of them."""
    part = {k: _SMALL[k] for k in ("num_attention_heads", "hidden_size", "intermediate_size")} | {"num_hidden_layers": 1}
    sizes = {"vocab_size": VOCAB, "hidden_size_global": 32}
    config = transformers.BltConfig(
        vocab_size=VOCAB,
        encoder_hash_byte_group_vocab=50,
        patch_in_forward=False,
        encoder_config=part | sizes,
        decoder_config=part | sizes,
        global_config=part,
        patcher_config=part | {"vocab_size": VOCAB},
    )
    m = transformers.BltForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"in several parts \(Blt.*, Blt.*\), of which none is the language model"):
        hf_longattn.apply(m, CONFIG, layers="all")


@pytest.mark.parametrize("load", [False, True])
def test_biases_on_the_logits_are_refused_before_the_first_forward(load: bool) -> None:
    """T5's position_bias."""
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCAB)
    t5 = transformers.T5ForConditionalGeneration
    with pytest.raises(ValueError, match=r"applies to 0 layers of T5|cannot go into the layers \[0\] of T5.*position_bias"):
        _ = t5._from_config(config, attn_implementation=DEFAULT) if load else hf_longattn.apply(t5(config), CONFIG)


# tables of positions --------------------------------------------------------------------------------------------------

#: Theirs hold a few rows before the first position, or get a shape or a 2-D mask in place of positions.
TABLES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["Marian", "Pegasus", "Blenderbot", "BlenderbotSmall", "Bart", "MBart"], _PAIR),
    "OPT": {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 1, "ffn_dim": 16, "num_attention_heads": 2},
    "BioGpt": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
}


@pytest.mark.parametrize("name", TABLES)
@torch.no_grad()
def test_tables_end_where_they_end(name: str) -> None:
    small = {"vocab_size": VOCAB, "max_position_embeddings": 24, "init_std": 0.3, "initializer_range": 0.3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = build(name, **TABLES[name] | small)
    want = m(tokens()).logits
    loaded = AutoModelForCausalLM.from_config(copy.deepcopy(m.config), attn_implementation=DEFAULT).eval()
    loaded.load_state_dict(m.state_dict())
    hf_longattn.apply(m, "scale_invariant", strength=0.0)
    close(m(tokens()).logits, want)
    hf_longattn.update(m, strength=1.0)
    full = m(tokens()).logits
    assert (full - want).abs().max() > 1e-3
    close(loaded(tokens()).logits, full)
    close(feed(m, tokens(), [9, 1, 14]), full)
    padded, mask = torch.cat([tokens(2, 3, 9), tokens(2, 20)], 1), torch.ones(2, 23, dtype=torch.long)
    mask[:, :3] = 0
    assert m(padded, attention_mask=mask).logits.isfinite().all()
    for x in (m, loaded):
        cache = x(tokens(), use_cache=True)[CACHE]
        for call in (lambda x=x: x(tokens(length=25)), lambda x=x, c=cache: x(tokens(length=1), **{CACHE: c})):
            with pytest.raises(ValueError, match=r"position 24 lies beyond .* table of 24 entries"):
                call()
