"""Different methods in different layers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SCENARIOS, close, crossed, stock, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.config import names_in
from hf_longattn.integration.config_records import raw_section
from hf_longattn.integration.layers import View, layers_of
from hf_longattn.integration.state import method_of, set_method

preset = LongAttnConfig.preset
NEAR = preset("rerope", window=7, layers=[0, 2])
MAP = preset("scale_invariant", tau=3.0, strength=0.5, layers=[1])
REST = preset("streaming+logn", window=9, sinks=1, train_length=12, learned=True)
WITHOUT_ROTATION = [preset("logn", train_length=12, learned=True), MAP, preset("cosscale", scale=6.0, layers=[0, 2])]


def by_hand(family: str, *configs: LongAttnConfig) -> PreTrainedModel:
    """The reference: each layer under the plan that it has in a model with one of these methods everywhere."""
    m = stock(family)
    plans: dict[int, Any] = {}
    for config in configs:
        hf_longattn.apply(m, config.replace(layers="full_attention", backend="reference"))
        chosen = range(4) if isinstance(config.layers, str) else config.layers
        plans |= {x.index: method_of(x.module) for x in layers_of(m) if x.index in chosen}
    whole = raw_section(m.config)
    for layer in layers_of(m):
        set_method(layer.module, dataclasses.replace(plans[layer.index], whole_config=whole))
    plans[0].state.arrange(View(m))
    return m


@pytest.mark.slow
@pytest.mark.parametrize("family", crossed(["llama", "gpt2"], ["llama"]))
@torch.no_grad()
def test_each_layer_computes_its_own_method(family: str, tmp_path: Path) -> None:
    parts = [REST, MAP, NEAR] if family == "llama" else WITHOUT_ROTATION
    ids, m = tokens(), hf_longattn.apply(stock(family), parts)
    want = by_hand(family, *parts)(ids).logits
    close(m(ids).logits, want)
    for name in ("dynamic_token_by_token", "static_chunks", "left_padded_dynamic_chunks"):
        close(SCENARIOS[name](m, ids), want)
    torch._dynamo.reset()
    close(torch.compile(m, fullgraph=True, backend="eager")(ids, use_cache=False).logits, want)
    out = m.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True, use_cache=True)
    close(torch.stack(out.logits, 1), m(out.sequences[:, :-1], use_cache=False).logits[:, -4:])

    rows = [what for _, what, _ in hf_longattn.describe(m).rows]
    names = (
        ("rerope", "scale_invariant", "rerope", "logn")
        if family == "llama"
        else ("cosscale", "scale_invariant", "cosscale", "logn")
    )
    assert all(name in names_in(row).split("+") for name, row in zip(names, rows, strict=True))
    m.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["attn_implementation"] == "hf_longattn.longattn"
    assert [part["layers"] for part in saved["longattn"]["parts"]] == ["full_attention", [1], [0, 2]]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert hf_longattn.get_config(loaded) == hf_longattn.get_config(m)
    assert torch.equal(loaded(ids).logits, m(ids).logits)


@pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning")
@torch.no_grad()
def test_they_are_changed_and_removed(tmp_path: Path) -> None:
    ids, m = tokens(), hf_longattn.apply(stock("llama"), [NEAR, MAP], backend="reference")
    hf_longattn.update(m, strength=1.0)
    parts = hf_longattn.get_config(m).parts
    assert [x.backend for x in parts] == ["reference"] * 2
    close(m(ids).logits, hf_longattn.apply(stock("llama"), [NEAR, MAP.replace(strength=1.0)])(ids).logits)
    with pytest.raises(TypeError, match=r"config\.longattn was read when the method was put into the model"):
        m.config.longattn["parts"][0]["layers"] = [1]
    stock("llama").save_pretrained(tmp_path)
    section = {"parts": ["rerope:window=7:layers=[0, 2]", MAP.replace(strength=1.0).to_dict()]}
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="longattn", longattn=section)
    close(loaded(ids).logits, m(ids).logits)
    assert torch.equal(hf_longattn.remove(m)(ids).logits, stock("llama")(ids).logits)


@pytest.mark.slow
@torch.no_grad()
def test_graphs_read_each_parts_own_strength() -> None:
    """One number serves a model's graphs where one config has it; parts may differ."""
    ids, m = tokens(), hf_longattn.apply(stock("llama"), "scale_invariant", strength=0.3)
    parts = [MAP, preset("scale_invariant", tau=2.0, strength=0.9, layers=[3])]
    hf_longattn.apply(hf_longattn.remove(m), parts)
    torch._dynamo.reset()
    got = torch.compile(m, fullgraph=True, backend="eager")(ids, use_cache=False).logits
    close(got, hf_longattn.apply(stock("llama"), parts)(ids, use_cache=False).logits)


@torch.no_grad()
def test_parts_may_be_texts_and_dicts() -> None:
    ids, m = tokens(), hf_longattn.apply(stock("llama"), ["rerope:window=7:layers=[0, 2]", MAP.to_dict()])
    assert torch.equal(m(ids).logits, hf_longattn.apply(stock("llama"), [NEAR, MAP])(ids).logits)


@torch.no_grad()
def test_a_second_method_for_some_layers_does_not_take_out_the_first() -> None:
    ids, m = tokens(), hf_longattn.apply(stock("llama"), NEAR)
    before = m(ids).logits
    with pytest.raises(ValueError, match=r"take rerope out of the layers \[0, 2\].*apply\(model, \[config, config\]\)"):
        hf_longattn.apply(m, MAP)
    assert torch.equal(m(ids).logits, before)
    hf_longattn.apply(m, "scale_invariant", layers=[0, 1, 2])  # in the place of all of it
    assert hf_longattn.get_config(m).name == "scale_invariant"
    hf_longattn.update(m, layers=[1])  # said of the method that runs
    assert hf_longattn.get_config(m).layers == (1,)


MISTAKES: dict[str, tuple[Any, str]] = {
    "a layer twice": ([NEAR, preset("alibi", layers=[2, 3])], r"layers \[2\] are in more than one part"),
    "two for the rest": ([preset("alibi"), preset("logn", layers="all")], "alibi and logn would each take all layers"),
    "a part without a method": ([LongAttnConfig(layers=[0]), MAP], "each part is a config with a method"),
    "parts in parts": ([LongAttnConfig(parts=(NEAR, MAP))], "each part is a config with a method and without parts"),
    "two trained lengths": (
        [preset("logn", train_length=5, layers=[0]), preset("logn", train_length=6, layers=[1])],
        "train_length is one for the model, and the parts differ in it, 5 for logn and 6 for logn: give it to one part alone",
    ),
    "no such layer": ([NEAR, preset("alibi", layers=[9])], "layer 9, but the model has layers 0 to 3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_answered(mistake: str) -> None:
    parts, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        hf_longattn.apply(stock("llama"), parts)


def test_parts_in_any_collection_are_the_same_parts() -> None:
    want = LongAttnConfig(parts=(NEAR, MAP))
    assert LongAttnConfig(parts=[NEAR, MAP]) == want  # type: ignore[arg-type]
    assert LongAttnConfig(parts=(part for part in (NEAR, MAP))) == want  # type: ignore[arg-type]
    assert LongAttnConfig(parts=NEAR) == LongAttnConfig(parts=(NEAR,))  # type: ignore[arg-type]


def test_how_long_a_text_is_read_may_stand_in_a_part() -> None:
    m = hf_longattn.apply(stock("llama"), ["rerope:window=6:layers=[0]:extended_to=1k", "alibi"])
    assert (hf_longattn.get_config(m).extended_to, m.config.max_position_embeddings) == (1024, 1024)
    with pytest.raises(ValueError, match="extended_to is one for the model, and the parts differ in it"):
        LongAttnConfig.parse(["rerope:layers=[0]:extended_to=128", "rerope:extended_to=256"])


def test_a_whole_says_of_itself_what_its_parts_say() -> None:
    whole = LongAttnConfig(parts=(NEAR, MAP.replace(backend="tiled")))
    assert (whole.layers, whole.backend, whole.name) == ((0, 1, 2), "auto", "rerope|scale_invariant")
    assert LongAttnConfig.parse(json.loads(json.dumps(whole.to_dict()))) == whole
    assert whole.for_layer(1).logit_map == MAP.logit_map
    assert whole.for_layer(3) == LongAttnConfig()
    with pytest.raises(ValueError, match=r"of one layer, .* config\.for_layer\(i\)"):
        hf_longattn.attention(*torch.zeros(3, 1, 1, 4, 8), whole)
    with pytest.raises(ValueError, match="leave it to them"):
        LongAttnConfig(parts=(NEAR, MAP), layers=[3])
    with pytest.raises(ValueError, match="positions is filled beside parts"):
        LongAttnConfig(parts=(MAP,), positions=NEAR.positions)
    with pytest.raises(ValueError, match=r"no part of .* has a parameter 'epsilon'"):
        whole.replace(epsilon=0.1)
