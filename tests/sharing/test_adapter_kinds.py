"""Every kind of adapter that PEFT has, under a method: the same logits wherever it is taken, or a sentence that says why."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import by_transformers, close, crossed, disturbed, needs_adapters_of_transformers, python, stock, tokens
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.checks import Refused
from hf_longattn.evaluation.checkpoints import Checkpoint
from hf_longattn.evaluation.loading import check_setting, load_setting
from hf_longattn.evaluation.settings import Setting
from hf_longattn.integration.changes import disable, enable
from hf_longattn.sharing.card import Facts
from hf_longattn.sharing.hub import files

peft = pytest.importorskip("peft")
from peft.utils.hotswap import hotswap_adapter  # noqa: E402

CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
INTO: dict[str, Any] = CAUSAL | {"target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, Callable[[], Any]] = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "MULTITASK_PROMPT_TUNING": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, num_tasks=2, **CAUSAL),
    "P_TUNING": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "CPT": lambda: peft.CPTConfig(cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2], **CAUSAL),
    "CARTRIDGE": lambda: peft.CartridgeConfig(num_virtual_tokens=3, **CAUSAL),
    "LORA": lambda: peft.LoraConfig(r=4, **INTO),
    "ADALORA": lambda: peft.AdaLoraConfig(total_step=10, **INTO),
    "ADAMSS": lambda: peft.AdamssConfig(**INTO),
    "BEFT": lambda: peft.BeftConfig(**INTO),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, **INTO),
    "C3A": lambda: peft.C3AConfig(block_size=8, **INTO),
    "DEFT": lambda: peft.DeftConfig(r=4, **INTO),
    "DELORA": lambda: peft.DeloraConfig(r=4, **INTO),
    "FOURIERFT": lambda: peft.FourierFTConfig(n_frequency=10, **INTO),
    "FROD": lambda: peft.FrodConfig(**INTO),
    "GLORA": lambda: peft.GloraConfig(**INTO),
    "GRALORA": lambda: peft.GraloraConfig(r=4, gralora_k=2, **INTO),
    "HIRA": lambda: peft.HiraConfig(r=4, **INTO),
    "HRA": lambda: peft.HRAConfig(**INTO),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    "LILY": lambda: peft.LilyConfig(**INTO),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "LOHA": lambda: peft.LoHaConfig(**INTO),
    "LOKR": lambda: peft.LoKrConfig(**INTO),
    "MISS": lambda: peft.MissConfig(r=4, **INTO),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, **INTO),
    "OSF": lambda: peft.OSFConfig(effective_rank=8, **INTO),
    "PEANUT": lambda: peft.PeanutConfig(**INTO),
    "POLY": lambda: peft.PolyConfig(n_tasks=2, n_skills=2, r=4, **INTO),
    "PSOFT": lambda: peft.PsoftConfig(r=4, **INTO),
    "PVERA": lambda: peft.PveraConfig(r=4, **INTO),
    "RANDLORA": lambda: peft.RandLoraConfig(r=4, **INTO),
    "ROAD": lambda: peft.RoadConfig(group_size=8, **INTO),
    "SHIRA": lambda: peft.ShiraConfig(r=4, **INTO),
    "SUPERTUNING": lambda: peft.SupertuningConfig(**INTO),
    "TINYLORA": lambda: peft.TinyLoraConfig(**INTO),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(token_indices=list(range(5, 20)), **CAUSAL),
    "UNILORA": lambda: peft.UniLoraConfig(**INTO),
    "VBLORA": lambda: peft.VBLoRAConfig(num_vectors=16, vector_length=4, topk=2, **INTO),
    "VERA": lambda: peft.VeraConfig(r=4, **INTO),
    "WAVEFT": lambda: peft.WaveFTConfig(n_frequency=10, **INTO),
}
#: Those that are refused under a method.
APART = {"SHADOW", "XLORA", "ADAPTION_PROMPT"}
#: Kinds without modules_to_save, which a method's learned parameters go into.
NOTHING_BESIDE = {"TRAINABLE_TOKENS"}
#: What PEFT says of two, with a method or without; of the latter where embeddings are tied.
ONE_AT_A_TIME = {"ADALORA": "only 1 trainable adapter", "TRAINABLE_TOKENS": "wraps an unknown layer type"}
PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
REROPE = LongAttnConfig.preset("rerope", window=6)
LEARNED = LongAttnConfig.preset("logn+output_layer_norm", train_length=5, learned=True, deviation=0.4)
METHODS = {"rerope": REROPE, "learned": LEARNED}
CASES = [(k, m) for k in KINDS for m in METHODS if not (k in NOTHING_BESIDE and m == "learned")]
BOTH = crossed(CASES, [("LORA", "rerope"), ("LORA", "learned"), ("PREFIX_TUNING", "rerope")])


@torch.no_grad()
def logits(m: Any) -> Tensor:
    """Of the text alone: some prompts have logits too."""
    config = getattr(m, "active_peft_config", None)
    tasks = (
        {"task_ids": torch.zeros(2, dtype=torch.int64)} if hasattr(config, "n_tasks") or hasattr(config, "num_tasks") else {}
    )
    return m.eval()(input_ids=tokens(), **tasks).logits[:, -tokens().shape[1] :]


def loaded(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def adapted(base: Path, kind: str, method: LongAttnConfig | None = REROPE) -> Any:
    model = loaded(base)
    if method is not None:
        hf_longattn.apply(model, method)
    torch.manual_seed(1)
    return disturbed(peft.get_peft_model(model, KINDS[kind]()))


def with_second(m: Any, kind: str) -> Any:
    m.add_adapter("second", KINDS[kind]())
    m.set_adapter("second")
    return m


def told_by_peft(action: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What an action gives; None where PEFT itself cannot do it with this kind, and says so."""
    try:
        return action()
    except errors:
        return None


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_no_kind_is_left_out() -> None:
    assert {*KINDS, *APART} == {str(kind.value) for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
    assert all(make().peft_type == kind for kind, make in KINDS.items())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), BOTH)
def test_saved_and_loaded_switched_off_and_merged(kind: str, method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    plain = logits(loaded(base))
    m = adapted(base, kind, METHODS[method])
    want = logits(m)
    with m.disable_adapter():
        close(logits(m.get_base_model()), plain, 1e-5)  # a product may round by where its memory begins
    close(logits(m), want, 1e-5)
    m.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loaded(base), tmp_path)
    assert hf_longattn.get_config(again) == hf_longattn.get_config(m)
    close(logits(again), want, 1e-5)
    close(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)), want, 1e-5)
    disable(again)
    assert (logits(again) - want).abs().max() > 1e-2  # the adapter without the method
    enable(again)
    if kind != "POLY":  # which takes a task that transformers' model does not
        unknown = kind in PROMPTS or peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[kind].uses_shared_state
        native = told_by_peft(lambda: by_transformers(tmp_path), *[ValueError] * unknown)
        assert native is None or (logits(native) - want).abs().max() <= 1e-5
        assert not (unknown and native)
    merged = told_by_peft(lambda: again.merge_and_unload(), NotImplementedError, AttributeError, ValueError)
    assert (merged is None) == (kind in (*PROMPTS, "BEFT", "LILY", "POLY"))
    if merged is not None:
        close(logits(merged), want, 6e-4)  # RandLoRA: 2.2e-4
        merged.save_pretrained(tmp_path / "merged")
        close(logits(loaded(tmp_path / "merged")), want, 6e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), BOTH)
def test_two_at_a_time(kind: str, method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    m = adapted(base, kind, METHODS[method])
    if kind in ONE_AT_A_TIME:
        with pytest.raises(ValueError, match=ONE_AT_A_TIME[kind]):
            logits(with_second(m, kind))
        return
    with_second(m, kind)
    disturbed(m, 6)  # of prompts, both
    second = logits(m)
    m.set_adapter("default")
    first = logits(m)
    assert (first - second).abs().max() > 1e-2 or kind == "CPT"
    m.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loaded(base), tmp_path)
    again.load_adapter(tmp_path / "second", "second")
    close(logits(again), first, 1e-5)
    again.set_adapter("second")
    close(logits(again), second, 1e-5)

    plain = adapted(base, kind, None)
    before = logits(plain)
    with pytest.raises(ValueError, match="the model's other adapters under no method"):
        plain.load_adapter(tmp_path / "second", "second")
    with pytest.raises(ValueError, match="the model runs no method: only its weights would be read"):
        plain.load_adapter(tmp_path, "default")
    assert list(plain.peft_config) == ["default"]
    assert torch.equal(logits(plain), before)


def test_conversion_to_lora_is_refused_under_a_method(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"would not record rerope, which the model runs: train a LoRA adapter"):
        peft.save_as_lora(tmp_path, adapted(bases["llama"], "LOHA"), rank=1.0)
    peft.save_as_lora(tmp_path, adapted(bases["llama"], "LOHA", None), rank=1.0)  # without a method as ever


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["IA3", "PREFIX_TUNING"])
def test_saved_with_a_card_and_read_by_the_commands(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    m = adapted(bases["llama"], kind, LEARNED)
    hf_longattn.save(m, tmp_path / "it", base_model="someone/base")
    card = (tmp_path / "it" / "README.md").read_text()
    assert f"An adapter ({kind}) of [someone/base]" in card
    assert f"\n- {kind.lower()}\n" in card
    assert "from peft import AutoPeftModelForCausalLM" in card
    again = peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path / "it")
    close(logits(again), logits(m), 1e-6)
    setting = Setting("mine", adapter=str(tmp_path / "it"))
    check_setting(setting, Checkpoint(str(bases["llama"])))
    if kind == "PREFIX_TUNING":
        with pytest.raises(ValueError, match=r"of a kind that cannot be merged into a model \(PREFIX_TUNING\)"):
            load_setting(setting, Checkpoint(str(bases["llama"])), "float32")
        return
    close(logits(load_setting(setting, Checkpoint(str(bases["llama"])), "float32")), logits(m))


def test_a_card_of_dora_loads_it_by_peft(bases: dict[str, Path], tmp_path: Path) -> None:
    """Transformers drops its magnitudes."""
    m = peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), REROPE), peft.LoraConfig(use_dora=True, **INTO))
    hf_longattn.save(m, tmp_path / "it")
    card = (tmp_path / "it" / "README.md").read_text()
    assert "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(" in card


def test_settings_that_cannot_be_merged_are_refused_with_their_reason(bases: dict[str, Path], tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], lora_bias=True, **CAUSAL)  # of a layer without a bias
    peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), REROPE), config).save_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"cannot be merged into a model \(LORA: Impossible to merge LoRA with `lora_bias=True`"):
        load_setting(Setting("mine", adapter=str(tmp_path)), Checkpoint(str(bases["llama"])), "float32")


def test_two_adapters_that_save_learned_parameters_otherwise(bases: dict[str, Path]) -> None:
    into = INTO | {"target_modules": ["down_proj"]}
    alone, inside = (peft.LoraConfig(modules_to_save=modules, **into) for modules in (None, ["self_attn"]))
    for one, other in ((alone, inside), (inside, alone)):
        m = peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), LEARNED), one)
        with pytest.raises(ValueError, match=r"another adapter of the model saves the learned parameters .* otherwise"):
            m.add_adapter("second", other)


def test_the_end_of_a_name_that_learned_parameters_have_too(bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT would wrap the output norm inside of the learned parts once more, and load and merge other weights."""
    normed = hf_longattn.apply(loaded(bases["llama"]), LongAttnConfig.preset("output_layer_norm"))
    with pytest.raises(
        ValueError, match=r"longattn\.output_norm, .* ends in 'norm' of modules_to_save too: write whole names"
    ):
        peft.get_peft_model(normed, peft.LoraConfig(modules_to_save=["norm"], **INTO))
    m = disturbed(peft.get_peft_model(normed, peft.LoraConfig(modules_to_save=["model.norm"], **INTO)))
    m.save_pretrained(tmp_path)
    want = logits(m)
    close(logits(peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path)), want, 1e-6)
    close(logits(m.merge_and_unload()), want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [REROPE, LEARNED], ids=["rerope", "learned"])
def test_layers_that_are_replicated(method: LongAttnConfig, bases: dict[str, Path], tmp_path: Path) -> None:
    config = peft.LoraConfig(layer_replication=[[0, 2], [1, 2]], **INTO)
    m = disturbed(peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), method), config))
    m.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path)
    close(logits(again), logits(m), 1e-6)
    plain = peft.get_peft_model(loaded(bases["llama"]), config)
    want = logits(plain)
    with m.disable_adapter():
        close(logits(m), want)
    if method is REROPE:
        zero = peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), method), config)
        close(logits(hf_longattn.apply(plain, method)), logits(zero))
    by_layer = REROPE.replace(layers=[1])
    with pytest.raises(ValueError, match=r"layer_replication copies and renumbers layers, and rerope is not the same in all"):
        peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), by_layer), config)
    with pytest.raises(ValueError, match="layer_replication copies and renumbers layers"):
        hf_longattn.apply(plain, by_layer)


@pytest.mark.slow
@pytest.mark.parametrize("method", [REROPE, LEARNED], ids=["rerope", "learned"])
def test_attention_modules_that_are_copied_to_be_trained(
    method: LongAttnConfig, bases: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT keeps the original beside the copy: each is the same layer, and both run what the model runs."""
    for modules in (["self_attn"], ["self_attn", "longattn"], ["0.self_attn"]):
        config = peft.LoraConfig(r=2, target_modules=["down_proj"], modules_to_save=modules, task_type="CAUSAL_LM")
        m = disturbed(peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), method), config))
        want = logits(m)
        m.save_pretrained(tmp_path)
        close(logits(peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path)), want, 1e-6)
        with m.disable_adapter():
            close(logits(m), logits(loaded(bases["llama"])))
        close(logits(m), want)
        merged = copy.deepcopy(m).merge_and_unload()
        close(logits(merged), want, 1e-5)
        merged.save_pretrained(tmp_path / "merged")
        assert torch.equal(logits(loaded(tmp_path / "merged")), logits(merged))
        other = disturbed(peft.get_peft_model(loaded(bases["llama"]), config), only="self_attn")
        hf_longattn.apply(other, "alibi", layers=[0])
        want = logits(other)
        hf_longattn.apply(other, REROPE.replace(layers=[0]))  # both of them, by their number
        other.save_pretrained(tmp_path)
        close(logits(peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path)), logits(other), 1e-6)
        close(logits(hf_longattn.apply(other, "alibi", layers=[0])), want)


@pytest.mark.parametrize("kind", sorted(NOTHING_BESIDE))
def test_learned_parameters_that_would_not_be_saved(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no modules_to_save, so the learned parameters"):
        adapted(bases["llama"], kind, LEARNED)
    disturbed(hf_longattn.apply(loaded(bases["llama"]), LEARNED), only=".longattn.").save_pretrained(tmp_path / "base")
    m = adapted(tmp_path / "base", kind, None)  # they come with the base
    m.save_pretrained(tmp_path)
    close(logits(peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path)), logits(m), 1e-6)


def test_a_network_beside_the_model_is_refused(bases: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"ShadowConfig: it makes a second network .* would not follow rerope"):
        peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), REROPE), peft.ShadowConfig(**CAUSAL))
    m = peft.get_peft_model(loaded(bases["llama"]), peft.ShadowConfig(**CAUSAL))
    want = logits(m)
    with pytest.raises(ValueError, match="it makes a second network"):
        hf_longattn.apply(m, REROPE)
    assert torch.equal(logits(m), want)


def test_a_kind_that_mixes_adapters_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    disturbed(peft.get_peft_model(loaded(bases["llama"]), KINDS["LORA"]())).save_pretrained(tmp_path)
    size = loaded(bases["llama"]).config.hidden_size
    config = peft.XLoraConfig(hidden_size=size, adapters={"0": str(tmp_path)}, xlora_size=16, **CAUSAL)
    model, plain = hf_longattn.apply(loaded(bases["llama"]), REROPE), loaded(bases["llama"])
    model.config.use_cache = plain.config.use_cache = False
    with pytest.raises(ValueError, match=r"XLoraConfig: it mixes .* rerope.* Take LoRA"):
        peft.get_peft_model(model, config)
    peft.get_peft_model(plain, config)  # without a method as ever


def test_a_kind_with_attention_of_its_own_is_refused_as_it_is_called(bases: dict[str, Path]) -> None:
    """Whether it or the method came first; and the method alone, or no method, runs as ever."""
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **CAUSAL)
    plain = peft.get_peft_model(loaded(bases["llama"]), config)
    want = logits(plain)
    under = hf_longattn.apply(loaded(bases["llama"]), REROPE)
    alone = logits(under)
    under = peft.get_peft_model(under, config)
    for m in (under, hf_longattn.apply(plain, REROPE)):
        for call in (m, m.generate):
            with pytest.raises(ValueError, match=r"AdaptionPromptConfig: it computes attention .* rerope.* Take LoRA"):
                call(input_ids=tokens())
    assert torch.equal(logits(hf_longattn.remove(plain)), want)
    under.disable_adapter_layers()
    assert torch.equal(logits(under.get_base_model()), alone)


def test_switched_off_by_its_layers(bases: dict[str, Path]) -> None:
    m = adapted(bases["llama"], "LORA")
    want = logits(m)
    m.base_model.disable_adapter_layers()
    assert torch.equal(logits(m.get_base_model()), logits(loaded(bases["llama"])))
    m.base_model.enable_adapter_layers()
    assert torch.equal(logits(m), want)


def test_corda(bases: dict[str, Path], tmp_path: Path) -> None:
    """It starts from what the model computes, under its method, and is saved as PEFT says: as plain LoRA."""
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    base = hf_longattn.apply(loaded(bases["llama"]), REROPE)
    want = logits(base)
    config = peft.LoraConfig(r=4, init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm"), **INTO)
    preprocess_corda(base, config, run_model=lambda: [base(tokens()[n : n + 1]) for n in range(2)])
    m = peft.get_peft_model(base, config)
    close(logits(m), want)
    m.peft_config["default"].init_lora_weights = True
    m.save_pretrained(tmp_path / "start")
    m.peft_config["default"].init_lora_weights = "corda"
    disturbed(m).save_pretrained(tmp_path / "it", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    again = peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path / "it")
    assert hf_longattn.get_config(again) == hf_longattn.get_config(m)
    close(logits(again), logits(m))


@pytest.mark.slow
def test_arrow(bases: dict[str, Path], tmp_path: Path) -> None:
    """Experts bring their method along; one that was trained without is refused beside them."""
    from peft.tuners.lora.config import ArrowConfig

    def arrow(*experts: str) -> Any:
        torch.manual_seed(0)  # the router starts from a random decomposition of the experts
        paths = [str(tmp_path / expert) for expert in experts]
        return peft.create_arrow_model(loaded(bases["llama"]), paths, ArrowConfig(top_k=1))

    for seed in range(2):
        for name, method in (("ours", REROPE), ("plain", None)):
            torch.manual_seed(0)
            base = loaded(bases["llama"]) if method is None else hf_longattn.apply(loaded(bases["llama"]), method)
            disturbed(peft.get_peft_model(base, KINDS["LORA"]()), seed).save_pretrained(tmp_path / f"{name}{seed}")
    torch.manual_seed(0)
    got = logits(m := arrow("ours0", "ours1"))
    torch.manual_seed(0)
    plain = logits(other := arrow("plain0", "plain1"))
    assert (plain - got).abs().max() > 1e-2
    close(logits(hf_longattn.apply(other, REROPE)), got)
    assert hf_longattn.get_config(m) == hf_longattn.get_config(other)
    with m.disable_adapter():
        assert torch.equal(logits(m), logits(loaded(bases["llama"])))
    with pytest.raises(ValueError, match="the model's other adapters under no method"):
        arrow("plain0", "ours0")


#: One of each way to store weights: of layers, of prompts, shared by all layers, of other modules.
SOME = ("LORA", "PREFIX_TUNING", "P_TUNING", "IA3", "VBLORA", "TRAINABLE_TOKENS", "LN_TUNING")
OTHERS = tuple(kind for kind in KINDS if kind not in SOME)


# other processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kinds", crossed([(SOME,), (OTHERS,)], [(SOME,)]), ids=len)
def test_in_a_new_process_with_the_package_and_without(kinds: tuple[str, ...], bases: dict[str, Path], tmp_path: Path) -> None:
    """With it every kind gives its logits again, without it every loader of PEFT's fails and names it."""
    for kind in kinds:
        m = adapted(bases["llama"], kind)
        m.save_pretrained(tmp_path / kind)
        save_file({"logits": logits(m).contiguous()}, tmp_path / kind / "logits.safetensors")
    code = """
        import sys, hf_longattn
        from pathlib import Path
        from safetensors.torch import load_file
        sys.path[:0] = sys.argv[3:]
        from test_adapter_kinds import loaded, logits, peft
        for path in sorted(Path(sys.argv[2]).iterdir()):
            m = peft.PeftModel.from_pretrained(loaded(sys.argv[1]), path)
            off = (logits(m) - load_file(path / "logits.safetensors")["logits"]).abs().max()
            print(path.name, float(off) <= 1e-6)
    """
    done = python(code, bases["llama"], tmp_path, Path(__file__).parent, Path(__file__).parents[1] / "kit")
    assert done.stdout.splitlines()[-len(kinds) :] == [f"{kind} True" for kind in sorted(kinds)], done.stderr
    code = """
        import sys, peft
        from pathlib import Path
        from transformers import AutoModelForCausalLM
        base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        for path in sorted(Path(sys.argv[2]).iterdir()):
            for load in (
                peft.PeftConfig.from_pretrained,
                peft.AutoPeftModelForCausalLM.from_pretrained,
                lambda path: peft.PeftModel.from_pretrained(base, path),
                AutoModelForCausalLM.from_pretrained,
            ):
                try:
                    load(path)
                except KeyError as error:
                    print(error.args[0])
    """
    says = "install the package hf_longattn, and import it before loading this adapter"
    done = python(code, bases["llama"], tmp_path)
    assert done.stdout.splitlines() == [f"hf_longattn.{k}: {says}" for k in sorted(kinds) for _ in range(4)], done.stderr


# LoRA's own --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_changed_base_becomes_plain_lora(start: str, bases: dict[str, Path], tmp_path: Path) -> None:
    for method in (REROPE, LEARNED):
        folder = tmp_path / method.name
        config = peft.LoraConfig(r=4, init_lora_weights=start, **INTO)
        m = peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), method), config)
        m.save_pretrained(folder / "start")
        disturbed(m, only="lora_")
        m.save_pretrained(folder / "end", path_initial_model_for_weight_conversion=str(folder / "start"))
        again = peft.PeftModel.from_pretrained(loaded(bases["llama"]), folder / "end")
        close(logits(again), logits(m), 1e-5)
        assert again.peft_config["default"].r == 8


SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 1}
EXPERTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "mixtral, as before version 5": (
        lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=2, sliding_window=None, **SIZES)),
        ["q_proj", "v_proj", "w1", "w2", "w3"],
    ),
    "mixtral, all linear": (
        lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=2, sliding_window=None, **SIZES)),
        "all-linear",
    ),
    "qwen3": (
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=2, moe_intermediate_size=16, head_dim=8, **SIZES)),
        ["q_proj", "gate_proj", "up_proj", "down_proj"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_adapted_as_without_a_method(case: str, tmp_path: Path) -> None:
    make, targets = EXPERTS[case]
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "base")
    counts = []
    for method in (None, REROPE):
        model = loaded(tmp_path / "base")
        if method is not None:
            hf_longattn.apply(model, method)
        m = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **CAUSAL))
        trained = {n: p.numel() for n, p in m.named_parameters() if p.requires_grad}
        counts.append((sum(trained.values()), sum("experts" in n for n in trained)))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0
    want = logits(disturbed(m))
    m.save_pretrained(tmp_path)
    for again in (
        peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path),
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        close(logits(again), want, 1e-6)


@pytest.mark.slow
def test_hotswapping_under_a_method_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """Weights are exchanged alone, and an adapter's attention is none of them."""
    for name, method in {"first": REROPE, "none": None, "other": None}.items():
        model = adapted(bases["llama"], "LORA", method)
        disturbed(model, seed=len(name), only="lora_").save_pretrained(tmp_path / name)
    m = peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path / "first")
    with pytest.raises(NotImplementedError, match=r"hotswapping exchanges weights alone, and .* trained under rerope"):
        hotswap_adapter(m, tmp_path / "none", "default")
    plain = peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path / "none")
    with pytest.raises(NotImplementedError, match="hotswapping exchanges weights alone"):
        hotswap_adapter(plain, tmp_path / "first", "default")
    hotswap_adapter(plain, tmp_path / "other", "default")
    close(logits(plain), logits(peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path / "other")), 1e-6)


@pytest.mark.slow
def test_what_saves_an_adapter_where_transformers_cannot(bases: dict[str, Path], tmp_path: Path) -> None:
    """Its own methods for adapters wait for a PEFT that is not released."""
    want = logits(m := adapted(bases["llama"], "LORA"))
    m.save_pretrained(tmp_path / "adapter")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    if Version(peft.__version__) >= Version(MIN_PEFT_VERSION):
        pytest.skip("this release of transformers saves it itself")
    with pytest.raises(ValueError, match=r"PEFT .*; hf_longattn\.save\(model, '.*again', overwrite=True\) saves it now"):
        native.save_pretrained(tmp_path / "again")
    hf_longattn.save(native, tmp_path / "again", overwrite=True)
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), want, 1e-6)


@pytest.mark.slow
def test_transformers_reads_weights_alone(bases: dict[str, Path], tmp_path: Path) -> None:
    """With a config of one's own, or over an adapter that is there."""
    adapted(bases["llama"], "LORA").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="runs no method: only its weights"):
        loaded(bases["llama"]).load_adapter(tmp_path, peft_config=KINDS["LORA"]())
    with pytest.raises(ValueError, match="runs no method: only its weights"):
        peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path, config=KINDS["LORA"]())
    adapted(bases["llama"], "LORA", None).save_pretrained(tmp_path / "plain")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    before = logits(native)
    with pytest.raises(ValueError, match="runs no method: only its weights"):
        native.load_adapter(tmp_path, "default", hotswap=True)
    with pytest.raises(ValueError, match="other adapters under no method"):
        native.load_adapter(tmp_path, "second")
    assert list(native.peft_config) == ["default"]
    assert torch.equal(logits(native), before)
    ours = loaded(bases["llama"])
    ours.load_adapter(tmp_path, peft_config=peft.PeftConfig.from_pretrained(tmp_path))
    close(logits(ours), logits(adapted(bases["llama"], "LORA")), 1e-6)
    with pytest.raises(NotImplementedError, match="hotswapping exchanges weights alone"):
        ours.load_adapter(tmp_path, "default", hotswap=True)


def test_transformers_interface(bases: dict[str, Path], tmp_path: Path) -> None:
    needs_adapters_of_transformers()
    m = hf_longattn.apply(loaded(bases["llama"]), REROPE)
    m.add_adapter(KINDS["LORA"]())
    disturbed(m, only="lora_")
    want = logits(m)
    m.save_pretrained(tmp_path)
    close(logits(peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path)), want, 1e-6)
    m.disable_adapters()
    assert torch.equal(logits(m), logits(loaded(bases["llama"])))
    m.enable_adapters()
    close(logits(m), want, 1e-6)


@pytest.mark.slow
def test_weighted_and_mixed(bases: dict[str, Path], tmp_path: Path) -> None:
    m = disturbed(with_second(adapted(bases["llama"], "LORA"), "LORA"), 6)
    m.add_weighted_adapter(["default", "second"], [0.5, 0.7], "sum", combination_type="cat")
    m.set_adapter("sum")
    want = logits(m)
    m.save_pretrained(tmp_path)
    close(logits(peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path / "sum")), want, 1e-6)
    again = peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path)
    again.load_adapter(tmp_path / "second", "second")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a sum that is made here is no adapter that records no attention
        again.add_weighted_adapter(["default", "second"], [0.5, 0.7], "sum", combination_type="cat")
    again.set_adapter("sum")
    close(logits(again), want, 1e-6)

    adapted(bases["llama"], "LOHA").save_pretrained(tmp_path / "loha")
    adapted(bases["llama"], "LORA").save_pretrained(tmp_path / "lora")
    mixed = peft.PeftMixedModel.from_pretrained(loaded(bases["llama"]), tmp_path / "lora", "lora")
    mixed.load_adapter(tmp_path / "loha", "loha")
    for name in ("lora", "loha"):
        mixed.set_adapter(name)
        close(logits(mixed), logits(peft.PeftModel.from_pretrained(loaded(bases["llama"]), tmp_path / name)), 1e-6)
    with mixed.disable_adapter():
        assert torch.equal(logits(mixed), logits(loaded(bases["llama"])))
    plain = peft.PeftMixedModel.from_pretrained(loaded(bases["llama"]), tmp_path / "lora", "lora")
    close(logits(plain.merge_and_unload()), logits(plain), 1e-5)


def test_learned_parameters_of_one_adapter_are_not_merged_with_the_weights_of_another(bases: dict[str, Path]) -> None:
    for method in (REROPE, LEARNED):
        m = disturbed(with_second(adapted(bases["llama"], "LORA", method), "LORA"), 6).eval()
        m.set_adapter("second")
        want = logits(m)
        m.set_adapter("default")
        if method is LEARNED:
            for merge in (m.merge_and_unload, m.merge_adapter):
                with pytest.raises(NotImplementedError, match=r"learned parameters .* those of default.*set_adapter"):
                    merge(adapter_names=["second"])
            m.set_adapter("second")
        close(logits(m.merge_and_unload(adapter_names=["second"])), want, 1e-5)


def test_a_weighted_sum_leaves_out_no_learned_parameters(bases: dict[str, Path]) -> None:
    for kind in ("LORA", "IA3"):
        m = with_second(adapted(bases["llama"], kind, LEARNED), kind)
        with pytest.raises(NotImplementedError, match=r"weighted sum .* leaves out the learned parameters of logn"):
            m.add_weighted_adapter(["default"], [1.0], "sum")
        assert list(m.peft_config) == ["default", "second"]


@pytest.mark.slow
@torch.no_grad()
def test_rows_of_several_adapters(bases: dict[str, Path]) -> None:
    ids = tokens()
    for method in (REROPE, LEARNED):
        m = disturbed(with_second(adapted(bases["llama"], "LORA", method), "LORA"), 6).eval()
        m.set_adapter("default")
        want = m(input_ids=ids).logits
        close(m(input_ids=ids, adapter_names=["default"] * 2).logits, want)
        if method is REROPE:
            close(m(input_ids=ids, adapter_names=["default", "second"]).logits[0], want[0])
            continue
        for call in (m, m.generate):
            with pytest.raises(NotImplementedError, match=r"learned parameters of logn.* those of default .*set_adapter"):
                call(input_ids=ids, adapter_names=["default", "second"])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_rows_of_several_adapters_in_the_first_call(bases: dict[str, Path], tmp_path: Path, call: str) -> None:
    """Before it, the rotation of a model that was loaded under its method is verified on one row."""
    hf_longattn.apply(loaded(bases["llama"]), REROPE).save_pretrained(tmp_path)
    m = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), peft.LoraConfig(**INTO))
    m, ids = disturbed(with_second(m, "LORA"), 6).eval(), tokens()
    how: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}

    def called(ids: torch.Tensor, **names: Any) -> Any:
        if call == "forward":
            return m(input_ids=ids, **names).logits[:, -1]
        return m.generate(input_ids=ids, **how, **names).logits[0]

    mixed = called(ids, adapter_names=["default", "second"])
    for row, name in enumerate(("default", "second")):
        m.set_adapter(name)
        close(mixed[row], called(ids[row : row + 1])[0])


@pytest.mark.slow
def test_rows_of_the_base_model_have_no_method_of_its_adapters(bases: dict[str, Path], tmp_path: Path) -> None:
    ids, m = tokens(), adapted(bases["llama"], "LORA")
    for names in (["default", "__base__"], ["__base__"] * 2):
        with pytest.raises(NotImplementedError, match=r"__base__ would run rerope.*disable_adapter"):
            m(input_ids=ids, adapter_names=names)
    hf_longattn.apply(loaded(bases["llama"]), REROPE).save_pretrained(tmp_path)
    m = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), peft.LoraConfig(**INTO)).eval()
    with m.disable_adapter():
        want = logits(m)
    close(m(input_ids=ids, adapter_names=["default", "__base__"]).logits[1], want[1])


def test_merged_while_switched_off_it_runs_the_method(bases: dict[str, Path]) -> None:
    m = adapted(bases["llama"], "LORA")
    want = logits(m)
    m.disable_adapter_layers()
    merged = m.merge_and_unload()
    assert hf_longattn.get_config(merged).name == "rerope"
    close(logits(merged), want, 1e-5)
    hf_longattn.remove(merged)


@pytest.mark.slow
def test_weights_of_modules_that_the_user_trains_beside(bases: dict[str, Path], tmp_path: Path) -> None:
    for beside in (None, ["lm_head"], ["longattn", "lm_head"]):
        config = peft.LoraConfig(modules_to_save=beside, **INTO)
        m = disturbed(peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), LEARNED), config))
        assert m.peft_config["default"].modules_to_save == sorted({*(beside or ()), "longattn"})
        assert config.modules_to_save == beside
        m.save_pretrained(tmp_path)
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
        close(logits(again), logits(m), 1e-6)


def test_an_adapter_without_the_learned_parameters_that_a_model_runs(bases: dict[str, Path], tmp_path: Path) -> None:
    peft.get_peft_model(loaded(bases["llama"]), peft.LoraConfig(**INTO)).save_pretrained(tmp_path)
    m = peft.get_peft_model(hf_longattn.apply(loaded(bases["llama"]), LEARNED), peft.LoraConfig(**INTO))
    want = logits(disturbed(m))
    with pytest.raises(
        ValueError, match=r"was trained without the learned parameters of logn\+output_layer_norm, which the model"
    ):
        m.load_adapter(tmp_path, "plain")
    assert list(m.peft_config) == ["default"]
    assert torch.equal(logits(m), want)
    with pytest.raises(ValueError, match="was trained without the learned parameters"):
        peft.PeftModel.from_pretrained(hf_longattn.apply(loaded(bases["llama"]), LEARNED), tmp_path)


def test_learned_parameters_are_as_wide_as_the_adapter(bases: dict[str, Path], tmp_path: Path) -> None:
    """In bfloat16 a step of less than 0.002 rounds away: none moved a scale of 1."""
    config = peft.LoraConfig(**INTO)

    def kinds(model: Any) -> set[torch.dtype]:
        return {x.dtype for name, x in model.named_parameters() if ".longattn." in name and ".modules_to_save." in name}

    def base() -> Any:
        return loaded(bases["llama"]).bfloat16()

    m = peft.get_peft_model(hf_longattn.apply(base(), LEARNED), config)
    assert kinds(m) == {torch.float32}
    assert kinds(peft.get_peft_model(hf_longattn.apply(base(), LEARNED), config, autocast_adapter_dtype=False)) == {
        torch.bfloat16
    }
    assert kinds(hf_longattn.apply(peft.get_peft_model(base(), config), LEARNED)) == {torch.float32}
    disturbed(m).save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert kinds(again) == {torch.float32}
    assert torch.equal(logits(again), logits(m))
    logits(m.merge_and_unload())


@pytest.mark.slow
def test_a_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = stock("llama").config.__class__(**stock("llama").config.to_dict() | {"num_labels": 3, "pad_token_id": 0})
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    m = disturbed(peft.get_peft_model(hf_longattn.apply(base, LEARNED), lora))
    with torch.no_grad():
        want = m.eval()(input_ids=tokens()).logits
        hf_longattn.save(m, made := tmp_path / "made")
        again = peft.AutoPeftModelForSequenceClassification.from_pretrained(made, num_labels=3)
        close(again.eval()(input_ids=tokens()).logits, want, 1e-6)
        if (native := by_transformers(made, AutoModelForSequenceClassification, num_labels=3)) is not None:
            close(native.eval()(input_ids=tokens()).logits, want, 1e-6)
    card = (made / "README.md").read_text()
    assert 'model = AutoPeftModelForSequenceClassification.from_pretrained("made", num_labels=3)' in card
    assert "Transformers runs it with that package installed." in card  # vLLM serves no classifier's adapter
    pushed = files(made, "someone/judge", Facts(), base_model="someone/llama")["README.md"]
    assert b'AutoPeftModelForSequenceClassification.from_pretrained("someone/judge", num_labels=3)' in pushed


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("task", "heads"), [("TokenClassification", ["classifier", "score"]), ("QuestionAnswering", ["qa_outputs"])]
)
def test_heads_that_peft_trains_beside(task: str, heads: list[str], method: str, tmp_path: Path) -> None:
    """PEFT adds them to the config that it was given, after the adapter has joined with a copy."""
    auto = getattr(transformers, f"AutoModelFor{task}")
    torch.manual_seed(0)
    auto.from_config(stock("llama").config).save_pretrained(tmp_path / "base")
    kind = {"TokenClassification": "TOKEN_CLS", "QuestionAnswering": "QUESTION_ANS"}[task]
    lora = peft.LoraConfig(task_type=kind, target_modules=["q_proj"])
    model = hf_longattn.apply(auto.from_pretrained(tmp_path / "base"), METHODS[method])
    m = disturbed(peft.get_peft_model(model, lora)).eval()
    assert m.peft_config["default"].modules_to_save == sorted([*heads, *["longattn"] * (method == "learned")])
    m.save_pretrained(tmp_path / "made")
    with torch.no_grad():
        want = m(input_ids=tokens())[0]
        again = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "made")
        close(again.eval()(input_ids=tokens())[0], want, 1e-6)


@pytest.mark.slow
def test_guards_by_peft_s_type(bases: dict[str, Path]) -> None:
    """What others decide by the type of an adapter is decided as without a method."""
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    hybrid = FalconH1ForCausalLM(FalconH1Config(**{k: v for k, v in SIZES.items() if k != "num_experts_per_tok"} | sizes))
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba-based models"):
        peft.get_peft_model(hf_longattn.apply(hybrid, REROPE), peft.LoraConfig(target_modules=["out_proj"]))
    teacher_sync = pytest.importorskip("trl.experimental.sdft.teacher_sync")
    assert teacher_sync.is_pure_lora_training(adapted(bases["llama"], "LORA"))
    assert not teacher_sync.is_pure_lora_training(adapted(bases["llama"], "LORA", LEARNED))


def test_saved_names_hold_no_more_than_peft_s(bases: dict[str, Path], tmp_path: Path) -> None:
    """Engines read these files with readers of their own: weights under PEFT's names, the record beside its fields."""
    plain, ours = adapted(bases["llama"], "LORA", None), adapted(bases["llama"], "LORA")
    plain.save_pretrained(tmp_path / "plain")
    ours.save_pretrained(tmp_path / "ours")
    weights = [load_file(tmp_path / x / "adapter_model.safetensors") for x in ("plain", "ours")]
    assert weights[0].keys() == weights[1].keys()
    saved = [json.loads((tmp_path / x / "adapter_config.json").read_text()) for x in ("plain", "ours")]
    record = {"longattn", "rope_parameters", "base_rope_parameters", "base_has_method"}
    assert saved[1].keys() - saved[0].keys() == record
    assert {k for k in saved[0] if saved[0][k] != saved[1][k]} == {"peft_type"}
