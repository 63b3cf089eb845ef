"""What a user of the API gets wrong, or does not expect: one message that says what to write instead."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import hf_longattn
from hf_longattn import LongAttnConfig, UntrainedWarning


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), trained=64)


def load(path: Path, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **changes)


def logits(model: Any, length: int = 40) -> torch.Tensor:
    ids = torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(3))
    return model(ids).logits.detach()


# names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scale-invariant", "did you mean 'scale_invariant'?"),
        ("scale_invarient", "did you mean 'scale_invariant'?"),
        ("hf_longattn.rerop", "did you mean 'rerope'?"),
        ("rerope+infoscal", "'infoscal' is no method; did you mean 'infoscale'?"),
    ],
)
def test_a_mistyped_name_is_answered_with_ours(saved: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(saved, attn_implementation=name)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved), attn_implementation=name)
    model = load(saved)
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"


def test_a_name_like_none_of_ours_is_transformers_own_error(saved: Path) -> None:
    with pytest.raises(ValueError, match="The only possible arguments are"):
        load(saved, attn_implementation="quux")


def test_parameters_without_a_name_say_what_to_write(saved: Path) -> None:
    for section in ({"tau": 20.0}, {"clamp": False}):
        with pytest.raises(ValueError, match="needs the name of its method beside it: attn_implementation="):
            load(saved, longattn=section)
        with pytest.raises(ValueError, match="needs the name of its method"):
            load(saved, config=AutoConfig.from_pretrained(saved), longattn=section)


# values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: hf_longattn.apply(None, "logn"), TypeError, "takes a loaded model first, got an object of type NoneType"),
        (lambda m: hf_longattn.apply(m, None), TypeError, "a method is given by its name"),
        (lambda m: hf_longattn.describe(None), TypeError, "takes a loaded model first, got an object of type NoneType"),
        (lambda m: hf_longattn.remove("model"), TypeError, "takes a loaded model first, got 'model'"),
        (lambda m: hf_longattn.apply(m, "logn", layers=[-1]), ValueError, "layer indices >= 0"),
        (
            lambda m: hf_longattn.apply(m, "logn", train_length="128 tokens"),
            ValueError,
            "train_length must be an integer or None",
        ),
        (lambda m: hf_longattn.apply(m, "logn", clamp="no"), ValueError, "clamp must be true or false, got 'no'"),
        (lambda m: hf_longattn.apply(m, "attention_sink", logit=[0.1]), ValueError, "1 entries, some of which are single"),
        (lambda m: hf_longattn.apply(m, "scale_invariant", alpha=1.0), ValueError, "both alpha and beta"),
        (lambda m: hf_longattn.apply(m, "scale_invariant", tua=1.0), ValueError, "did you mean 'tau'?"),
        (lambda m: hf_longattn.apply(m, "logn", trainlength=9), ValueError, "did you mean 'train_length'?"),
        (lambda m: LongAttnConfig.preset("rerope").replace(windw=9), ValueError, "did you mean 'window'?"),
        (lambda m: LongAttnConfig.parse({"logitmap": {}}), ValueError, "did you mean 'logit_map'?"),
        (lambda m: LongAttnConfig(logit_map={"name": "alibi", "slope": 1}), ValueError, "did you mean 'slopes'?|it has"),
    ],
)
def test_a_wrong_value_is_answered(saved: Path, call: Any, error: type[Exception], message: str) -> None:
    model = load(saved)
    with pytest.raises(error, match=message):
        call(model)
    assert model.config._attn_implementation == "sdpa"


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    want = LongAttnConfig.preset("scale_invariant", tau=20.0, sink_tokens=2, logit_variance=((1.0, 2.0),), layers=[0, 1])
    numbers = {"tau": np.float32(20), "sink_tokens": np.int64(2), "logit_variance": torch.tensor([[1.0, 2.0]])}
    got = LongAttnConfig.preset("scale_invariant", **numbers, layers=np.array([1, 0]))
    assert got == want
    assert got.to_dict() == want.to_dict()
    assert type(got.logit_map.sink_tokens) is int


# a method that pretrained weights were not trained under ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("scale_invariant", "alibi", "cosscale", "log_length", "output_standardise", "adaptive_temperature"),
        *("infoscale:clamp=false", "logn:clamp=false", "ssmax:learned=true:clamp=false", "yarn_temperature:clamp=false"),
    ],
)
def test_a_method_that_harms_untrained_weights_warns_once(saved: Path, name: str) -> None:
    for put in (
        lambda: load(saved, attn_implementation=name),
        lambda: hf_longattn.apply(load(saved), name),
        lambda: load(saved).set_attn_implementation(name),
    ):
        method = {"log_length": "logn", "ssmax": "logn"}.get(own := name.partition(":")[0], own)
        with pytest.warns(UntrainedWarning, match=f"{method}: these weights were not trained under it") as told:
            put()
        assert len([w for w in told if w.category is UntrainedWarning]) == 1


@pytest.mark.slow
def test_nothing_is_said_where_nothing_is_harmed(saved: Path, tmp_path: Path) -> None:
    calibrated = {"logit_mean": 0.1, "logit_variance": 2.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        for name, parameters in (
            ("infoscale", {}),
            ("rerope", {}),
            ("scale_invariant", {"strength": 0.0}),
            ("scale_invariant", calibrated),
        ):
            load(saved, attn_implementation=name, longattn=parameters)
            hf_longattn.apply(load(saved), name, **parameters)
        hf_longattn.apply(load(saved).train(), "scale_invariant")  # it is being trained
        small = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        AutoModelForCausalLM.from_config(small, attn_implementation="scale_invariant")  # no weights to harm
        model = hf_longattn.apply(load(saved).train(), "scale_invariant").eval()
        hf_longattn.update(model, tau=30.0)
        model.save_pretrained(tmp_path)
        again = load(tmp_path)  # a checkpoint that carries the method
        hf_longattn.update(again, tau=40.0)
        again = load(tmp_path, attn_implementation="scale_invariant")
    assert again.config.longattn["logit_map"]["tau"] == 30.0
    assert "_longattn_saved" not in (tmp_path / "config.json").read_text()
    with pytest.warns(UntrainedWarning, match="cosscale"):
        hf_longattn.apply(again, "scale_invariant+cosscale")


# longer --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["infoscale", "scale_invariant", "alibi", "cosscale", "logn+output_standardise"])
def test_extend_refuses_what_extends_nothing(saved: Path, name: str) -> None:
    model = load(saved)
    with pytest.raises(ValueError, match="extends nothing"):
        hf_longattn.extend(model, to=256, method=name)
    assert model.config._attn_implementation == "sdpa"


def test_extend_announces_the_length_and_keeps_the_trained_one(saved: Path, tmp_path: Path) -> None:
    model = hf_longattn.apply(load(saved), "logn")
    with pytest.warns(UserWarning, match=r"rerope\+infoscale replaces logn"):
        hf_longattn.extend(model, to="1k")
    assert model.config.max_position_embeddings == 1024
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.max_position_embeddings == 1024
    assert torch.equal(logits(again, 200), logits(model, 200))
    with pytest.raises(ValueError, match="trained at 64 tokens"):
        hf_longattn.extend(again, to=50)
    assert hf_longattn.apply(again, "infoscale").config.longattn["temperature"]["train_length"] == 64
    hf_longattn.remove(again)
    assert again.config.max_position_embeddings == 64
    assert torch.equal(logits(again), logits(load(saved)))
    for wrong in ("32x", -5, True, "", 1.5, 10**400, "9" * 5000):
        with pytest.raises(ValueError, match="is not a length"):
            hf_longattn.extend(model, to=wrong)


def test_extend_leaves_a_length_that_the_rotation_depends_on(saved: Path) -> None:
    config = hf_longattn.rope.ntk(AutoConfig.from_pretrained(saved), 2.0)
    model = load(saved, config=config)
    before = logits(model, 60)
    hf_longattn.extend(model, to=200, method="windowed", window=64)
    assert model.config.max_position_embeddings == 64
    assert torch.allclose(logits(model, 60), before, atol=1e-5)
