"""Head gains folded into the weights: the same logits without the plugin, or a refusal that leaves the model as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import FAMILIES, HEADS, LAYERS, MEAN
from helpers import SCENARIOS, close, fresh, stock, tokens
from torch import nn
from transformers import AutoModelForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig

GAINS = LongAttnConfig.preset("output_gain", gain=[[1 + 0.1 * x for x in layer] for layer in MEAN])


def gained(family: str, config: LongAttnConfig = GAINS) -> Any:
    """Under gains per layer and head, times learned ones that training so to say has moved."""
    m = fresh(family, config)
    for name, parameter in m.named_parameters():
        if ".longattn." in name:
            parameter.data = torch.linspace(0.7, 1.4, parameter.numel()).to(parameter)
    return m


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "gpt2", "qwen3"])
@torch.no_grad()
def test_folded_weights_give_the_same_logits_without_a_method(family: str, tmp_path: Path) -> None:
    m, ids = gained(family).train(), tokens()
    want = m.eval()(ids).logits
    assert (want - stock(family)(ids).logits).abs().max() > 1e-3
    names = set(stock(family).state_dict())
    assert hf_longattn.fold(m.train()) is m
    assert m.training
    close(m.eval()(ids).logits, want, 2e-6)
    assert set(m.state_dict()) == names
    assert m.config._attn_implementation == stock(family).config._attn_implementation
    m.save_pretrained(tmp_path)
    assert "longattn" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    close(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, want, 2e-6)


@torch.no_grad()
def test_other_methods_stay() -> None:
    config = LongAttnConfig.preset("rerope+infoscale+output_gain", window=7, train_length=8, gain=0.8, layers=(0, 2))
    m, ids = gained("llama", config), tokens()
    want = m(ids).logits
    hf_longattn.fold(m)
    assert hf_longattn.config_of(m).name == "rerope+infoscale"
    close(m(ids).logits, want, 2e-6)
    close(SCENARIOS["static_chunks"](m, ids), want)


@torch.no_grad()
def test_half_precision_folds_to_its_rounding() -> None:
    m, ids = gained("llama").bfloat16(), tokens()
    want = m(ids).logits.float()
    close(hf_longattn.fold(m)(ids).logits.float(), want, 0.05 * float(want.abs().max()))


class Wrapped(nn.Linear):
    """As quantisation or an adapter would put one in the place of a projection."""


def wrapped(m: Any) -> Any:
    m.model.layers[1].self_attn.o_proj.__class__ = Wrapped
    return m


def adapted(m: Any) -> Any:
    import peft

    return peft.get_peft_model(m, hf_longattn.LongAttnLoraConfig(r=2, target_modules=["o_proj"]))


def gated() -> Any:
    """Qwen3-Next multiplies by a gate between attention and projection."""
    changes = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2, "num_experts_per_tok": 1}
    changes |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
    config = transformers.Qwen3NextConfig(**FAMILIES["llama"][1] | changes)
    return hf_longattn.apply(AutoModelForCausalLM.from_config(config).eval(), "output_gain")


REFUSED: dict[str, tuple[Any, str]] = {
    "another method": (lambda: fresh("llama", LongAttnConfig.preset("alibi")), "alibi has no head gains to fold"),
    "no method": (lambda: stock("llama"), "not an hf_longattn method"),
    "quantised": (lambda: wrapped(gained("llama")), r"layers\.1.*hands its heads to a Wrapped"),
    "adapter": (lambda: adapted(gained("llama")), "an adapter is on the model.*merge it first"),
    "gate": (gated, "has 0 modules that read what its heads return"),
    "no weights": (lambda: gained("llama").to("meta"), "no weights here"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_folded_is_refused_and_stays(why: str) -> None:
    make, message = REFUSED[why]
    m = make()
    before = {name: x.clone() for name, x in m.state_dict().items()}
    implementation = m.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        hf_longattn.fold(m)
    assert m.config._attn_implementation == implementation
    assert all(x.is_meta or torch.equal(x, before[name]) for name, x in m.state_dict().items())


def test_a_projection_that_other_things_read_is_not_folded_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with one projection: the logits tell, and the weights come back."""
    m = gained("llama")
    m.model.layers[3].self_attn.o_proj = m.model.layers[0].self_attn.o_proj
    before, ids = copy.deepcopy(m.state_dict()), tokens()
    want = m(ids).logits
    with pytest.raises(ValueError, match="do not give the logits"):
        hf_longattn.fold(m)
    assert all(torch.equal(x, before[name]) for name, x in m.state_dict().items())
    close(m(ids).logits, want)


def test_calibrate_keeps_the_gain_for_heads_that_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_longattn.evaluation import calibrate as calibration

    shares = torch.zeros(LAYERS, HEADS, dtype=torch.float64)
    shares[1, 2] = shares[3, 0] = 0.3
    shares[2] = torch.nan
    monkeypatch.setattr(calibration, "copying_heads", lambda model, ids: shares)
    method = hf_longattn.calibrate(stock("llama"), [tokens()], "output_gain", gain=1.5)
    want = [[1.5 if (layer, head) in ((1, 2), (3, 0)) else 1.0 for head in range(HEADS)] for layer in range(LAYERS)]
    assert method.output_norm.to_dict()["gain"] == want  # type: ignore[union-attr]
