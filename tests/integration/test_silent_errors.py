"""The ways in which a custom attention goes wrong in silence, one test each, where test_exactness.py has none."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import coverage_models
import numpy
import pytest
import torch
import transformers
from cases import CASES, DEFAULT, FAMILIES, WINDOW, families, model_config
from helpers import (
    NO_WINDOWS,
    RELATIVE_ONLY,
    SCENARIOS,
    build,
    close,
    crossed,
    expected,
    feed,
    fresh,
    model,
    multimodal,
    picture,
    static,
    stock,
    tokens,
    with_sinks,
)
from tiny_configs import families as tiny_families
from tiny_configs import tiny
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache, GPT2LMHeadModel
from transformers.generation.continuous_batching import continuous_api
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3 as gemma3

import hf_longattn
from hf_longattn.config import PREFIX
from hf_longattn.integration import names
from hf_longattn.integration.base_attention import base_implementation
from hf_longattn.integration.caches import CACHE, PAGES
from hf_longattn.integration.config_records import before as ran_before
from hf_longattn.integration.layers import layers_of
from hf_longattn.integration.names import is_longattn_name
from hf_longattn.slots.registry import list_methods

CONFIG = CASES[DEFAULT]


def test_every_name_has_a_mask_function() -> None:
    """Without one, padding, packing and causality are lost in silence."""
    for alias in ("longattn", *list_methods()):
        for name in (alias, PREFIX + alias):
            assert name in AttentionInterface()
            assert name in AttentionMaskInterface()
            assert is_longattn_name(name)


@pytest.mark.parametrize(
    "which", [(AttentionInterface,), (AttentionMaskInterface,), (AttentionInterface, AttentionMaskInterface)]
)
def test_a_name_that_another_package_takes(which: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function would run in the method's place; under the full name the method goes in all the same."""
    m = hf_longattn.apply(stock("llama"), "alibi")
    with torch.no_grad():
        want = m(tokens()).logits
    for interface in which:
        monkeypatch.setitem(interface._global_mapping, "alibi", interface()["sdpa"])
    with pytest.raises(RuntimeError, match=r"registered an attention named 'alibi'.*full name, 'hf_longattn.alibi'"):
        m(tokens())
    with torch.no_grad():
        close(hf_longattn.apply(m, "alibi")(tokens()).logits, want)
        close(hf_longattn.apply(stock("llama"), "alibi")(tokens()).logits, want)
    with pytest.raises(ValueError, match="'alibi' is the name of an attention that transformers has already"):
        names._register("alibi")


def test_a_name_that_another_package_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package can be imported, and the other attention stays what it is."""
    other = AttentionInterface()["sdpa"]
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setitem(interface._global_mapping, "alibi", interface()["sdpa"])
        monkeypatch.delitem(interface._global_mapping, PREFIX + "alibi")
    monkeypatch.setattr(names, "LISTENERS", [])
    names.register_names(*names._FUNCTIONS)
    assert AttentionInterface()["alibi"] is other
    assert AttentionInterface()[PREFIX + "alibi"] is not other


def test_no_name_is_taken_for_another_kind() -> None:
    """transformers decides by substrings of the name."""
    for alias in ("longattn", *list_methods()):
        assert not any(word in alias for word in ("flash", "sdpa", "flex_attention", "paged", "/", ":", "|"))


# layers that must stay as they were ---------------------------------------------------------------------------------


def outputs_by_layer(m: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """What every attention module returns, by name."""
    out: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, result, name=name: out.__setitem__(name, result[0]))
        for name, module in m.named_modules()
        if name.endswith(("self_attn", "attn", "crossattention"))
    ]
    with torch.no_grad():
        m(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return out


@pytest.mark.parametrize("family", crossed(["gemma3", "gemma2", "gemma3n", "gemma4"], ["gemma3"]))
@pytest.mark.parametrize("name", sorted(name for name in SCENARIOS if "interleaved" not in name))  # eager adds a bool mask
def test_sliding_layers_are_stock(name: str, family: str) -> None:
    """Under a method that changes one full layer only, the first, sliding layer must be bit-equal to stock."""
    m, plain = model(family, CONFIG), stock(family)
    plain.set_attn_implementation(base_implementation(ran_before(m.config)))
    seen: list[dict[str, Tensor]] = []
    for x in (m, plain):
        got: dict[str, Tensor] = {}
        handle = x.model.layers[0].self_attn.register_forward_hook(lambda _, __, r, got=got: got.update(last=r[0]))
        SCENARIOS[name](x, tokens())
        handle.remove()
        seen.append(got)
    visible = slice(7, None) if "left" in name else slice(None)  # what a row of padding attends to is nobody's business
    close(seen[0]["last"][:, visible], seen[1]["last"][:, visible], 1e-6)


MIMO = {"moe_intermediate_size": 16, "num_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "v_head_dim": 8}


@torch.no_grad()
def test_layers_left_alone_keep_their_sinks() -> None:
    """sdpa drops them, so transformers never runs such a model under it, and neither may we."""
    m, ids = with_sinks("MiMoV2Flash", **MIMO), tokens()
    assert m.config._attn_implementation == "eager"
    plain = outputs_by_layer(m, ids)["model.layers.0.self_attn"]
    want = m(ids).logits
    hf_longattn.apply(m, CONFIG, strength=0.0)
    assert [r[1] == "unchanged" for r in hf_longattn.describe(m).rows] == [True, False, True, False]
    close(m(ids).logits, want)
    close(feed(m, ids, [9, 1, 14]), want)
    loaded = AutoModelForCausalLM.from_config(m.config, attn_implementation=DEFAULT).eval()
    loaded.load_state_dict(m.state_dict())
    close(loaded(ids).logits, want)
    hf_longattn.update(m, strength=1.0)
    assert (m(ids).logits - want).abs().max() > 1e-3
    close(outputs_by_layer(m, ids)["model.layers.0.self_attn"], plain, 1e-6)
    m.model.layers[0].self_attn.sinks += 5
    assert (outputs_by_layer(m, ids)["model.layers.0.self_attn"] - plain).abs().max() > 1e-3
    sliding = hf_longattn.update(m, layers="all", strength=0.0)
    m.model.layers[0].self_attn.sinks -= 5
    close(sliding(ids).logits, want)


@pytest.mark.parametrize("name", ["without_cache", "static_chunks", "left_padded_dynamic_chunks", "right_padded"])
@pytest.mark.parametrize("layers", ["full_attention", "all"])
@torch.no_grad()
def test_learned_sinks_join_the_softmax_of_a_method(layers: str, name: str) -> None:
    """Under a map that changes nothing a model with sinks computes what it did, and a sink that grows takes its share."""
    m = with_sinks("GptOss", num_experts_per_tok=2)
    want = SCENARIOS[name](m, tokens())
    hf_longattn.apply(m, CONFIG, strength=0.0, layers=layers)
    assert m.config._attn_implementation != "eager"
    close(SCENARIOS[name](m, tokens()), want)
    m.model.layers[1].self_attn.sinks += 5
    assert (SCENARIOS[name](m, tokens()) - want).abs().max() > 1e-3


@torch.no_grad()
def test_packed_documents_of_a_model_whose_masks_do_not_tell_them_apart() -> None:
    """gpt-oss makes its masks without position_ids: its documents see each other, and a method says so."""
    m, ids = with_sinks("GptOss", num_experts_per_tok=2), tokens(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    alone = torch.cat([m(part, use_cache=False).logits for part in (ids[:, :8], ids[:, 8:])], 1)
    assert (m(ids, position_ids=positions, use_cache=False).logits - alone)[:, 8:].abs().max() > 0.1
    hf_longattn.apply(m, CONFIG, strength=0.0)
    with pytest.raises(ValueError, match=r"masks without position_ids \(gpt-oss\): give each document a row of its own"):
        m(ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("layers", ["full_attention", "all"])
@torch.no_grad()
def test_a_sink_beside_the_model_s_own(layers: str) -> None:
    """Both are terms of the denominator: the model with ln(e^s + e^s') in place of its own."""
    ids, both = tokens(), with_sinks("GptOss", num_experts_per_tok=2)
    m = hf_longattn.apply(copy.deepcopy(both), "attention_sink", logit=1.0, layers=layers)
    for layer in both.model.layers if layers == "all" else both.model.layers[1::2]:
        layer.self_attn.sinks.data = torch.full_like(layer.self_attn.sinks, float(numpy.logaddexp(1.0, 2.0)))
    close(m(ids).logits, both(ids).logits)
    close(feed(m, ids, [9, 1, 14]), both(ids).logits)


@pytest.mark.parametrize("case", ["scale_invariant", "rerope", "streaming", "mapped+adaptive", "infoscale+cosscale"])
def test_learned_sinks_under_every_kind_of_method(case: str, tmp_path: Path) -> None:
    """Logits and gradients of the fast path are the reference's; a checkpoint comes back; weights leave the sink its share."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}  # gpt-oss has YaRN, which remaps refuse
    m, ids = with_sinks("GptOss", num_experts_per_tok=2, rope_parameters=plain), tokens()
    hf_longattn.apply(m, CASES[case])
    sinks = [x.self_attn.sinks for x in m.model.layers]
    results = []
    for backend in ("tiled", "reference"):
        hf_longattn.update(m, backend=backend)
        logits = m(ids).logits
        results.append((logits, *torch.autograd.grad(logits.sin().sum(), sinks)))
    for got, want in zip(*results, strict=True):
        close(got, want)
    assert all(x.abs().max() > 1e-6 for x in results[0][1:])
    m.save_pretrained(tmp_path)
    close(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, results[0][0], 1e-5)
    weights = m(ids, output_attentions=True).attentions[1]
    assert (weights.sum(-1) < 0.99).all()


def test_attention_with_a_mask_of_its_own_is_refused() -> None:
    """Doge turns the mask that it gets into a bias by itself: ours would break it, by a size mismatch in its forward."""
    config = transformers.DogeConfig(**FAMILIES["llama"][1])
    m = AutoModelForCausalLM.from_config(config).eval()
    for layers in ("full_attention", [1]):
        with pytest.raises(ValueError, match=r"cannot go into DogeForCausalLM.*a mask of its own"):
            hf_longattn.apply(m, CONFIG, layers=layers)
    with pytest.raises(ValueError, match="a mask of its own"):
        AutoModelForCausalLM.from_config(config, attn_implementation=DEFAULT)


@pytest.mark.parametrize("before", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("how", ["apply", "name"])
@torch.no_grad()
def test_layers_left_alone_run_what_ran_before(how: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sdpa or eager; for any other, whose masks have another form, what transformers picks, and describe says so."""
    m, ids = stock("gemma3"), tokens()
    m.set_attn_implementation(before)
    if how == "apply":
        hf_longattn.apply(m, CONFIG)
    else:
        m.set_attn_implementation(DEFAULT)
    runs = "eager" if before == "eager" else "sdpa"
    eager, called = gemma3.eager_attention_forward, []
    monkeypatch.setattr(gemma3, "eager_attention_forward", lambda *args, **kwargs: called.append(1) or eager(*args, **kwargs))
    close(m(ids).logits, expected("gemma3", CONFIG, ids))
    assert len(called) == (2 if runs == "eager" else 0)
    said = f"runs {runs}" + f" in place of {before}" * (runs != before)
    assert [r[2] for r in hf_longattn.describe(m).rows][::2] == [f"sliding window, {said}"] * 2
    assert hf_longattn.remove(m).config._attn_implementation == before


@torch.no_grad()
def test_a_mask_function_of_the_user_gets_a_mask_that_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a method changes nothing; it may insist on one."""

    def insisting_mask(attention_mask: Tensor, **arguments: Any) -> Tensor | None:
        return sdpa_mask(attention_mask=attention_mask.bool(), **arguments)

    m, mask = stock("llama"), torch.ones_like(tokens())
    want = m(tokens(), attention_mask=mask).logits
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "insisting", sdpa_attention_forward)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "insisting", insisting_mask)
    m.set_attn_implementation("insisting")
    close(hf_longattn.apply(m, "rerope", window=100)(tokens(), attention_mask=mask).logits, want)


def test_vision_tower_runs_what_ran_before() -> None:
    m = multimodal()
    m.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    m.set_attn_implementation(DEFAULT)
    assert base_implementation(ran_before(m.config.vision_config)) == "eager"
    assert base_implementation(ran_before(m.config.text_config)) == "sdpa"
    hf_longattn.remove(m)
    assert [c._attn_implementation for c in (m.config, m.config.vision_config, m.config.text_config)] == [
        "sdpa",
        "eager",
        "sdpa",
    ]


def test_a_softcap_that_transformers_drops_is_told() -> None:
    """Older releases let Gemma 2 run under sdpa, which has no softcap."""
    supported = stock("gemma2")._supports_sdpa
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        m = AutoModelForCausalLM.from_config(model_config("gemma2"))
    told = [w for w in seen if "gemma2 caps its attention scores at 3" in str(w.message)]
    assert bool(told) == supported
    assert base_implementation(ran_before(hf_longattn.apply(m, CONFIG).config)) == "eager"
    m = stock("gemma2")
    m.config._attn_implementation_internal = "sdpa"
    with pytest.warns(UserWarning, match=r"gemma2 caps.*sdpa, which drops the cap.*eager"):
        hf_longattn.apply(m, CONFIG)
    assert hf_longattn.remove(m).config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_mistral_with_a_window_has_no_full_layer() -> None:
    """Its modules do not say so, its config does."""
    windowed = stock("mistral", sliding_window=WINDOW)
    with pytest.raises(ValueError, match=r"applies to 0 layers of MistralForCausalLM: .* sliding window.*layers.*all"):
        hf_longattn.apply(windowed, CONFIG)
    ids = tokens()
    with torch.no_grad():
        before = windowed(ids).logits
        hf_longattn.apply(windowed, CONFIG, layers=[1])
        assert [r[1].startswith("scale_invariant") for r in hf_longattn.describe(windowed).rows] == [False, True, False, False]
        assert (windowed(ids).logits - before).abs().max() > 1e-3
        want = windowed(ids, use_cache=False).logits
    for name, run in SCENARIOS.items():
        if name not in NO_WINDOWS:
            close(run(windowed, ids), want)


def test_vision_tower_is_stock_and_text_is_not() -> None:
    plain, ours = multimodal(), hf_longattn.apply(multimodal(), CONFIG)
    want, got = (outputs_by_layer(m, **picture()) for m in (plain, ours))
    vision = [name for name in want if "vision" in name]
    assert vision
    for name in vision:
        assert torch.equal(got[name], want[name])
    with torch.no_grad():
        assert (ours(**picture()).logits - plain(**picture()).logits).abs().max() > 0.01
    reasons = {r[0]: r[2] for r in hf_longattn.describe(ours).rows}
    assert all("not causal" in reasons[name] or "runs" in reasons[name] for name in vision)


def test_a_name_given_to_the_whole_composite_model_leaves_the_vision_tower_alone() -> None:
    plain, ours = multimodal(), multimodal()
    ours.set_attn_implementation(DEFAULT)
    want, got = (outputs_by_layer(m, **picture()) for m in (plain, ours))
    for name in want:
        if "vision" in name:
            close(got[name], want[name], 1e-6)
    with torch.no_grad():
        close(ours(**picture()).logits, hf_longattn.apply(multimodal(), CONFIG)(**picture()).logits, 1e-6)


@pytest.mark.slow
def test_image_blocks_look_ahead() -> None:
    """Inside a picture keys lie ahead of queries: |t| counts, nothing is NaN, and tiled equals the reference."""
    runs = []
    for backend in ("tiled", "reference"):
        m = hf_longattn.apply(multimodal(), CONFIG, backend=backend)
        with torch.no_grad():
            runs.append(m(**picture()).logits)
            assert runs[-1].isfinite().all()
            cached = m(**picture(), use_cache=True)
            more = m(tokens(1, 3), **{CACHE: cached[CACHE]}).logits
            ids = torch.cat([picture()["input_ids"], tokens(1, 3)], 1)
            types = torch.nn.functional.pad(picture()["token_type_ids"], (0, 3))
            close(more, m(ids, token_type_ids=types, pixel_values=picture()["pixel_values"]).logits[:, -3:])
    close(runs[0], runs[1])


@torch.no_grad()
def test_a_picture_is_the_same_in_front_of_padding_and_alone() -> None:
    """A window around image blocks is a mask function that is not known: what it shows first does not start the text."""
    m = hf_longattn.apply(multimodal(), "scale_invariant", tau=3.0, sink_tokens=2, layers="all")
    alone = {name: x for name, x in picture().items() if name != "pixel_values"}
    padded = {name: torch.nn.functional.pad(x, (0, 3)) for name, x in alone.items()}
    pixels, ones = picture()["pixel_values"], torch.ones_like(alone["input_ids"])
    want = m(**padded, pixel_values=pixels, attention_mask=torch.nn.functional.pad(ones, (0, 3))).logits[:, :-3]
    for mask in (ones, None):
        close(m(**alone, pixel_values=pixels, attention_mask=mask).logits, want)


@torch.no_grad()
def test_chunks_of_attention_start_no_text() -> None:
    """Beside a padded text and alone, under a mask and without one; and in packed documents."""
    changes = {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": WINDOW}
    m = build("Llama4Text", FAMILIES["llama"][1] | changes, num_local_experts=2, intermediate_size_mlp=48)
    ids, positions = tokens()[:1], torch.cat([torch.arange(10), torch.arange(14)])[None]

    def documents() -> list[Tensor]:
        packed = m(ids, position_ids=positions, use_cache=False).logits
        return [packed, torch.cat([m(x, use_cache=False).logits for x in ids.split([10, 14], 1)], 1)]

    apart = torch.allclose(*documents(), atol=1e-4)  # older releases let chunks go on from one document to the next
    hf_longattn.apply(m, "scale_invariant", tau=3.0, sink_tokens=2, layers="all")
    mask = torch.ones_like(tokens())
    mask[1, :5] = 0
    want = feed(m, tokens(), [20, 1, 3], attention_mask=mask)[:1]
    close(feed(m, tokens()[:1], [20, 1, 3], attention_mask=mask[:1]), want)
    close(feed(m, tokens()[:1], [20, 1, 3]), want)
    if apart:
        close(*documents())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["chunks", "windows", "pictures"])
def test_what_a_layer_sees_starts_no_text_in_a_graph(name: str) -> None:
    """One text, packed documents, and a text behind a cache, where Dynamo does not show what a mask is made of."""
    torch._dynamo.reset()  # which gives up compiling after some models
    inputs = {"input_ids": tokens()[:1]}
    if name == "chunks":
        changes = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW}
        changes |= {"num_hidden_layers": 2, "num_local_experts": 2, "intermediate_size_mlp": 48}
        m = build("Llama4Text", FAMILIES["llama"][1] | changes)
    elif name == "windows":
        m = stock("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    else:
        m, inputs = multimodal(), picture()
    hf_longattn.apply(m, "scale_invariant", tau=3.0, sink_tokens=2, layers="all")
    want, compiled = m(**inputs, use_cache=False).logits, torch.compile(m, backend="eager")
    close(compiled(**inputs, use_cache=False).logits, want)
    if name == "pictures":
        return
    ids, positions = inputs["input_ids"], torch.cat([torch.arange(10), torch.arange(14)])[None]
    packed = m(ids, position_ids=positions, use_cache=False).logits
    close(compiled(ids, position_ids=positions, use_cache=False).logits, packed)
    close(feed(compiled, ids, [20, 4]), want)


def test_gpt2_cross_attention_is_left_alone() -> None:
    """It shares the implementation's name, passes no position_ids, and is not causal."""
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(model_config("gpt2", add_cross_attention=True)).eval()
    ours = hf_longattn.apply(GPT2LMHeadModel(model_config("gpt2", add_cross_attention=True)).eval(), CONFIG)
    ours.load_state_dict(plain.state_dict())
    extra = {"encoder_hidden_states": torch.randn(2, 11, 32), "encoder_attention_mask": torch.ones(2, 11)}
    extra["encoder_attention_mask"][0, 8:] = 0
    cross = {}
    for m in (plain, ours):
        m.transformer.h[0].attn.register_forward_hook(lambda _, __, r: (torch.zeros_like(r[0]), *r[1:]))  # same queries
        cross[m] = outputs_by_layer(m, tokens(), **extra)["transformer.h.0.crossattention"]
    close(cross[ours], cross[plain], 1e-6)
    rows = {r[0]: r for r in hf_longattn.describe(ours).rows}
    assert rows["transformer.h.0.crossattention"][1:] == ("unchanged", "cross-attention, runs sdpa")
    assert rows["transformer.h.0.attn"][1].startswith("scale_invariant")


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_bidirectional_models_are_refused(family: str) -> None:
    m = stock(family)
    for module in m.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(ValueError, match=r"applies to 0 layers .* no causal attention"):
        hf_longattn.apply(m, CONFIG)


@pytest.mark.parametrize("name", ["rerope", "scale_invariant"])
def test_layers_that_are_made_bidirectional_later_are_refused(name: str) -> None:
    """sdpa reads their flag: short texts, which a remap leaves to it, were read in both directions, longer ones not."""
    m = hf_longattn.apply(stock("llama"), name)
    for layer in m.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"reads in both directions \(is_causal=False on its attention layers\)"):
        m(tokens(1, 9))


# calls that must be refused -----------------------------------------------------------------------------------------


def test_gpt2_beyond_its_positions() -> None:
    m = fresh("gpt2", CONFIG)
    with torch.no_grad():
        m(tokens(1, 64))
        with pytest.raises(ValueError, match=r"position 64 lies beyond .* table of 64 entries.*rotary"):
            m(tokens(1, 65))
        with pytest.raises(ValueError, match="position table"):
            m.generate(tokens(1, 60), max_new_tokens=10, do_sample=False)
    hf_longattn.remove(m)
    with pytest.raises(IndexError):
        m(tokens(1, 65))


@pytest.mark.parametrize("family", ["gptj", "codegen", "ctrl"])
def test_beyond_a_table_that_is_no_embedding(family: str) -> None:
    """The model's own error named an index alone, and `extend` announced lengths beyond the table."""
    m = coverage_models.build(family)
    if not any(layers_of(m)):
        pytest.skip("this release looks its attention up by name")
    hf_longattn.apply(m, "windowed", window=9)
    end = m.config.max_position_embeddings
    with torch.no_grad():
        for arguments in ({}, {"position_ids": torch.arange(end)[None]}):
            m(tokens(1, end), **arguments)
        for arguments in (
            {"position_ids": torch.arange(end - 8, end + 1)[None]},
            {"inputs_embeds": torch.zeros(1, end + 1, 32)},
        ):
            ids = tokens(1, 9) if "position_ids" in arguments else None
            with pytest.raises(ValueError, match=rf"position {end} lies beyond .* table of {end} entries.*rotary"):
                m(ids, **arguments)
        with pytest.raises(ValueError, match=f"position {end} lies beyond"):
            m.generate(tokens(1, end - 4), max_new_tokens=9, do_sample=False)
        with pytest.raises(ValueError, match="inputs_embeds"):
            m()  # as the model itself says
    with pytest.raises(ValueError, match=f"takes its positions from a table of {end} entries"):
        hf_longattn.extend(m, 2 * end, "windowed", window=9)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_of_the_loss_are_harmless(family: str) -> None:
    m, ids = model(family, CONFIG), tokens()
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), 7)], 1)
    with torch.no_grad():
        logits = m(ids).logits
        out = m(ids, labels=ids, shift_labels=shifted, ignore_index=7, num_items_in_batch=10)
    close(out.logits, logits)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=7, reduction="sum") / 10
    close(out.loss, want)


@pytest.mark.parametrize("name", ["position_bias", "block_table", "something_new"])
def test_unknown_arguments_raise(name: str) -> None:
    m = model("llama", CONFIG)
    attention = m.model.layers[0].self_attn
    x = torch.zeros(1, 3, 32)
    position = m.model.rotary_emb(x, torch.arange(3)[None])
    with pytest.raises(ValueError, match=f"{name}, which hf_longattn does not know"):
        attention(x, position, torch.zeros(1, 1, 3, 5, dtype=torch.int64), **{name: torch.ones(1)})


def test_block_tables_are_refused() -> None:
    m = model("llama", CONFIG)
    x = torch.zeros(1, 3, 32)
    arguments = {"write_index": [], "block_table": object()}
    with pytest.raises((NotImplementedError, ValueError), match=r"block.table"):
        m.model.layers[0].self_attn(x, m.model.rotary_emb(x, torch.arange(3)[None]), None, **arguments)


def test_missing_mask_raises() -> None:
    """What context parallelism does: it takes the mask away and sets is_causal."""
    m = model("llama", CONFIG)
    x = torch.zeros(1, 3, 32)
    for is_causal, reason in ((True, "Context parallelism"), (None, "called by itself")):
        with pytest.raises(NotImplementedError, match=rf"no attention mask arrived.*{reason}"):
            m.model.layers[0].self_attn(x, m.model.rotary_emb(x, torch.arange(3)[None]), None, is_causal=is_causal)


def test_reading_in_both_directions_is_refused() -> None:
    """transformers makes encoders of decoders by config.is_causal; beside padding it hands a mask on that shows the future."""
    m, ids = fresh("llama", CONFIG), tokens(1, 9)
    with pytest.raises(ValueError, match="reads in both directions"):
        m(ids, is_causal=False)
    m.config.is_causal = False
    for given in ({}, {"attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match="reads in both directions"):
            m(ids, **given)
    hf_longattn.remove(m)
    with pytest.raises(ValueError, match=r"cannot go into LlamaForCausalLM.*reads in both directions"):
        hf_longattn.apply(m, CONFIG)


@torch.no_grad()
def test_a_decoder_that_is_made_an_encoder_later_is_refused() -> None:
    """By other flags, which models read in every call: Gemma 3's and those of BERT and its like."""
    m, ids = fresh("gemma3", CONFIG), tokens(2, 9)
    m.config.use_bidirectional_attention = True
    with pytest.raises(ValueError, match=r"reads in both directions \(use_bidirectional_attention=True\)"):
        m(ids)
    hf_longattn.remove(m)
    with pytest.raises(ValueError, match=r"cannot go into Gemma3ForCausalLM.*reads in both directions"):
        hf_longattn.apply(m, CONFIG)
    for name in ("bert", "roberta"):
        m = AutoModelForCausalLM.from_config(tiny(tiny_families()[name])).eval()
        close(hf_longattn.apply(copy.deepcopy(m), CONFIG, strength=0.0)(ids).logits, m(ids).logits)
        hf_longattn.apply(m, CONFIG)
        m.config.is_decoder = False
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        for extra, error in (({}, NotImplementedError), ({"attention_mask": mask}, ValueError)):
            with pytest.raises(error, match=r"read.* in both directions \(is_decoder=False"):
                m(ids, **extra)
        hf_longattn.remove(m)
        assert m(ids, attention_mask=mask).logits.isfinite().all()


def test_continuous_batching_keeps_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would put flash attention in our place, with no more than a line in the log."""
    m = fresh("llama", CONFIG)
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda *_, **__: True)
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda *_, **__: True)
    if not PAGES:
        with pytest.raises(NotImplementedError, match="would replace the method by flash attention"):
            m.generate_batch(inputs=[[1, 2, 3]], generation_config=m.generation_config)
    else:
        graphs = transformers.ContinuousBatchingConfig(use_cuda_graph=True)
        with pytest.raises(NotImplementedError, match="use_cuda_graph=False"):
            m.init_continuous_batching(m.generation_config, graphs)
        assert m.init_continuous_batching(m.generation_config).continuous_batching_config.use_cuda_graph == (False, False)
    assert m.config._attn_implementation == DEFAULT


def test_changed_section_raises() -> None:
    m = fresh("llama", CONFIG)
    m.config.longattn = {"tau": 3.0}
    with pytest.raises(ValueError, match=r"hf_longattn\.apply\(model, \.\.\.\)"):
        m(tokens())


@pytest.mark.parametrize("how", ["applied", "updated", "unpickled"])
def test_a_section_that_is_written_to_raises(how: str) -> None:
    """It would be saved, and not run."""
    m = hf_longattn.apply(stock("llama"), CONFIG)
    if how == "updated":
        hf_longattn.update(m, strength=0.5)
    section = (pickle.loads(pickle.dumps(m)) if how == "unpickled" else m).config.longattn
    before = copy.deepcopy(section)
    for write in (
        lambda: section["logit_map"].update(tau=3.0),
        lambda: section["logit_map"].__setitem__("tau", 3.0),
        lambda: section.pop("layers"),
        lambda: section.setdefault("tau", 3.0),
    ):
        with pytest.raises(TypeError, match=r"hf_longattn\.update\(model, \.\.\.\)"):
            write()
    assert section == before
    written = m.config.to_dict()["longattn"]
    assert type(written) is type(written["logit_map"]) is dict


# masks of the user --------------------------------------------------------------------------------------------------


def causal(n: int, kv: int | None = None) -> Tensor:
    return torch.ones(1, 1, n, kv or n, dtype=torch.bool).tril((kv or n) - n)


@pytest.mark.parametrize("kind", ["bool", "minimum", "inf"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_own_4d_mask(family: str, kind: str) -> None:
    ids, mask = tokens(), causal(24)
    if kind != "bool":
        mask = torch.zeros(1, 1, 24, 24).masked_fill(~mask, float("-inf") if kind == "inf" else torch.finfo(torch.float32).min)
    windows = {"full_attention": mask, "sliding_attention": mask & causal(24).triu(1 - WINDOW) if kind == "bool" else None}
    if "sliding_attention" in (getattr(stock(family).config, "layer_types", None) or ()):
        if kind != "bool":
            pytest.skip("one form is enough where there are two masks")
        close(model(family, CONFIG)(ids, attention_mask=windows, use_cache=False).logits, expected(family, CONFIG, ids))
        return
    close(model(family, CONFIG)(ids, attention_mask=mask, use_cache=False).logits, expected(family, CONFIG, ids))


@torch.no_grad()
def test_own_4d_mask_with_padding_and_cache() -> None:
    """Left padding by a mask of one's own: n, sinks and distances as without it; a dynamic cache is fine."""
    config, ids, m = CASES["sinks"], tokens(1), model("llama", CASES["sinks"])
    padded = torch.cat([tokens(1, 5, seed=9), ids], 1)
    mask = causal(29).clone()
    mask[..., :5] = False
    close(m(padded, attention_mask=mask, use_cache=False).logits[:, 5:], expected("llama", config, ids))
    cache = DynamicCache(config=m.config)
    first = m(padded[:, :17], attention_mask=mask[:, :, :17, :17], **{CACHE: cache}).logits
    rest = m(padded[:, 17:], attention_mask=mask[:, :, 17:], **{CACHE: cache}).logits
    close(torch.cat([first, rest], 1)[:, 5:], expected("llama", config, ids))


@torch.no_grad()
def test_own_4d_mask_with_static_cache_raises() -> None:
    m, ids = model("llama", CONFIG), tokens(1)
    cache = static(m, ids)
    with pytest.raises(ValueError, match=r"must be the last keys.*static cache pass a 2-D mask"):
        m(ids, attention_mask=causal(24, 37).roll(-13, -1), **{CACHE: cache})


@torch.no_grad()
def test_own_4d_biases_raise() -> None:
    with pytest.raises(ValueError, match="biases are not supported"):
        model("llama", CONFIG)(tokens(), attention_mask=torch.randn(1, 1, 24, 24), use_cache=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("n", [5, 6, 24])
@torch.no_grad()
def test_own_4d_mask_of_integers_raises(n: int, dtype: torch.dtype) -> None:
    """One of five or six keys is as wide as a mask of ours."""
    with pytest.raises(ValueError, match=rf"must be bool .* or float .*, got {dtype}"):
        model("llama", CONFIG)(tokens(1, n), attention_mask=causal(n).to(dtype), use_cache=False)


@pytest.mark.parametrize("kind", ["bool", "float", "positions"])
@torch.no_grad()
def test_own_4d_mask_may_be_written_to_between_calls(kind: str) -> None:
    m, ids, mask, positions = model("llama", CONFIG), tokens(1), causal(24).clone(), torch.arange(24)[None]
    mask = mask if kind != "float" else torch.zeros(1, 1, 24, 24).masked_fill(~mask, float("-inf"))
    first = m(ids, attention_mask=mask, position_ids=positions).logits
    if kind == "positions":
        positions[:, 9:] += 50
    else:
        mask[..., 9:, :6] = False if kind == "bool" else float("-inf")
    second = m(ids, attention_mask=mask, position_ids=positions).logits
    assert (second - first).abs().max() > 0.1
    close(second, m(ids, attention_mask=mask.clone(), position_ids=positions.clone()).logits, 0.0)


# what transformers does to masks and queries ------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize(
    ("family", "case"),
    [(f, DEFAULT) for f in ("llama", "gemma3", "gemma3n")]
    + crossed((("gemma4", c) for c in CASES if "gemma4" in families(c)), 5),
)
@torch.no_grad()
def test_logits_to_keep(family: str, case: str, keep: int) -> None:
    """Gemma 4 cuts queries and masks, but not position_ids, to the last few."""
    config, ids = CASES[case], tokens()
    want = expected(family, config, ids)[:, -keep:]
    close(model(family, config)(ids, logits_to_keep=keep).logits, want)
    close(model(family, config)(ids, logits_to_keep=keep, use_cache=False).logits, want)
    m = model(family, config)
    cache = static(m, ids)
    m(ids[:, :9], **{CACHE: cache}, logits_to_keep=1)
    close(m(ids[:, 9:], **{CACHE: cache}, logits_to_keep=keep).logits, want)


@torch.no_grad()
def test_packing_needs_use_cache_false() -> None:
    """With a cache transformers does not look for packed sequences, and documents would see each other."""
    a, b = tokens(1, 10), tokens(1, 12, seed=1)
    row, positions = torch.cat([a, b], 1), torch.cat([torch.arange(10), torch.arange(12)])[None]
    m = model("llama", CONFIG)
    close(m(row, position_ids=positions, use_cache=False).logits[:, 10:], expected("llama", CONFIG, b))
    with pytest.raises(ValueError, match="packed documents, they see each other"):
        m(row, position_ids=positions, use_cache=True)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_output_attentions(family: str) -> None:
    """The weights returned are the ones that were used: rows of one, the method's own, no logsumexp in their place."""
    m, ids = fresh(family, CONFIG), tokens()  # transformers leaves hooks behind
    out = m(ids, output_attentions=True, use_cache=False)
    close(out.logits, expected(family, CONFIG, ids))
    assert len(out.attentions) == len(m.base_model.layers if family != "gpt2" else m.transformer.h)
    for weights in out.attentions:
        assert weights.shape == (2, 4, 24, 24)
        close(weights.sum(-1), torch.ones(2, 4, 24), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@torch.no_grad()
def test_output_attentions_compiled(family: str) -> None:
    """gpt2 does not tell its layers that they are asked for."""
    m, ids = fresh(family, CONFIG), tokens(2, 17)
    want = m(ids, output_attentions=True, use_cache=False)
    torch._dynamo.reset()
    got = torch.compile(m, fullgraph=True, backend="eager")(ids, output_attentions=True, use_cache=False)
    close(got.logits, want.logits)
    for ours, theirs in zip(got.attentions, want.attentions, strict=True):
        close(ours, theirs)


@torch.no_grad()
def test_attentions_of_models_that_do_not_tell_their_layers() -> None:
    torch.manual_seed(0)
    m, ids = AutoModelForCausalLM.from_config(tiny(tiny_families()["persimmon"])).eval(), tokens()
    m.set_attn_implementation("eager")
    want = m(ids, output_attentions=True).attentions
    hf_longattn.apply(m, CONFIG, strength=0.0)
    for ours, theirs in zip(m(ids, output_attentions=True).attentions, want, strict=True):
        close(ours, theirs)


@torch.no_grad()
def test_prefix_longer_than_the_ids() -> None:
    """A cache that holds tokens which input_ids never showed, as prefix tuning makes it."""
    config, ids, m = CASES["sinks"], tokens(), model("llama", CASES["sinks"])
    cache = DynamicCache(config=m.config)
    m(ids[:, :5], **{CACHE: cache})
    mask = torch.ones_like(ids)
    close(m(ids[:, 5:], attention_mask=mask, **{CACHE: cache}).logits, expected("llama", config, ids)[:, 5:])


@torch.no_grad()
def test_softcap_acts_on_the_score_before_the_method() -> None:
    """cap, then map: capped after the map, far keys would be lifted. The closed form of the tests says the same."""
    ids = tokens()
    capped = model("gemma2", CONFIG)(ids, use_cache=False).logits
    without = stock("gemma2")
    for module in without.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    hf_longattn.apply(without, CONFIG)
    assert (without(ids, use_cache=False).logits - capped).abs().max() > 0.01
    close(capped, expected("gemma2", CONFIG, ids))


@pytest.mark.parametrize("family", ["llama", "gemma4"])
@torch.no_grad()
def test_batch_rows_do_not_meet(family: str) -> None:
    """A batch of very different paddings, in chunks through a static cache, row by row as if alone."""
    ids, pads = tokens(4, 20), [0, 3, 11, 19]
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    m = model(family, CASES["sinks"])
    out = feed(m, ids, [8, 1, 11], static(m, ids), attention_mask=mask, position_ids=positions)
    for row, pad in enumerate(pads):
        close(out[row : row + 1, pad:], expected(family, CASES["sinks"], ids[row : row + 1, pad:]))


def test_relative_only_scenarios_exist() -> None:
    assert set(SCENARIOS) > RELATIVE_ONLY
