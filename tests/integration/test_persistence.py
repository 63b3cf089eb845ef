"""What a method leaves in a model, in its config and on disk, and how it goes away again."""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import pickle
import subprocess
import sys
import warnings
import weakref
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, DEFAULT, FAMILIES, model_config
from helpers import (
    close,
    crossed,
    disturbed,
    expected,
    feed,
    fresh,
    logits,
    model,
    multimodal,
    picture,
    python,
    stock,
    tokens,
    write_gguf,
)
from torch import Tensor
from torch.nn.parallel.replicate import replicate
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Lfm2Config,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.model import running
from hf_longattn.integration.resume import refuse_other_attention
from hf_longattn.integration.state import state_of

CONFIG = CASES["sinks"]
SECTION = {"tau": 3.0, "sink_tokens": 2}


def saved(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def longattn_keys(path: Path) -> set[str]:
    return {"attn_implementation", "longattn", "_longattn"} & saved(path).keys()


# saving and loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "case"), crossed([*((f, "sinks") for f in FAMILIES), *(("llama", c) for c in CASES)], 5))
def test_save_and_load_twice(family: str, case: str, tmp_path: Path) -> None:
    config = CASES[case]
    m, want = model(family, config), logits(model(family, config))
    for step in ("first", "second"):
        m.save_pretrained(tmp_path / step)
        section = saved(tmp_path / step)
        assert section["attn_implementation"].startswith("hf_longattn.")
        assert LongAttnConfig.parse(section["longattn"]) == hf_longattn.get_config(m)
        m = AutoModelForCausalLM.from_pretrained(tmp_path / step)
        assert hf_longattn.get_config(m) == hf_longattn.get_config(model(family, config))
        assert torch.equal(logits(m), want)
        close(want, expected(family, config, tokens()))


def test_adding_and_dropping_by_set_attn_implementation(tmp_path: Path) -> None:
    m, plain = stock("llama"), logits(stock("llama"))
    m.set_attn_implementation("scale_invariant")
    close(logits(m), expected("llama", CASES[DEFAULT], tokens()))
    m.save_pretrained(tmp_path / "on")
    assert longattn_keys(tmp_path / "on") == {"attn_implementation", "longattn"}
    m.set_attn_implementation("sdpa")
    close(logits(m), plain)
    m.save_pretrained(tmp_path / "off")
    assert longattn_keys(tmp_path / "off") == set()
    m.set_attn_implementation("scale_invariant")
    close(logits(m), expected("llama", CASES[DEFAULT], tokens()))


def test_canonical_name_by_hand() -> None:
    m = stock("llama")
    m.set_attn_implementation("hf_longattn.scale_invariant")
    close(logits(m), expected("llama", CASES[DEFAULT], tokens()))


@pytest.mark.parametrize("section", [None, SECTION, CONFIG.to_dict(), CONFIG])
@pytest.mark.parametrize("name", ["scale_invariant", "hf_longattn.scale_invariant"])
def test_load_a_base_with_the_method(section: Any, name: str, base: Path) -> None:
    extra = {} if section is None else {"longattn": section}
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation=name, **extra)
    close(logits(m), expected("llama", CASES[DEFAULT] if section is None else CONFIG, tokens()))
    assert isinstance(m.config.longattn, dict)
    json.dumps(m.config.longattn)


SWITCHED = ["switched", "switched from scale_invariant:tau=50", "switched from rerope"]


@pytest.mark.parametrize(
    "way", ["loaded", "copied", "from a config", *SWITCHED, "applied", "over a checkpoint's own", "in parts"]
)
def test_the_name_that_a_running_model_gives_brings_its_method(way: str, base: Path, tmp_path: Path) -> None:
    """By it TRL's DPO and GRPO load the reference model from the policy's base."""
    parts = [CONFIG.replace(layers=[0, 1]), "logn:learned=true:train_length=4"]
    m = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), parts if way == "in parts" else CONFIG)
    name = m.config._attn_implementation
    if way == "from a config":
        again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), attn_implementation=name)
        again.load_state_dict(m.state_dict())
    elif way in SWITCHED:
        again = AutoModelForCausalLM.from_pretrained(base)
        if way != "switched":
            hf_longattn.apply(again, way.removeprefix("switched from "))
        again.set_attn_implementation(name)
        again.set_attn_implementation(again.config._attn_implementation)
    elif way == "applied":
        again = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), name)
    else:
        if way == "over a checkpoint's own":
            hf_longattn.apply(stock("llama"), "scale_invariant", tau=50.0).save_pretrained(base := tmp_path / "other")
        again = AutoModelForCausalLM.from_pretrained(
            base, attn_implementation=copy.deepcopy(name) if way == "copied" else name
        )
    assert hf_longattn.get_config(again) == hf_longattn.get_config(m)
    assert torch.equal(logits(again), logits(m))


def test_the_name_that_a_running_model_gives_brings_no_numbers_to_a_model_of_another_length(tmp_path: Path) -> None:
    name = hf_longattn.apply(stock("llama"), "rerope", window=100).config._attn_implementation
    stock("llama", max_position_embeddings=128).save_pretrained(tmp_path)
    shorter = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert hf_longattn.get_config(shorter) == hf_longattn.get_config(hf_longattn.apply(shorter, "rerope"))
    assert hf_longattn.get_config(hf_longattn.apply(shorter, name)) == hf_longattn.get_config(shorter)


def test_a_checkpoints_name_of_a_method_is_one(base: Path) -> None:
    """As config.json has it, wherever a method is named."""
    assert LongAttnConfig.parse("hf_longattn.rerope+infoscale:window=9") == LongAttnConfig.parse("rerope+infoscale:window=9")
    m = hf_longattn.extend(AutoModelForCausalLM.from_pretrained(base), to=1024, method="hf_longattn.leaky_rerope")
    assert [x.name for x in hf_longattn.get_config(m).methods] == ["leaky_rerope"]
    with pytest.raises(ValueError, match="unknown method 'hf'"):
        LongAttnConfig.parse("hf")


def test_parameters_beside_a_name_that_brings_its_method_are_those_that_were_typed(base: Path) -> None:
    name = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), CONFIG).config._attn_implementation
    typed = AutoModelForCausalLM.from_pretrained(base, attn_implementation=name, longattn={"tau": 7.0})
    assert hf_longattn.get_config(typed).methods == LongAttnConfig.preset("scale_invariant", tau=7.0).methods


@pytest.mark.parametrize("way", ["loaded", "from a config", "switched"])
def test_a_name_may_have_its_parameters_behind_it(way: str, base: Path, tmp_path: Path) -> None:
    text = ":".join(["scale_invariant", *(f"{key}={value}" for key, value in SECTION.items())])
    if way == "loaded":
        m = AutoModelForCausalLM.from_pretrained(base, attn_implementation=text)
    elif way == "from a config":
        config = AutoConfig.from_pretrained(base, attn_implementation=text)
        m = AutoModelForCausalLM.from_pretrained(base, config=config)
    else:
        m = AutoModelForCausalLM.from_pretrained(base)
        m.set_attn_implementation(text)
    assert m.config._attn_implementation == "scale_invariant"
    close(logits(m), expected("llama", CONFIG, tokens()))
    m.save_pretrained(tmp_path)
    assert hf_longattn.get_config(AutoModelForCausalLM.from_pretrained(tmp_path)) == hf_longattn.get_config(m)
    m.set_attn_implementation("scale_invariant:tau=3")
    close(logits(m), expected("llama", LongAttnConfig.preset("scale_invariant", tau=3), tokens()))
    m.set_attn_implementation("cosscale + infoscale")
    assert hf_longattn.get_config(m).name == "cosscale+infoscale"
    m.set_attn_implementation("sdpa")
    m.set_attn_implementation("cosscale + infoscale")  # the one that was there
    assert hf_longattn.get_config(m).name == "cosscale+infoscale"
    for text in ("scale_invariant:tau=5", "scale_invariant:tau=7", "alibi"):
        m.set_attn_implementation("eager")
        m.set_attn_implementation(text)
        close(logits(m), expected("llama", LongAttnConfig.parse(text), tokens()), what=text)
    with pytest.raises(ValueError, match=r"load it as it is, and then hf_longattn\.apply"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="scale_invariant:tau=3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale_invariant:tua=3", "did you mean 'tau'"),
        ("scale_invariant@yarn:2", r"leave out @yarn:2, and see hf_longattn\.rope"),
        ("scale_invarant:tau=3", "did you mean 'scale_invariant'"),
        ("scale_invariant:tau", "is not key=value"),
        ("scale_invariant:tau=3:tau=4", "tau is given twice"),
        ("scale_invariant:tau=3, sink_tokens=2", "between colons: scale_invariant:tau=3:sink_tokens=2 in place of"),
        (f"scale_invariant:tau={10**400}", "tau holds an integer that no tensor can"),
        (f"scale_invariant:logit_mean=[[1, -{10**400}]]", "logit_mean holds an integer that no tensor can"),
    ],
)
def test_a_name_with_parameters_that_are_wrong(text: str, message: str, base: Path) -> None:
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(base, attn_implementation=text)


def test_load_in_bfloat16(base: Path, tmp_path: Path) -> None:
    model("llama", CONFIG).save_pretrained(tmp_path)
    m = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert m.dtype == torch.bfloat16
    assert hf_longattn.get_config(m) == hf_longattn.get_config(model("llama", CONFIG))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    assert torch.equal(logits(m), logits(hf_longattn.apply(plain, CONFIG)))


@pytest.mark.slow
@torch.no_grad()
def test_an_implementation_of_none_keeps_the_checkpoints_own(tmp_path: Path) -> None:
    """None means "I have no wish": command lines pass it on when their user said nothing."""
    model("llama", CONFIG).save_pretrained(tmp_path)
    config, want = AutoConfig.from_pretrained(tmp_path), expected("llama", CONFIG, tokens())
    loaded = [
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=None),
        LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=None),
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation=None),
        LlamaForCausalLM.from_pretrained(
            tmp_path, config=AutoConfig.from_pretrained(tmp_path, attn_implementation=None), attn_implementation=None
        ),
        AutoModelForCausalLM.from_config(config, attn_implementation=None),
    ]
    loaded[-1].load_state_dict(stock("llama").state_dict())
    for m in loaded:
        close(logits(m), want)
    with pytest.warns(UserWarning, match="config.longattn is set, but the model runs 'sdpa'"):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(logits(plain), logits(stock("llama")))


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_an_attention_that_a_trainer_brings_does_not_take_the_method_s_place(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's AsyncGRPO loads every checkpoint under its "tree_fa3"."""
    for interface, function in ((AttentionInterface, lambda *_, **__: None), (AttentionMaskInterface, lambda **_: None)):
        monkeypatch.setitem(interface._global_mapping, "tree_attention", function)
    m = hf_longattn.apply(stock("llama") if kind == "text" else multimodal(), CONFIG)
    m.save_pretrained(tmp_path)
    load = type(m).from_pretrained
    names: list[Any] = ["tree_attention"] + [{"text_config": "tree_attention"}] * (kind == "pictures")
    for name in names:
        for given in ({}, {"config": AutoConfig.from_pretrained(tmp_path)}):
            with pytest.raises(ValueError, match=r"made under scale_invariant, and attn_implementation='tree_attention'"):
                load(tmp_path, attn_implementation=name, **given)
    hf_longattn.remove(m).save_pretrained(tmp_path / "plain")
    assert load(tmp_path / "plain", attn_implementation="tree_attention") is not None


@pytest.mark.parametrize("name", ["vllm", "vllm_mla"])
def test_vllm_s_attention_is_where_it_puts_the_method_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds models under names of its own, and our part of it then gives the layers their method."""
    monkeypatch.setitem(AttentionInterface._global_mapping, name, lambda *_, **__: None)
    hf_longattn.apply(stock("llama"), CONFIG).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    assert built.config._attn_implementation == name


def test_an_implementation_of_none_elsewhere_is_the_default(base: Path) -> None:
    for m in (
        AutoModelForCausalLM.from_pretrained(base, attn_implementation=None),
        AutoModelForCausalLM.from_config(model_config("llama", attn_implementation="eager"), attn_implementation=None),
    ):
        assert m.config._attn_implementation == "sdpa"


def test_a_section_beside_a_config(base: Path) -> None:
    config = AutoConfig.from_pretrained(base)
    made = [
        AutoModelForCausalLM.from_pretrained(base, config=config, attn_implementation="scale_invariant", longattn=SECTION),
        LlamaForCausalLM.from_pretrained(base, config=config, attn_implementation="scale_invariant", longattn=SECTION),
        AutoModelForCausalLM.from_config(config, attn_implementation="scale_invariant", longattn=SECTION),
        AutoModelForCausalLM.from_config(config, attn_implementation="scale_invariant", longattn=CONFIG),
    ]
    for m in made:
        m.load_state_dict(stock("llama").state_dict())
        close(logits(m), expected("llama", CONFIG, tokens()))
    assert config.longattn is None  # the caller's own
    assert "longattn" not in config.to_dict()
    with pytest.raises(ValueError, match="no parameter 'tua'"):
        AutoModelForCausalLM.from_config(config, attn_implementation="scale_invariant", longattn={"tua": 3.0})


def test_from_config_and_direct_construction() -> None:
    config = model_config("llama")
    made = [
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="scale_invariant"),
        LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="scale_invariant"),
        LlamaForCausalLM(model_config("llama", attn_implementation="scale_invariant")),
        AutoModelForCausalLM.from_config(hf_longattn.apply(stock("llama"), CASES[DEFAULT]).config),
    ]
    for m in made:
        m.load_state_dict(stock("llama").state_dict())
        close(logits(m), expected("llama", CASES[DEFAULT], tokens()))


def test_copies(tmp_path: Path) -> None:
    m = model("llama", CONFIG)
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(m), pickle.loads(pickle.dumps(m)), torch.load(buffer, weights_only=False)]
    for c in copies:
        assert torch.equal(logits(c), logits(m))
        hf_longattn.update(c, tau=50.0)  # the original must not notice
        assert (logits(c) - logits(m)).abs().max() > 1e-3
    close(logits(m), expected("llama", CONFIG, tokens()))
    for c in (copy.deepcopy(m.config), pickle.loads(pickle.dumps(m.config))):
        assert c.to_dict() == m.config.to_dict()
    m.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).longattn == m.config.longattn


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("case", ["rerope", "logn_learned"])
def test_replicas_of_data_parallel(case: str, called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shallow copies of all modules, for one step: they compute what the model does, and leave nothing in it."""

    def on_one_device(tensors: Any, devices: Any, detach: bool = False) -> Any:
        return [[t.view_as(t) for t in tensors] for _ in devices]

    monkeypatch.setitem(replicate.__globals__, "_broadcast_coalesced_reshape", on_one_device)
    m = disturbed(fresh("llama", CASES[case]), only="longattn")
    if called:
        logits(m)
    got = [logits(r) for r in replicate(m, [0, 0])]
    state = state_of(m)
    assert state is not None
    assert state.arrangement is None or all(c is m.config for c, _ in state.arrangement.described)
    for x in (*got, *(logits(r) for r in replicate(hf_longattn.update(m, backend="reference"), [0, 0]))):
        close(x, logits(m))


def test_saved_section_survives_a_json_round_trip_of_the_config() -> None:
    m = model("llama", CASES["calibrated"])
    data = json.loads(m.config.to_json_string())
    assert LongAttnConfig.parse(data["longattn"]) == CASES["calibrated"]
    assert data["attn_implementation"] == "hf_longattn.scale_invariant"
    assert "longattn" not in stock("llama").config.to_dict()


@pytest.mark.slow
def test_trainer_checkpoint(tmp_path: Path) -> None:
    m = fresh("llama", CONFIG)
    data = [{"input_ids": x, "labels": x} for x in tokens(4, 12)]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model=m, args=arguments, train_dataset=data).train()  # type: ignore[arg-type]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(logits(loaded), logits(m))
    assert hf_longattn.get_config(loaded) == hf_longattn.get_config(m)
    resumed = Trainer(model=fresh("llama", CONFIG), args=arguments, train_dataset=data)  # type: ignore[arg-type]
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    close(logits(resumed.model), logits(m), 1e-6)


METHODS_THEN_AND_NOW = {
    "plain goes on from rerope": ("rerope", None, "'rerope'.*the model runs no method"),
    "rerope goes on from plain": (None, "rerope", "no method of hf_longattn.*'rerope'"),
    "alibi goes on from rerope": ("rerope", "alibi", "'rerope'.*'alibi'"),
    "another window": ("rerope", "rerope wider", ".*'window': 7.*'window': 9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS_THEN_AND_NOW)
def test_trainer_refuses_to_go_on_under_another_attention(kind: str, tmp_path: Path) -> None:
    then, now, message = METHODS_THEN_AND_NOW[kind]
    configs = CASES | {"rerope wider": CASES["rerope"].replace(window=9)}
    data = [{"input_ids": x, "labels": x} for x in tokens(4, 12)]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )

    def trainer(case: str | None) -> Trainer:
        m = stock("llama") if case is None else fresh("llama", configs[case])
        return Trainer(model=m, args=arguments, train_dataset=data)  # type: ignore[arg-type]

    trainer(then).train()
    with pytest.raises(ValueError, match=f"trained under {message}.*from the checkpoint's weights"):
        trainer(now).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer(then).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_trainer_refuses_to_go_on_under_other_rotary_settings(tmp_path: Path) -> None:
    m, other = fresh("llama", CASES["infoscale"]), fresh("llama", CASES["infoscale"])
    m.save_pretrained(tmp_path)
    refuse_other_attention(other, tmp_path)
    other.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=r"rope_parameters .*'default'.* and the model has .*'linear'"):
        refuse_other_attention(other, tmp_path)


# composite models ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["apply", "name for all", "name by part"])
def test_composite(how: str, tmp_path: Path) -> None:
    m = multimodal()
    if how == "apply":
        hf_longattn.apply(m, "scale_invariant")
    else:
        m.set_attn_implementation("scale_invariant" if how == "name for all" else {"text_config": "scale_invariant"})
    want = logits(m, **picture())
    for step in ("first", "second"):
        m.save_pretrained(tmp_path / step)
        top = saved(tmp_path / step)
        assert top["attn_implementation"] == {"text_config": "hf_longattn.scale_invariant"}
        assert "attn_implementation" not in top["text_config"]
        assert "attn_implementation" not in top["vision_config"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            m = AutoModelForImageTextToText.from_pretrained(tmp_path / step)
        close(logits(m, **picture()), want, 1e-6)
        assert m.config.text_config._attn_implementation == "hf_longattn.scale_invariant"
        assert m.config.vision_config._attn_implementation == "sdpa"
        assert m.config.text_config.longattn == m.config.longattn
    hf_longattn.remove(m)
    m.save_pretrained(tmp_path / "off")
    assert longattn_keys(tmp_path / "off") == set()
    assert torch.equal(
        logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "off"), **picture()), logits(m, **picture())
    )
    close(logits(m, **picture()), logits(multimodal(), **picture()), 1e-6)


@pytest.mark.slow
def test_composite_with_an_implementation_of_none(tmp_path: Path) -> None:
    ours = hf_longattn.apply(multimodal(), CONFIG)
    ours.save_pretrained(tmp_path)
    for extra in ({}, {"config": AutoConfig.from_pretrained(tmp_path)}):
        m = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=None, **extra)
        close(logits(m, **picture()), logits(ours, **picture()), 1e-6)
        assert m.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_composite_load_with_parameters(tmp_path: Path) -> None:
    multimodal().save_pretrained(tmp_path)
    want = logits(hf_longattn.apply(multimodal(), CONFIG), **picture())
    base = AutoConfig.from_pretrained(tmp_path)
    m = AutoModelForImageTextToText.from_pretrained(
        tmp_path, config=base, attn_implementation={"text_config": "scale_invariant"}, longattn=SECTION
    )
    close(logits(m, **picture()), want, 1e-6)
    for name in ("scale_invariant", {"text_config": "scale_invariant"}):
        m = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=name, longattn=SECTION)
        close(logits(m, **picture()), want, 1e-6)


def build(how: str, folder: Path, implementation: Any, auto: Any = AutoModelForCausalLM) -> Any:
    if how == "from_config":
        return auto.from_config(AutoConfig.from_pretrained(folder), attn_implementation=implementation)
    if how == "config":
        return auto.from_config(AutoConfig.from_pretrained(folder, attn_implementation=implementation))
    m = auto.from_pretrained(folder, **({"attn_implementation": implementation} if how == "from_pretrained" else {}))
    if how == "set":
        m.set_attn_implementation(implementation)
    return m


@pytest.mark.parametrize("how", ["from_pretrained", "from_config", "config", "set"])
@pytest.mark.parametrize("of_all", [False, True])
def test_the_name_that_a_running_whole_gives_brings_the_method_of_its_part(how: str, of_all: bool, tmp_path: Path) -> None:
    multimodal().save_pretrained(tmp_path)
    m = hf_longattn.apply(multimodal(), CONFIG)
    if of_all:
        m = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="scale_invariant", longattn=SECTION)
    again = build(how, tmp_path, m.config._attn_implementation, AutoModelForImageTextToText)
    again.load_state_dict(m.state_dict())
    assert hf_longattn.get_config(again) == hf_longattn.get_config(m)
    assert torch.equal(logits(again, **picture()), logits(m, **picture()))
    assert again.config.vision_config._attn_implementation == m.config.vision_config._attn_implementation
    m.set_attn_implementation(m.config._attn_implementation)
    assert hf_longattn.get_config(again) == hf_longattn.get_config(m)
    hf_longattn.remove(m)
    assert type(m.config._attn_implementation) is str


@pytest.mark.parametrize("how", ["from_pretrained", "from_config", "config", "set"])
def test_a_dict_by_part_is_acted_on_or_refused(how: str, base: Path, tmp_path: Path) -> None:
    """transformers passes over the keys that are no part of a config; a method would be lost with them."""
    multimodal().save_pretrained(tmp_path)
    assert running(build(how, base, {"text_config": "rerope"})).name == "rerope"
    assert running(build(how, base, {"text_config": "rerope", "vision_config": "eager"})).name == "rerope"
    assert running(build(how, base, {"": "rerope"})).name == "rerope"
    assert build(how, base, {"text_config": "eager"}).config._attn_implementation == "eager"
    assert running(build(how, base, {"vision_config": "eager"})) is None
    for folder, auto, has in (
        (base, AutoModelForCausalLM, "no parts"),
        (tmp_path, AutoModelForImageTextToText, "text_config"),
    ):
        with pytest.raises(ValueError, match=rf"'text'.*does not have: .*{has}"):
            build(how, folder, {"text": "rerope"}, auto)
    m = build(how, tmp_path, {"text_config": "rerope", "vision_config": "eager"}, AutoModelForImageTextToText)
    assert (running(m).name, m.config.vision_config._attn_implementation) == ("rerope", "eager")


@pytest.mark.parametrize("how", ["from_pretrained", "config", "set"])
def test_a_part_that_is_not_named_stays_as_it_was_saved(how: str, tmp_path: Path) -> None:
    hf_longattn.extend(multimodal(), 2048).save_pretrained(tmp_path)
    m = build(how, tmp_path, {"vision_config": "eager"}, AutoModelForImageTextToText)
    assert m.config.vision_config._attn_implementation == "eager"
    assert (running(m).extended_to, m.config.text_config.max_position_embeddings) == (2048, 2048)
    m = build(how, tmp_path, {"text_config": "eager"}, AutoModelForImageTextToText)
    assert (running(m), m.config.text_config.max_position_embeddings) == (None, 512)


# adapters -----------------------------------------------------------------------------------------------------------


def test_lora(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    plain = logits(adapted)
    assert hf_longattn.apply(adapted, CONFIG) is adapted
    want = logits(adapted)
    assert (want - plain).abs().max() > 0.1
    adapted.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(base, attn_implementation="scale_invariant", longattn=SECTION)
    close(logits(peft.PeftModel.from_pretrained(loaded, tmp_path)), want, 1e-6)
    close(logits(copy.deepcopy(adapted).merge_and_unload()), want)
    assert "LlamaForCausalLM: scale_invariant" in str(hf_longattn.describe(adapted))
    close(logits(hf_longattn.remove(adapted)), plain, 1e-6)


# GGUF ---------------------------------------------------------------------------------------------------------------


def test_gguf(tmp_path: Path) -> None:
    """A GGUF file has no place for our section; the keyword puts the method in."""
    pytest.importorskip("gguf")
    write_gguf(stock("llama"), tmp_path / "m.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", attn_implementation="scale_invariant", longattn=SECTION, dtype=torch.float32
    )
    close(logits(loaded), expected("llama", CONFIG, tokens()), 1e-4)


@pytest.mark.parametrize(
    "method", ["rerope:window=7", "scale_invariant", "attention_sink", "logn:learned=true:train_length=8"]
)
def test_gguf_in_packed_blocks(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that stay as GGUF's blocks; the kernel that multiplies by them is pretended."""
    pytest.importorskip("gguf")
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")
    from transformers import GgufConfig
    from transformers.integrations.gguf.dequant import dequantize

    def unpack(blocks: Tensor, kind: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return dequantize(blocks, kind, dtype).reshape(rows, columns)

    def multiply(blocks: Tensor, x: Tensor, kind: int, rows: int) -> Tensor:
        return x @ unpack(blocks, kind, rows, x.shape[-1], x.dtype).T

    functions = {"mul_mat_vec": multiply, "dequantize": unpack, "get_rows": None, "mul_mat_id": None, "GEMV_TYPES": {8}}
    monkeypatch.setattr(kernels, "_gguf_kernel", kernels.GgufKernel(SimpleNamespace(**functions)))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(Lfm2Config(**sizes, block_auto_adjust_ff_dim=False))
    write_gguf(made, tmp_path / "m.gguf", quantised=True)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    dense = load(quantization_config=GgufConfig(dequantize=True))
    packed = load(quantization_config=GgufConfig(), attn_implementation=method)
    if type(packed.model.layers[1].self_attn.q_proj).__name__ != "GgufLinear":
        assert tuple(map(int, version("transformers").split(".")[:2])) < (5, 24)
        pytest.skip("this release unpacks the weights as it loads them")
    plain = logits(dense)
    close(logits(packed), want := logits(hf_longattn.apply(dense, method)))
    assert (want - plain).abs().max() > 1e-4
    with torch.no_grad():
        close(feed(packed, tokens(), [16, *[1] * 8]), want)
    close(logits(hf_longattn.remove(packed)), plain)


# without the package, and in any order ------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_the_package_loading_fails_and_names_it(tmp_path: Path) -> None:
    hf_longattn.apply(stock("llama"), CONFIG).save_pretrained(tmp_path / "AutoModelForCausalLM")
    hf_longattn.apply(multimodal(), CONFIG).save_pretrained(tmp_path / "AutoModelForImageTextToText")
    result = python(
        """
        import sys, transformers
        for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
            try:
                getattr(transformers, name).from_pretrained(sys.argv[1] + "/" + name)
            except ValueError as error:
                print("ValueError", "hf_longattn.scale_invariant" in str(error))
        """,
        tmp_path,
    )
    assert result.stdout.splitlines() == ["ValueError True"] * 2, result.stderr


@pytest.mark.slow
def test_imports_in_any_order_and_twice(base: Path) -> None:
    """The package after a model was made, reloaded, and its modules imported anew: one wrapper each, and it works."""
    result = python(
        """
        import sys
        from transformers import AutoModelForCausalLM, PreTrainedModel
        m = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        before = PreTrainedModel.post_init
        import hf_longattn, hf_longattn.integration.patches as seams
        wrapped = PreTrainedModel.post_init
        assert wrapped.__wrapped__ is before
        import importlib
        importlib.reload(hf_longattn)
        importlib.reload(seams)
        hf_longattn.integration.patch.install(*seams.PATCHES)
        assert PreTrainedModel.post_init is wrapped
        hf_longattn.apply(m, "scale_invariant", tau=3.0, sink_tokens=2)
        n = AutoModelForCausalLM.from_pretrained(
            sys.argv[1], attn_implementation="scale_invariant", longattn={"tau": 3.0, "sink_tokens": 2}
        )
        import torch
        ids = torch.arange(1, 20)[None]
        assert torch.equal(m(ids).logits, n(ids).logits)
        print(float(n(ids).logits.double().sum()))
        """,
        base,
    )
    assert result.returncode == 0, result.stderr
    with torch.no_grad():
        want = model("llama", CONFIG)(torch.arange(1, 20)[None]).logits.double().sum()
    assert float(result.stdout.split()[-1]) == pytest.approx(float(want), abs=1e-2)


# disagreements and mistakes -----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "name and section disagree": ("cosscale", {"longattn": CONFIG.to_dict()}, "cosscale.*scale_invariant"),
    "unknown parameter": ("scale_invariant", {"longattn": {"tua": 3.0}}, "no parameter 'tua'"),
    "bad tau": ("scale_invariant", {"longattn": {"tau": -3.0}}, "tau must be"),
    "layer that does not exist": ("scale_invariant", {"longattn": {"layers": [7]}}, "layer 7.*0 to 3"),
    "wrong shape": ("scale_invariant", {"longattn": {"logit_variance": [[1.0, 2.0]]}}, r"logit_variance.*\(4, 4\)"),
    "nothing to do": ("longattn", {}, "fills no slot"),
    "section of a wrong type": ("scale_invariant", {"longattn": [3.0]}, "must be a dict"),
}


@pytest.mark.parametrize("what", WRONG)
def test_loading_fails_at_once(what: str, base: Path) -> None:
    name, extra, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(base, attn_implementation=name, **extra)


def test_unknown_implementation_is_refused_by_transformers(base: Path) -> None:
    with pytest.raises(ValueError, match="scale_variant"):
        AutoModelForCausalLM.from_pretrained(base, attn_implementation="scale_variant")


def test_section_without_the_implementation_is_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="needs the name of its method beside it"):
        AutoModelForCausalLM.from_pretrained(base, longattn=SECTION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", hf_longattn.UntrainedWarning)
        AutoModelForCausalLM.from_pretrained(base)
        AutoModelForCausalLM.from_pretrained(base, attn_implementation="scale_invariant", longattn=SECTION)


FAILING: dict[str, Any] = {
    "unknown layer": lambda m: hf_longattn.apply(m, "scale_invariant", layers=[1, 9]),
    "unknown method": lambda m: hf_longattn.apply(m, "scale_variant"),
    "wrong shape": lambda m: hf_longattn.apply(m, "scale_invariant", logit_mean=[[1.0]]),
    "no method": lambda m: hf_longattn.apply(m, LongAttnConfig()),
    "bad update": lambda m: hf_longattn.update(m, tau=-1.0),
    "by name": lambda m: m.set_attn_implementation("longattn"),
}


@pytest.mark.parametrize("method", [None, "sinks"])
@pytest.mark.parametrize("what", FAILING)
def test_a_failed_change_changes_nothing(what: str, method: str | None, tmp_path: Path) -> None:
    m = stock("llama") if method is None else fresh("llama", CASES[method])
    if what == "by name" and method is not None:
        m.config.longattn = {"tau": -1.0}  # someone wrote into the config; then the name is set again
        plan = m.model.layers[0].self_attn._longattn
        with pytest.raises(ValueError, match="tau"):
            m.set_attn_implementation("scale_invariant")
        assert m.model.layers[0].self_attn.__dict__.get("_longattn") in (plan, None)
        return
    before, config = logits(m), m.config.to_dict()
    with pytest.raises(ValueError):  # noqa: PT011
        FAILING[what](m)
    assert torch.equal(logits(m), before)
    assert m.config.to_dict() == config


def attention(m: Any) -> list[Any]:
    return [x.self_attn for x in m.model.layers]


def everything(m: Any) -> list[Any]:
    """All that a change could touch, by identity where a copy would not do."""
    hooks = [(*x._forward_pre_hooks.values(), *x._forward_hooks.values()) for x in m.modules()]
    parts = [(name, id(x), x.training, id(x.__dict__.get("_longattn"))) for name, x in m.named_modules()]
    entries = sorted((name, id(value)) for name, value in m.config.__dict__.items())
    return [hooks, parts, entries, [id(p) for p in m.parameters()], str(hf_longattn.describe(m))]


#: What runs, and a change that an unknown rotation or a warning which is an error refuses.
REFUSED: dict[str, tuple[LongAttnConfig | None, Any]] = {
    "apply": (CASES["output_layer_norm"], lambda m: hf_longattn.apply(m, "rerope", window=7)),
    "apply first": (None, lambda m: hf_longattn.apply(m, "rerope", window=7)),
    "name": (CASES["output_layer_norm"], lambda m: m.set_attn_implementation("rerope")),
    "name first": (None, lambda m: m.set_attn_implementation("rerope")),
    "warning": (None, lambda m: hf_longattn.apply(m, "scale_invariant")),
    "warning of a name": (CASES["logn"], lambda m: m.set_attn_implementation("cosscale")),
    "warning of a strength": (CASES[DEFAULT].replace(strength=0.0), lambda m: hf_longattn.update(m, strength=0.5)),
    "trained parameters": (CASES["output_layer_norm"], hf_longattn.remove),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_change_leaves_the_same_objects(what: str) -> None:
    """Trained parts, plans, hooks, flags and the config's entries are those before."""
    config, change = REFUSED[what]
    m = stock("llama") if config is None else fresh("llama", config)
    m.__dict__["name_or_path"] = "somewhere"
    inner = m.model.rotary_emb.forward
    m.model.rotary_emb.forward = lambda x, position_ids: tuple(y.flip(-1) for y in inner(x, position_ids))
    for name, p in m.named_parameters():
        if "longattn" in name:
            torch.nn.init.normal_(p)
    if "name" in what:
        m.config.longattn = None
    m.model.layers[1].train()
    before = everything(m)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, UserWarning), match=r"does not give what|not trained|dropping the trained"):
            change(m)
    assert everything(m) == before


def test_verification_leaves_every_modules_mode(base: Path) -> None:
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7}).train()
    m.model.layers[1].eval()
    before = [x.training for x in m.modules()]
    m(tokens())
    assert [x.training for x in m.modules()] == before


# applying, removing, describing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_remove_restores(family: str, tmp_path: Path) -> None:
    m, plain = stock(family), stock(family)
    for _ in range(2):
        assert hf_longattn.apply(m, CONFIG) is m
        assert (logits(m) - logits(plain)).abs().max() > 0.1
        assert hf_longattn.remove(m) is m
        assert torch.equal(logits(m), logits(plain))
        assert m.config._attn_implementation == plain.config._attn_implementation
    m.save_pretrained(tmp_path)
    assert longattn_keys(tmp_path) == set()
    assert not any("longattn" in key for module in m.modules() for key in module.__dict__)
    with pytest.raises(ValueError, match="nothing to remove"):
        hf_longattn.remove(m)


def test_remove_restores_eager() -> None:
    m = stock("llama")
    m.set_attn_implementation("eager")
    hf_longattn.apply(m, CONFIG)
    hf_longattn.apply(m, CASES[DEFAULT])
    assert hf_longattn.remove(m).config._attn_implementation == "eager"


def test_remove_after_loading_with_the_method(base: Path) -> None:
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="scale_invariant")
    assert hf_longattn.remove(m).config._attn_implementation == "sdpa"
    assert torch.equal(logits(m), logits(stock("llama")))


def test_update_during_training() -> None:
    m = fresh("llama", CASES[DEFAULT])
    for strength in (0.0, 0.5, 1.0):
        hf_longattn.update(m, strength=strength)
        assert hf_longattn.get_config(m) == CASES[DEFAULT].replace(strength=strength)
        close(logits(m), expected("llama", CASES[DEFAULT].replace(strength=strength), tokens()))
    close(logits(hf_longattn.update(m, strength=0.0)), logits(stock("llama")))
    with pytest.raises(ValueError, match="not an hf_longattn method"):
        hf_longattn.update(stock("llama"), strength=0.5)


def test_a_strength_needs_no_forward_pass_and_no_new_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LongAttnConfig.preset("rerope+scale_invariant", window=7, strength=0.1)
    m, path = fresh("llama", config), "hf_longattn.integration"
    calls: list[str] = []
    m.register_forward_pre_hook(lambda *_: calls.append("forward"))
    m.model.register_forward_pre_hook(lambda *_: calls.append("inner forward"))
    for name in ("layer_methods._layer_methods", "layer_methods.verify_rotations"):
        monkeypatch.setattr(f"{path}.{name}", lambda *_, name=name, **__: calls.append(name))
    for strength in (0.5, 0.75):
        hf_longattn.update(m, strength=strength)
        assert f"strength={strength}" in str(hf_longattn.describe(m))
        assert m.config.to_dict()["longattn"]["logit_map"]["strength"] == strength
    assert calls == []
    monkeypatch.undo()
    assert torch.equal(logits(m), logits(hf_longattn.apply(stock("llama"), config.replace(strength=0.75))))
    calls.clear()
    hf_longattn.update(m, window=5)  # plans anew, and knows the rotation
    assert calls == []


def test_a_strength_belongs_to_one_model() -> None:
    config = CASES[DEFAULT].replace(strength=0.2)
    m = fresh("llama", config)
    copied = copy.deepcopy(m)
    hf_longattn.update(copied, strength=0.9)
    assert torch.equal(logits(m), logits(fresh("llama", config)))
    for one in (m, copied):  # and of a deep copy, which nothing tracks
        other = LlamaForCausalLM(one.config)
        hf_longattn.update(other, strength=0.4)
        want = config.replace(strength=0.2 if one is m else 0.9)
        assert torch.equal(logits(one), logits(fresh("llama", want)))


def test_a_section_that_describes_no_method_says_how_to_get_rid_of_it() -> None:
    m, alibi = fresh("llama", CASES[DEFAULT]), LongAttnConfig.preset("alibi")
    for way_out, want in (
        (hf_longattn.remove, stock("llama")),
        (lambda m: hf_longattn.apply(m, alibi), fresh("llama", alibi)),
    ):
        m.config.longattn = {"window": 3}
        with pytest.raises(ValueError, match=r"has no parameter 'window'.*\. Set it to None, then"):
            way_out(m)
        m.config.longattn = None
        way_out(m)
        assert torch.equal(logits(m), logits(want))
        hf_longattn.apply(m, CASES[DEFAULT])


def test_inner_and_outer_model_have_one_state() -> None:
    m = fresh("llama", CASES[DEFAULT].replace(strength=0.2))
    hf_longattn.update(m.model, strength=0.7)
    close(logits(m), expected("llama", CASES[DEFAULT].replace(strength=0.7), tokens()))
    states = {id(x._longattn.state) for x in attention(m)}
    assert len(states) == 1
    hf_longattn.remove(m.model)
    assert torch.equal(logits(m), logits(stock("llama")))
    assert not any("longattn" in key for x in m.modules() for key in x.__dict__)


@pytest.mark.slow
def test_tables_are_freed_with_the_model() -> None:
    m = fresh("llama", CASES["sinks"])
    logits(m)
    tables = attention(m)[0]._longattn.state.tables
    assert 0 < tables.nbytes <= tables.max_bytes
    assert attention(copy.deepcopy(m))[0]._longattn.state.tables.nbytes == 0
    gain = weakref.ref(next(iter(tables._kept.values()))[0])
    del m, tables
    gc.collect()
    assert gain() is None


@pytest.mark.parametrize("called", [False, True])
def test_a_pickled_model(called: bool, base: Path, tmp_path: Path) -> None:
    """Before its first call, too, when its rotations are still to be verified."""
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7})
    if called:
        logits(m)
    torch.save(m, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(again), logits(m))
    assert torch.equal(logits(hf_longattn.remove(again)), logits(stock("llama")))
    assert not any(x._forward_pre_hooks for x in again.modules())


def test_a_pickled_model_under_several_methods_runs_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody has asked for them together: workers of a DataLoader, `torch.load`."""
    config = LongAttnConfig.preset("rerope+infoscale", window=7, train_length=8)
    m = fresh("llama", config)
    want, pickled = logits(m), pickle.dumps(m)
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, config.name)
    assert torch.equal(logits(pickle.loads(pickled)), want)


def test_two_models_do_not_meet() -> None:
    """State is per model: nothing global changes with the second one."""
    one, two, plain = fresh("llama", CONFIG), fresh("llama", CASES[DEFAULT]), stock("llama")
    close(logits(one), expected("llama", CONFIG, tokens()))
    close(logits(two), expected("llama", CASES[DEFAULT], tokens()))
    hf_longattn.remove(two)
    assert torch.equal(logits(two), logits(plain))
    close(logits(one), expected("llama", CONFIG, tokens()))


def test_apply_rejects_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="holds no transformers model"):
        hf_longattn.apply(torch.nn.Linear(2, 2), CONFIG)


def test_describe() -> None:
    lines = str(hf_longattn.describe(model("gemma3", CONFIG))).splitlines()
    changed = "scale_invariant:tau=3.0:sink_tokens=2:offset=0:strength=1.0 backend auto"
    assert [" ".join(line.split()) for line in lines] == [
        "Gemma3ForCausalLM: scale_invariant, trained at 512: max_position_embeddings",
        "model.layers.0.self_attn unchanged sliding window, runs sdpa",
        f"model.layers.1.self_attn {changed}",
        "model.layers.2.self_attn unchanged sliding window, runs sdpa",
        f"model.layers.3.self_attn {changed}",
    ]
    assert len({line.index("backend auto") for line in lines if "backend" in line}) == 1  # columns


def test_describe_other_models() -> None:
    plain = hf_longattn.describe(stock("llama"))
    assert plain.config is None
    assert str(plain).startswith("LlamaForCausalLM: no hf_longattn method")
    assert {row[1:] for row in plain.rows} == {("unchanged", "runs sdpa")}
    chosen = hf_longattn.describe(fresh("llama", CONFIG.replace(layers=(2,), backend="reference")))
    alone = "not in `layers`, runs sdpa"
    assert [row[2] for row in chosen.rows] == [alone, alone, "backend reference", alone]
    assert chosen.config == CONFIG.replace(layers=(2,), backend="reference")
    layered = hf_longattn.describe(model("llama", CASES["calibrated"]))
    assert LongAttnConfig.preset(layered.rows[1][1]).methods == CASES["calibrated"].for_layer(1).methods  # as it is typed


# combinations and parameters, by name ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_combination_goes_by_its_name(base: Path, tmp_path: Path) -> None:
    name, parameters = "rerope+infoscale", {"window": 7, "train_length": 16}
    want = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), name, **parameters).eval()
    loaded = AutoModelForCausalLM.from_pretrained(base, attn_implementation=name, longattn=parameters).eval()
    switched = AutoModelForCausalLM.from_pretrained(base, attn_implementation="infoscale+rerope", longattn=parameters).eval()
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == f"hf_longattn.{name}"
    code = f"""
import hf_longattn, torch, sys
from transformers import AutoModelForCausalLM
m = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).eval()
torch.save(m(torch.load({str(tmp_path / "ids.pt")!r})).logits, {str(tmp_path / "logits.pt")!r})
"""
    torch.save(tokens(), tmp_path / "ids.pt")
    subprocess.run([sys.executable, "-c", code], check=True)
    with torch.no_grad():
        logits = want(tokens()).logits
        for other in (loaded, switched):
            close(other(tokens()).logits, logits, 0.0)
    close(torch.load(tmp_path / "logits.pt"), logits)


def test_names_and_parameters_that_are_wrong_say_what_is_meant(base: Path) -> None:
    load = functools.partial(AutoModelForCausalLM.from_pretrained, base)
    with pytest.raises(TypeError, match=r"window is for the method.*pass longattn=\{'window': 7\}"):
        load(attn_implementation="rerope+infoscale", window=7)
    with pytest.raises(TypeError, match=r"pass longattn=\{'tau': 3"):
        AutoModelForCausalLM.from_config(load().config, attn_implementation="scale_invariant", tau=3.0)
    with pytest.raises(ValueError, match=r"'infoscal' is no method; did you mean 'infoscale'"):
        load(attn_implementation="rerope+infoscal")
    with pytest.raises(ValueError, match=r"both fill|two methods|temperature"):
        load(attn_implementation="logn+infoscale")
