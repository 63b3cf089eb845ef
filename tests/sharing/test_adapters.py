"""Adapters that record their model's attention: the same model however they are loaded, and the base when switched off."""

from __future__ import annotations

import copy
import json
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from helpers import (
    by_transformers,
    close,
    crossed,
    disturbed,
    logits,
    multimodal,
    needs_adapters_of_transformers,
    picture,
    python,
    stock,
    tokens,
)
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.saved_method import record_of

peft = pytest.importorskip("peft")


FAMILIES = ("llama", "gemma3", "gpt2")
METHODS = {
    "scale_invariant": CASES["sinks"],
    "cosscale": LongAttnConfig.preset("infoscale+cosscale", train_length=5),
    "rerope": LongAttnConfig.preset("rerope", window=6),
    "learned": LongAttnConfig.preset("logn+output_layer_norm", train_length=5, learned=True, deviation=0.4),
    "sink": LongAttnConfig.preset("attention_sink", logit=-1.0, learned=True),
}
PLAIN = METHODS["scale_invariant"]


def lora(family: str = "llama", **options: Any) -> Any:
    target = "c_attn" if family == "gpt2" else "q_proj"
    target = options.pop("target", [target])
    options = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "fan_in_fan_out": family == "gpt2"} | options
    return peft.LoraConfig(target_modules=target, **options)


def adapted(base: Path, config: LongAttnConfig = PLAIN, family: str = "llama", **options: Any) -> Any:
    """A base under a method, with an adapter, and no trainable parameter where it starts."""
    model = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), config)
    return disturbed(peft.get_peft_model(model, lora(family, **options)), only=".longattn.")


LOADERS = {
    "AutoPeftModel": lambda base, path: peft.AutoPeftModelForCausalLM.from_pretrained(path),
    "PeftModel": lambda base, path: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path),
    "AutoModel": lambda base, path: by_transformers(path),
}


# saved and loaded -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rerope", "learned"])
def test_an_adapter_that_transformers_loaded_is_saved_again(method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """As the card loads it, trained on, and saved: also where this release of transformers waits for a newer PEFT."""
    adapted(bases["llama"], METHODS[method]).save_pretrained(tmp_path / "first")
    if (m := by_transformers(tmp_path / "first")) is None:
        pytest.skip("this transformers loads no learned parameters")
    with torch.no_grad():
        for name, parameter in m.named_parameters():
            if "lora_B" in name or "longattn" in name:
                parameter.add_(0.1)
    want = logits(m)
    hf_longattn.save(m, tmp_path / "again")
    files = {path.name for path in (tmp_path / "again").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    for load in LOADERS.values():
        close(logits(load(bases["llama"], tmp_path / "again")), want)
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "first")) - want).abs().max() > 1e-3
    saved = {name: json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("first", "again")}
    assert saved["first"]["longattn"] == saved["again"]["longattn"]
    assert "AutoModelForCausalLM.from_pretrained(" in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.slow
def test_of_several_adapters_that_transformers_loaded_the_active_one_is_saved(bases: dict[str, Path], tmp_path: Path) -> None:
    adapted(bases["llama"], METHODS["rerope"]).save_pretrained(tmp_path / "first")
    torch.manual_seed(5)
    adapted(bases["llama"], METHODS["rerope"]).save_pretrained(tmp_path / "second")
    m = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    m.load_adapter(tmp_path / "second", "second")
    active = next(x.active_adapters for x in m.modules() if isinstance(x, peft.tuners.tuners_utils.BaseTunerLayer))
    want = logits(m)
    hf_longattn.save(m, tmp_path / "saved")
    assert active in (["default"], ["second"])
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), want)


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("family", "method"), crossed([*(("llama", m) for m in METHODS), ("gemma3", "learned"), ("gpt2", "learned")], 3)
)
def test_every_loader_gives_the_same_model(
    family: str, method: str, loader: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    m = adapted(bases[family], METHODS[method], family)
    want = logits(m)
    m.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        loaded = LOADERS[loader](bases[family], tmp_path)
    if loaded is None:
        return
    close(logits(loaded), want, 1e-6)
    assert hf_longattn.get_config(loaded) == hf_longattn.get_config(m)
    plain = logits(AutoModelForCausalLM.from_pretrained(bases[family]))
    assert (want - plain).abs().max() > 1e-2
    if loader != "AutoModel":  # and once more
        loaded.save_pretrained(tmp_path / "again")
        close(logits(LOADERS[loader](bases[family], tmp_path / "again")), want, 1e-6)
        want = logits(loaded.double())  # cosscale's sharp rows magnify the rounding of merged float32 weights
        merged = loaded.merge_and_unload()
        close(logits(merged), want, 1e-9)
        merged.save_pretrained(tmp_path / "merged")
        close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)), want)


# switched off -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "switch", [lambda m: m.disable_adapter().__enter__(), lambda m: m.base_model.disable_adapter_layers()]
)
def test_switching_off_in_a_pass_is_refused_and_changes_nothing(switch: Any) -> None:
    m = peft.get_peft_model(hf_longattn.apply(stock("llama"), PLAIN), lora(modules_to_save=["input_layernorm"]))
    want, status = logits(m), m.get_layer_status()

    def off(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="while a forward pass of it runs"):
            switch(m)

    handle = m.base_model.model.model.layers[1].register_forward_pre_hook(off)
    close(logits(m), want, 0)
    handle.remove()
    assert m.get_layer_status() == status
    close(logits(m), want, 0)


def test_switching_off_in_a_pass_of_a_model_with_transformers_adapters_is_refused() -> None:
    needs_adapters_of_transformers()
    m = hf_longattn.apply(stock("llama"), PLAIN)
    m.add_adapter(lora())
    want, status = logits(m), peft.get_layer_status(m)

    def off(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="while a forward pass of it runs"):
            m.disable_adapters()

    handle = m.model.layers[1].register_forward_pre_hook(off)
    close(logits(m), want, 0)
    handle.remove()
    assert peft.get_layer_status(m) == status
    close(logits(m), want, 0)


@pytest.mark.slow
def test_peft_finds_no_other_layers_under_a_method() -> None:
    """Its views of the model say the same as without one, on, off, in a copy, and after the last adapter is deleted."""

    def seen(m: Any) -> Any:
        return m.get_layer_status(), m.get_model_status(), [n for n, _ in m.named_modules()], list(m.state_dict())

    under, plain = (peft.get_peft_model(x, lora()) for x in (hf_longattn.apply(stock("llama"), PLAIN), stock("llama")))
    for change in (
        lambda m: m,
        lambda m: m.add_adapter("second", lora()),
        lambda m: m.set_adapter("second"),
        lambda m: m.disable_adapter_layers(),
        lambda m: m.delete_adapter("default"),
        lambda m: m.enable_adapter_layers(),
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
    ):
        change(under)
        change(plain)
        assert seen(under) == seen(plain) == seen(copy.deepcopy(under))
    under.disable_adapter_layers()
    under.delete_adapter("second")
    under.enable_adapter_layers()
    close(logits(under.base_model.model), logits(hf_longattn.apply(stock("llama"), PLAIN)))  # merged once, so rounded


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["scale_invariant", "learned"])
def test_switched_off_it_is_the_base_model(family: str, method: str, bases: dict[str, Path]) -> None:
    plain = logits(AutoModelForCausalLM.from_pretrained(bases[family]))
    m = adapted(bases[family], METHODS[method], family)
    want, trained = logits(m), {n: p.clone() for n, p in m.named_parameters()}
    with m.disable_adapter():
        assert torch.equal(logits(m), plain)
        with m.disable_adapter():
            assert torch.equal(logits(m), plain)
        assert torch.equal(logits(m), plain)
        with pytest.raises(RuntimeError, match="is disabled"):
            hf_longattn.apply(m, "cosscale")
        with pytest.raises(RuntimeError, match="is disabled"):
            hf_longattn.remove(m)
        with pytest.raises(RuntimeError, match="is disabled"):
            m.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="is disabled"):
            m.add_adapter("other", lora(family))
    assert torch.equal(logits(m), want)
    m.disable_adapter_layers()
    off = copy.deepcopy(m)
    m.enable_adapter_layers()
    assert torch.equal(logits(m), want)
    assert torch.equal(logits(off), plain)
    off.enable_adapter_layers()
    assert torch.equal(logits(off), want)
    assert all(torch.equal(p, trained[n]) for n, p in m.named_parameters())
    with pytest.raises(ZeroDivisionError), m.disable_adapter():
        1 / 0  # noqa: B018
    assert torch.equal(logits(m), want)


@pytest.mark.slow
def test_the_first_call_may_come_while_switched_off(bases: dict[str, Path]) -> None:
    """rerope verifies the model's rotation at its first call, which must then be the first with the method on."""
    config = METHODS["rerope"]
    base = AutoModelForCausalLM.from_pretrained(bases["llama"], attn_implementation="rerope", longattn={"window": 6})
    m = peft.get_peft_model(base, lora())
    with m.disable_adapter():
        assert torch.equal(logits(m), logits(AutoModelForCausalLM.from_pretrained(bases["llama"])))
    same = peft.get_peft_model(hf_longattn.apply(stock("llama"), config), lora())
    same.load_state_dict(m.state_dict())
    assert torch.equal(logits(m), logits(same))


def test_off_means_the_attention_it_had_before(bases: dict[str, Path]) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases["llama"], attn_implementation="eager")
    plain = logits(base)
    m = peft.get_peft_model(hf_longattn.apply(base, PLAIN), lora())
    with m.disable_adapter():
        assert base.config._attn_implementation == "eager"
        assert torch.equal(logits(m), plain)
    assert base.config._attn_implementation == "scale_invariant"


@pytest.mark.slow
def test_a_base_with_a_method_of_its_own_keeps_it(bases: dict[str, Path], tmp_path: Path) -> None:
    name = METHODS["learned"]
    m = disturbed(hf_longattn.apply(AutoModelForCausalLM.from_pretrained(bases["llama"]), name), only=".longattn.")
    m.save_pretrained(tmp_path / "base")
    want = logits(m)
    m = adapted(tmp_path / "base", name)
    assert record_of(m.peft_config["default"])["base_has_method"]
    with m.disable_adapter():
        close(logits(m), want, 1e-6)
    m.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(m))
    with loaded.disable_adapter():
        close(logits(loaded), want, 1e-6)


def test_prompts_switched_off_leave_a_base_its_own_learned_parameters(bases: dict[str, Path], tmp_path: Path) -> None:
    m = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(bases["llama"]), METHODS["learned"])
    m.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    want = logits(base)
    m = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    trained = logits(disturbed(m, only=".longattn."))
    m.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    learning = [[name for name, p in x.named_parameters() if p.requires_grad] for x in (m, loaded)]
    for x in (m, loaded):
        with x.disable_adapter():
            assert torch.equal(logits(x), want)
        assert torch.equal(logits(x), trained)
    assert [[name for name, p in x.named_parameters() if p.requires_grad] for x in (m, loaded)] == learning


@pytest.mark.slow
def test_composite() -> None:
    """Only the language model goes back and forth, never the vision tower."""
    m, plain = multimodal(), logits(multimodal(), **picture())
    m = peft.get_peft_model(hf_longattn.apply(m, PLAIN), lora(target=".*language_model.*q_proj"))
    want = logits(m, **picture())
    assert (want - plain).abs().max() > 1e-3
    before = {k: c._attn_implementation for k, c in configs(m).items()}
    with m.disable_adapter():
        close(logits(m, **picture()), plain, 1e-6)
        assert {c._attn_implementation for c in configs(m).values()} == {"sdpa"}
    assert {k: c._attn_implementation for k, c in configs(m).items()} == before
    assert torch.equal(logits(m, **picture()), want)


def configs(m: Any) -> dict[str, Any]:
    top = m.get_base_model().config
    return {"top": top, "text": top.text_config, "vision": top.vision_config}


@pytest.mark.slow
def test_a_teacher_that_shares_the_weights(bases: dict[str, Path]) -> None:
    """Distillation: base logits without gradients, the adapted with them, under gradient checkpointing too."""
    ids, grads = tokens(), []
    teacher = logits(AutoModelForCausalLM.from_pretrained(bases["llama"]))
    for checkpointing in (False, True):
        torch.manual_seed(0)
        m = adapted(bases["llama"])
        if checkpointing:
            base = m.get_base_model()
            name = "activation_checkpointing_enable"  # its name in transformers 6
            getattr(base, name if hasattr(base, name) else "gradient_checkpointing_enable")()
        m.train()
        student = m(input_ids=ids, use_cache=False).logits
        with torch.no_grad(), m.disable_adapter():
            aim = m(input_ids=ids, use_cache=False).logits
        assert torch.equal(aim, teacher)
        (student.log_softmax(-1) * aim.softmax(-1)).sum().backward()  # recomputes after the switch went back
        grads.append({n: p.grad for n, p in m.named_parameters() if p.grad is not None})
    assert grads[0]
    assert grads[0].keys() == grads[1].keys()
    for n, g in grads[0].items():
        close(grads[1][n], g, 1e-4 * min(1.0, float(g.abs().max())))


# rotary settings --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("family", "method"), [("llama", "scale_invariant"), ("gemma3", "rerope")])
def test_prope_comes_along(family: str, method: str, loader: str, bases: dict[str, Path], tmp_path: Path) -> None:
    plain = logits(AutoModelForCausalLM.from_pretrained(bases[family]))
    edited = hf_longattn.rope.prope(AutoConfig.from_pretrained(bases[family]), 0.5)
    base = AutoModelForCausalLM.from_pretrained(bases[family], config=edited)
    m = peft.get_peft_model(hf_longattn.apply(base, METHODS[method]), lora(family))
    want = logits(m)
    with m.disable_adapter():  # the base model, with the base's RoPE
        assert torch.equal(logits(m), plain)
    assert torch.equal(logits(m), want)
    m.save_pretrained(tmp_path)
    loaded = LOADERS[loader](bases[family], tmp_path)
    close(logits(loaded), want, 1e-6)
    if loader != "AutoModel":
        with loaded.disable_adapter():
            assert torch.equal(logits(loaded), plain)
        assert torch.equal(logits(loaded), logits(LOADERS[loader](bases[family], tmp_path)))
        merged = loaded.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), want)


def test_rotary_settings_that_fit_neither(bases: dict[str, Path], tmp_path: Path) -> None:
    edited = hf_longattn.rope.prope(AutoConfig.from_pretrained(bases["llama"]), 0.5)
    base = AutoModelForCausalLM.from_pretrained(bases["llama"], config=edited)
    peft.get_peft_model(hf_longattn.apply(base, PLAIN), lora()).save_pretrained(tmp_path)
    other = hf_longattn.rope.linear(AutoConfig.from_pretrained(bases["llama"]), 2.0)
    with pytest.raises(ValueError, match=r"trained with rope_parameters.*the model has.*linear"):
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["llama"], config=other), tmp_path)


def test_an_adapter_that_is_refused_leaves_the_rotary_encoding(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings fit, its method does not: neither stays."""
    edited = hf_longattn.rope.prope(AutoConfig.from_pretrained(bases["llama"]), 0.5)
    base = AutoModelForCausalLM.from_pretrained(bases["llama"], config=edited)
    peft.get_peft_model(hf_longattn.apply(base, METHODS["rerope"]), lora()).save_pretrained(tmp_path)
    m = AutoModelForCausalLM.from_pretrained(bases["llama"])
    rotary, settings = m.model.rotary_emb, m.config.rope_parameters
    inner = type(rotary).forward
    monkeypatch.setattr(type(rotary), "forward", lambda *x, **y: tuple(z.flip(-1) for z in inner(*x, **y)))
    with pytest.raises(ValueError, match="does not give what"):
        peft.PeftModel.from_pretrained(m, tmp_path)
    assert m.model.rotary_emb is rotary
    assert m.config.rope_parameters is settings


def test_without_a_checkpoint_the_settings_are_recorded_as_they_are(tmp_path: Path) -> None:
    m = peft.get_peft_model(hf_longattn.apply(stock("llama"), PLAIN), lora())
    recorded = record_of(m.peft_config["default"])
    assert recorded["rope_parameters"] == stock("llama").config.rope_parameters
    assert recorded["base_rope_parameters"] is None
    m.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(stock("llama"), tmp_path)), logits(m))


# several adapters, changes on the way, checkpoints ----------------------------------------------------------------------


@pytest.mark.slow
def test_several_adapters(bases: dict[str, Path], tmp_path: Path) -> None:
    m = adapted(bases["llama"], METHODS["learned"])
    m.add_adapter("second", lora())
    m.set_adapter("second")
    disturbed(m, only=".longattn.")
    second = logits(m)
    m.set_adapter("default")
    first = logits(m)
    assert (first - second).abs().max() > 1e-2
    m.save_pretrained(tmp_path)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    close(logits(loaded), first, 1e-6)
    loaded.load_adapter(tmp_path / "second", "again")
    loaded.set_adapter("again")
    close(logits(loaded), second, 1e-6)
    with loaded.disable_adapter():
        close(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(bases["llama"])), 1e-6)
    loaded.delete_adapter("again")
    loaded.set_adapter("default")
    close(logits(loaded), first, 1e-6)
    needs_adapters_of_transformers()
    native = by_transformers(tmp_path)
    if native is None:
        return
    native.load_adapter(tmp_path / "second", "again")
    native.set_adapter("again")
    close(logits(native), second, 1e-6)
    native.set_adapter("default")
    close(logits(native), first, 1e-6)
    native.save_pretrained(tmp_path / "native")
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "native")), first, 1e-6)


@pytest.mark.slow
def test_adapters_follow_the_method(bases: dict[str, Path], tmp_path: Path) -> None:
    m = adapted(bases["llama"], PLAIN)
    hf_longattn.update(m, tau=40.0)
    want = logits(m)
    m.save_pretrained(tmp_path / "updated")
    close(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "updated")), want, 1e-6)
    m.set_attn_implementation("longattn")
    assert LongAttnConfig.parse(record_of(m.peft_config["default"])["longattn"]).logit_map.tau == 40.0
    hf_longattn.apply(m, METHODS["learned"])
    with pytest.warns(UserWarning, match="dropping"):
        hf_longattn.remove(disturbed(m, only=".longattn."))
    m.save_pretrained(tmp_path / "removed")  # a plain adapter
    saved = json.loads((tmp_path / "removed" / "adapter_config.json").read_text())
    assert (saved["peft_type"], saved["modules_to_save"]) == ("LORA", None)
    assert "longattn" not in saved


def switched(model: Any, config: LongAttnConfig | None) -> Any:
    """The model under a method, or under the attention that it had, while its learned parameters stay."""
    if config is not None:
        return hf_longattn.apply(model, config)
    (model.get_base_model() if isinstance(model, peft.PeftModel) else model).set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("case", ["beside", "active", "first", "late", "again"])
def test_an_adapter_gets_its_copies_of_learned_parameters_that_come_after_it(
    case: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, config, name = bases["llama"], METHODS["learned"], "default"
    model = AutoModelForCausalLM.from_pretrained(base)
    if case in ("beside", "active"):
        name, model = "other", switched(peft.get_peft_model(hf_longattn.apply(model, config), lora()), None)
        model.add_adapter(name, lora())
        model.set_adapter("default" if case == "beside" else name)
    elif case == "first":
        base = tmp_path / "base"
        hf_longattn.apply(model, config).save_pretrained(base)
        model = peft.get_peft_model(switched(AutoModelForCausalLM.from_pretrained(base), None), lora())
    else:
        model = peft.get_peft_model(model, lora())
        if case == "again":
            hf_longattn.remove(hf_longattn.apply(model, config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        switched(model, config)
    model.set_adapter(name)
    trained = [key for key, x in model.named_parameters() if x.requires_grad]
    assert all(f".{name}." in key for key in trained)
    assert any(".longattn." in key for key in trained)
    want = logits(disturbed(model, only=f".longattn.modules_to_save.{name}."))
    model.save_pretrained(tmp_path / "saved")
    folder = tmp_path / "saved" / ("" if case in ("first", "late", "again") else name)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    close(logits(loaded), want, 1e-6)


@pytest.mark.parametrize("case", ["beside", "first", "late"])
def test_prompts_that_lack_learned_parameters_are_not_saved(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    def prompts() -> Any:
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)

    config, model = METHODS["learned"], AutoModelForCausalLM.from_pretrained(bases["llama"])
    if case != "late":
        hf_longattn.apply(model, config)
    if case == "beside":
        model = peft.get_peft_model(model, prompts())
        model.save_pretrained(tmp_path / "whole")
        switched(model, None).add_adapter("other", prompts())
    else:
        if case == "first":
            hf_longattn.save(model, tmp_path / "base")
            model = switched(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), None)
        model = peft.get_peft_model(model, prompts())
    with pytest.warns(UserWarning, match="learned parameters came after the adapter"):
        hf_longattn.apply(model, config)
    with pytest.raises(ValueError, match=r"came back, after this adapter and are not in it.*while the model runs"):
        model.save_pretrained(tmp_path / "lacking")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what was trained
        hf_longattn.remove(model)
    model.save_pretrained(tmp_path / "removed")


def test_two_active_adapters_cannot_both_get_learned_parameters(bases: dict[str, Path]) -> None:
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), lora())
    model.add_adapter("other", lora())
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"default, other are active together.*set_adapter"):
        hf_longattn.apply(model, METHODS["learned"])
    assert hf_longattn.describe(model).config is None
    assert not any("longattn" in key for key in model.state_dict())


@pytest.mark.slow
def test_trainer_refuses_an_adapter_of_another_attention(bases: dict[str, Path], tmp_path: Path) -> None:
    adapted(bases["llama"], METHODS["learned"]).save_pretrained(tmp_path / "checkpoint-1")
    for model, what in (
        (adapted(bases["llama"], CASES["rerope"]), "'logn.*'rerope'"),
        (peft.get_peft_model(stock("llama"), lora()), "'logn.*no method"),
    ):
        trainer = Trainer(model=model, args=TrainingArguments(tmp_path, report_to=[], use_cpu=True))
        with pytest.raises(ValueError, match=f"trained under {what}"):
            trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("case", ["logn_learned", "attention_sink_learned", "output_layer_norm"])
def test_transformers_switches_off_and_on_what_peft_does(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    adapted(bases["llama"], CASES[case]).save_pretrained(tmp_path)
    needs_adapters_of_transformers()
    if by_transformers(tmp_path) is None:
        pytest.skip("this release cannot load learned parameters, and says so")
    base = AutoModelForCausalLM.from_pretrained(bases["llama"])
    plain = logits(base)
    base.load_adapter(tmp_path)
    want = logits(base)
    assert (want - plain).abs().max() > 1e-3
    base.disable_adapters()
    close(logits(base), plain, 1e-6)
    base.enable_adapters()
    close(logits(base), want, 1e-6)


@pytest.mark.slow
def test_an_adapter_that_records_a_method_beside_one_that_has_none(bases: dict[str, Path], tmp_path: Path) -> None:
    """Put in, the method would change what the other computes."""
    adapted(bases["llama"]).save_pretrained(tmp_path)
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), lora())
    want = logits(plain)
    with pytest.raises(ValueError, match="trained under scale_invariant, and the model's other adapters under no"):
        plain.load_adapter(tmp_path, "ours")
    assert list(plain.peft_config) == ["default"]
    assert torch.equal(logits(plain), want)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), lora()).save_pretrained(tmp_path / "plain")
    m = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="records no attention, and runs under scale_invariant, as the model's other") as told:
        m.load_adapter(tmp_path / "plain", "plain")
    assert __file__ in {x.filename for x in told if "records no attention" in str(x.message)}


@pytest.mark.slow
def test_an_adapter_beside_one_of_another_method_is_told_to_go_elsewhere(bases: dict[str, Path], tmp_path: Path) -> None:
    """The base has no method: the one that stands in the way came with the first adapter."""
    adapted(bases["llama"]).save_pretrained(tmp_path / "one")
    adapted(bases["llama"], METHODS["learned"]).save_pretrained(tmp_path / "two")
    m = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "one")
    want = logits(m)
    with pytest.raises(ValueError, match="give the adapter a model of its own, all adapters of a model share one"):
        m.load_adapter(tmp_path / "two", "two")
    assert torch.equal(logits(m), want)


@pytest.mark.slow
def test_trainer_checkpoints(bases: dict[str, Path], tmp_path: Path) -> None:
    data = [{"input_ids": x, "labels": x} for x in tokens(6, 12)]

    def trainer() -> Trainer:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            tmp_path, max_steps=3, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True, learning_rate=0.05,
        )  # fmt: skip
        return Trainer(model=adapted(bases["llama"], METHODS["learned"]), args=arguments, train_dataset=data)  # type: ignore[arg-type]

    first = trainer()
    start = logits(first.model)
    first.train()
    want = logits(first.model)
    assert (want - start).abs().max() > 1e-2
    close(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")), want, 1e-6)
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    close(logits(resumed.model), want, 1e-6)
    names = [n for n, p in first.model.named_parameters() if p.requires_grad]
    assert all("lora_" in n or ".longattn.modules_to_save." in n for n in names)


@pytest.mark.slow
def test_sinks_train_beside_lora_and_come_back(bases: dict[str, Path], tmp_path: Path) -> None:
    m = peft.get_peft_model(
        hf_longattn.apply(AutoModelForCausalLM.from_pretrained(bases["llama"]), METHODS["sink"]), lora(init_lora_weights=True)
    )
    before, trained = logits(m), [p for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for _ in range(3):
        m(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sinks = {n: p.detach().clone() for n, p in m.named_parameters() if "sink" in n and p.requires_grad}
    assert len(sinks) == m.config.num_hidden_layers
    assert all(p.shape == (m.config.num_attention_heads,) and (p != 0).all() for p in sinks.values())
    want = logits(m)
    assert (want - before).abs().max() > 1e-3
    m.save_pretrained(tmp_path)
    loaded = LOADERS["PeftModel"](bases["llama"], tmp_path)
    close(logits(loaded), want, 1e-6)
    assert all(torch.equal(dict(loaded.named_parameters())[n], p) for n, p in sinks.items())
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(bases["llama"])))


@pytest.mark.slow
def test_bfloat16(bases: dict[str, Path], tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases["llama"], dtype=torch.bfloat16)
    plain = logits(base)
    m = peft.get_peft_model(hf_longattn.apply(base, PLAIN), lora())
    want = logits(m)
    m.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)), want)
    native = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    close(logits(native), want, 0.05)  # transformers casts the adapter as well, PEFT keeps it in float32
    with m.disable_adapter():
        assert torch.equal(logits(m), plain)


# mistakes ---------------------------------------------------------------------------------------------------------------


def test_without_a_method_adapters_are_peft_s_own(bases: dict[str, Path], tmp_path: Path) -> None:
    config = lora()
    m = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), config)
    assert m.peft_config["default"] is config
    m.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved == json.loads(json.dumps(config.to_dict() | {"inference_mode": True}, default=list))
    adapted(bases["llama"]).save_pretrained(tmp_path / "ours")
    with pytest.raises(TypeError, match="which Linear cannot run"):
        peft.get_peft_model(torch.nn.Linear(2, 2), peft.PeftConfig.from_pretrained(tmp_path / "ours"))


@pytest.mark.slow
def test_a_base_with_another_method_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    m = adapted(bases["llama"])
    m.save_pretrained(tmp_path)
    for other in (PLAIN.replace(tau=50.0), METHODS["cosscale"]):
        base = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(bases["llama"]), other)
        with pytest.raises(ValueError, match=f"trained under scale_invariant.*runs {other.name.replace('+', '.')}"):
            peft.PeftModel.from_pretrained(base, tmp_path)
    same = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(bases["llama"]), PLAIN.replace(backend="reference"))
    loaded = peft.PeftModel.from_pretrained(same, tmp_path)
    close(logits(loaded), logits(m))
    assert hf_longattn.get_config(loaded).backend == "reference"  # another backend computes the same method
    m.load_adapter(tmp_path, "same")
    recorded = json.loads((tmp_path / "adapter_config.json").read_text())
    recorded["longattn"]["logit_map"]["tau"] = 50.0
    (tmp_path / "adapter_config.json").write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match="the model runs scale_invariant"):
        m.load_adapter(tmp_path, "other")


@pytest.mark.slow
def test_low_cpu_mem_usage(bases: dict[str, Path], tmp_path: Path) -> None:
    for method in ("scale_invariant", "learned"):
        adapted(bases["llama"], METHODS[method]).save_pretrained(tmp_path / method)
    base = AutoModelForCausalLM.from_pretrained(bases["llama"])
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "scale_invariant", low_cpu_mem_usage=True)
    same = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "scale_invariant")
    assert torch.equal(logits(loaded), logits(same))
    with pytest.raises(NotImplementedError, match="low_cpu_mem_usage=True"):
        peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(bases["llama"]), tmp_path / "learned", low_cpu_mem_usage=True
        )


# configs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_follow_a_method_that_comes_after_them(bases: dict[str, Path], tmp_path: Path) -> None:
    """By PEFT's way of saving and by transformers', rotary settings among it; and one that goes."""
    edited = hf_longattn.rope.prope(AutoConfig.from_pretrained(bases["llama"]), 0.5)
    for kind in (lora(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)):
        base = AutoModelForCausalLM.from_pretrained(bases["llama"], config=copy.deepcopy(edited))
        m = peft.get_peft_model(base, kind)
        hf_longattn.apply(m, PLAIN.replace(tau=40.0))
        m.peft_config["default"].save_pretrained(tmp_path / "config")
        m.save_pretrained(tmp_path / "peft")
        first, second = (json.loads((tmp_path / x / "adapter_config.json").read_text()) for x in ("config", "peft"))
        assert first["rope_parameters"] == second["rope_parameters"] == base.config.rope_parameters
        assert first["longattn"] == second["longattn"]
        close(logits(LOADERS["PeftModel"](bases["llama"], tmp_path / "peft")), logits(m), 1e-6)

        hf_longattn.remove(m)
        m.save_pretrained(tmp_path / "removed")
        assert "longattn" not in json.loads((tmp_path / "removed/adapter_config.json").read_text())


def test_an_adapter_of_transformers_follows_the_method(bases: dict[str, Path], tmp_path: Path) -> None:
    needs_adapters_of_transformers()
    native = AutoModelForCausalLM.from_pretrained(bases["llama"])
    native.add_adapter(lora())
    hf_longattn.update(hf_longattn.apply(native, PLAIN), tau=40.0)
    native.save_pretrained(tmp_path / "native")
    close(logits(LOADERS["PeftModel"](bases["llama"], tmp_path / "native")), logits(native), 1e-6)


@pytest.mark.slow
def test_one_config_for_several_models(bases: dict[str, Path], tmp_path: Path) -> None:
    """A method's run and its control: neither says anything of the other, whichever comes first."""
    config = lora()
    models = {}
    for name, way in {"ours": (), "control": None, "late": None}.items():
        base = AutoModelForCausalLM.from_pretrained(bases["llama"])
        models[name] = peft.get_peft_model(base if way is None else hf_longattn.apply(base, PLAIN), config)
    hf_longattn.apply(models["late"], METHODS["rerope"])
    for name, m in models.items():
        m.save_pretrained(tmp_path / name)
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(logits(loaded), logits(m)), name
        implementation = loaded.get_base_model().config._attn_implementation
        assert implementation == {"ours": "scale_invariant", "control": "sdpa", "late": "rerope"}[name]
    with models["ours"].disable_adapter(), models["control"].disable_adapter():
        assert torch.equal(logits(models["ours"]), logits(models["control"]))


SAYS = "hf_longattn.LORA: install the package hf_longattn, and import it before loading this adapter"


def test_the_type_that_peft_refuses_is_on_disk_alone(bases: dict[str, Path], tmp_path: Path) -> None:
    m = adapted(bases["llama"])
    for config in (m.peft_config["default"], copy.deepcopy(m).peft_config["default"]):
        config.save_pretrained(str(tmp_path / "a"))
        saved = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
        assert saved["peft_type"] == SAYS
        assert LongAttnConfig.parse(saved["longattn"]) == PLAIN.replace(layers=PLAIN.layers)
        loaded = peft.PeftConfig.from_pretrained(tmp_path / "a")
        assert loaded.peft_type is config.peft_type is peft.PeftType.LORA
        assert loaded == config
        loaded.save_pretrained(tmp_path / "b")
        assert json.loads((tmp_path / "b" / "adapter_config.json").read_text()) == saved
    assert peft.PeftConfig._get_peft_type(tmp_path / "a") == "LORA"


@pytest.mark.parametrize("left", [{}, {"longattn": None}, {"longattn": {}}])
def test_an_adapter_whose_record_was_lost_is_refused(left: dict[str, Any], bases: dict[str, Path], tmp_path: Path) -> None:
    """Its type still says that it was trained under a method."""
    adapted(bases["llama"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    del saved["longattn"]
    file.write_text(json.dumps(saved | left))
    with pytest.raises(ValueError, match=r"says by its peft_type .* put that back .* peft_type='LORA'"):
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["llama"]), tmp_path)
    file.write_text(json.dumps(saved | {"peft_type": "LORA"}))
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["llama"]), tmp_path)


@pytest.mark.parametrize("written", ["logn", ["logn"], 5])
def test_a_record_that_is_no_dict_is_refused_alike(written: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    """transformers loaded an adapter with a text there, and a remap took its window from the model; PEFT refused it."""
    adapted(bases["llama"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"longattn": written}))
    for load in (
        AutoModelForCausalLM.from_pretrained,
        lambda folder: AutoModelForCausalLM.from_pretrained(bases["llama"]).load_adapter(folder),
        lambda folder: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["llama"]), folder),
        lambda folder: hf_longattn.push(folder, "you/adapter"),
    ):
        with pytest.raises(ValueError, match=f"longattn must be a dict, .* got {re.escape(repr(written))}"):
            load(tmp_path)


def test_a_config_without_a_task_names_the_class_of_its_base(bases: dict[str, Path], tmp_path: Path) -> None:
    m = adapted(bases["llama"], task_type=None)
    m.save_pretrained(tmp_path)
    named = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    m.peft_config["default"].save_pretrained(tmp_path)  # alone, as transformers saves it
    assert json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"] == named
    assert torch.equal(logits(peft.AutoPeftModel.from_pretrained(tmp_path)), logits(m))


# without the package ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_the_package_every_loader_fails_and_names_it(bases: dict[str, Path], tmp_path: Path) -> None:
    adapted(bases["llama"]).save_pretrained(tmp_path)
    result = python(
        """
        import sys, peft, transformers
        base, path = sys.argv[1:]
        for load in (
            lambda: peft.AutoPeftModelForCausalLM.from_pretrained(path),
            lambda: peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), path),
            lambda: transformers.AutoModelForCausalLM.from_pretrained(path),
        ):
            try:
                load()
            except KeyError as error:
                print(error)
        """,
        bases["llama"],
        tmp_path,
    )
    assert result.stdout.splitlines() == [f"'{SAYS}'"] * 3, result.stderr


@pytest.mark.slow
def test_without_peft_the_package_works_and_the_error_names_the_extra() -> None:
    result = python(
        """
        import sys
        sys.modules["peft"] = None
        import importlib.util
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "peft" else found(name, *a)
        import hf_longattn
        try:
            import hf_longattn.sharing.adapters
        except ImportError as error:
            print(error)
        try:
            hf_longattn.nothing
        except AttributeError as error:
            print(error)
        """
    )
    assert result.stdout.splitlines() == [
        'adapters need PEFT 0.21 or newer: pip install "hf_longattn[train]"',
        "module 'hf_longattn' has no attribute 'nothing'",
    ], result.stderr


@dataclass
class OtherLoraConfig(peft.LoraConfig):
    """A kind of config that saves and loads copies of itself, as that of ms-swift does."""

    more: float | None = None

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        own = asdict(self)
        del own["more"]
        peft.LoraConfig(**own).save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> OtherLoraConfig:
        return cls(**super().from_pretrained(*args, **kwargs).to_dict())


def test_an_adapter_that_is_not_saved_keeps_its_file(bases: dict[str, Path], tmp_path: Path) -> None:
    own = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    plain = AutoModelForCausalLM.from_pretrained(bases["llama"])
    peft.get_peft_model(plain, own, adapter_name="other").save_pretrained(tmp_path)
    file = tmp_path / "other" / "adapter_config.json"
    before = file.read_bytes()
    base = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(bases["llama"]), "infoscale:clamp=false")
    model = peft.get_peft_model(base, own)
    model.add_adapter("other", own)
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["default", "other"])
def test_a_config_of_another_package_that_copies_itself_keeps_the_method(
    name: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases["llama"])
    hf_longattn.apply(base, "infoscale:clamp=false")
    model = peft.get_peft_model(base, OtherLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), adapter_name=name)
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING, "LORA", OtherLoraConfig)
    where = tmp_path / ("" if name == "default" else name)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["llama"]), where)
    assert hf_longattn.get_config(loaded) == hf_longattn.get_config(model)
    loaded.load_adapter(where, "second")
    assert record_of(loaded.peft_config["second"]) == record_of(model.peft_config[name])
    hf_longattn.apply(model, METHODS["learned"])
    assert record_of(model.peft_config[name])["longattn"] == hf_longattn.get_config(model).to_dict()
    plain = AutoModelForCausalLM.from_pretrained(bases["llama"])
    new = peft.get_peft_model(plain, OtherLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert not record_of(new.peft_config["default"])
