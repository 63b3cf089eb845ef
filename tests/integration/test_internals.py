"""The facts of other packages that none of them promises: one test for each, which fails on a release that changed it."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from helpers import stock
from peft import PeftModelForCausalLM
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DecisionTransformerConfig,
    DecisionTransformerModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    masking_utils,
    modeling_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_longattn.integration import internals
from hf_longattn.integration.internals import MaskInterval, interval_of


def test_the_implementation_is_an_entry_of_each_config() -> None:
    config = PreTrainedConfig(attn_implementation="eager")
    assert (internals.get_implementation(config), vars(config)[internals.IMPLEMENTATION]) == ("eager", "eager")
    internals.set_implementation(config, "sdpa")
    assert config._attn_implementation == "sdpa"
    assert internals.get_implementation(PreTrainedConfig()) is None


def test_setting_it_leaves_nested_configs_alone() -> None:
    config: Any = AutoConfig.for_model("llava")
    config._attn_implementation = "eager"
    internals.set_implementation(config, "sdpa")
    assert internals.get_implementation(config.text_config) == "eager"


def test_a_config_knows_its_revision() -> None:
    config = PreTrainedConfig()
    assert internals.commit_of(config) == "main"
    config._commit_hash = "abc"  # as `from_pretrained` sets it
    assert internals.commit_of(config) == "abc"


def test_auto_classes_and_their_tables() -> None:
    autos = internals.auto_classes()
    assert {AutoModelForCausalLM, AutoModelForImageTextToText} <= set(autos)
    assert internals.names_by_type(AutoModelForCausalLM)["llama"] == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["llama"]
    assert internals.classes_for(AutoModelForCausalLM, LlamaConfig()) == (LlamaForCausalLM,)
    assert internals.classes_for(AutoModelForImageTextToText, LlamaConfig()) == ()
    assert internals.adapter_classes(PeftModelForCausalLM) == [("AutoPeftModelForCausalLM", AutoModelForCausalLM)]
    assert internals.adapter_classes(None) == []


def test_attention_modules_name_the_interface() -> None:
    found = [type(m).__name__ for m in stock("llama").modules() if internals.uses_interface(m)]
    assert found == ["LlamaAttention"] * len(found) != []
    assert any(internals.uses_interface(m) for m in stock("gpt2").modules())


class Biased(nn.Module):
    """An attention that hands on a bias, as DeBERTa's and T5's do."""

    def forward(self, hidden: torch.Tensor, cross_attention_states: Any = None) -> Any:
        return inspect.Signature().bind_partial(position_bias=hidden)


def test_code_shows_what_a_module_passes_on() -> None:
    plain, biased = stock("llama").model.layers[0].self_attn, Biased()
    assert (internals.passes_on(biased, "position_bias"), internals.passes_on(plain, "position_bias")) == (True, False)
    assert (internals.has_local(biased, "cross_attention_states"), internals.has_local(plain, "hidden_states")) == (True, True)


def test_mask_functions_are_known_by_their_closures() -> None:
    ids = torch.tensor([[0, 0, 1]])
    window = masking_utils.sliding_window_causal_mask_function(8)
    packed = masking_utils.packed_sequence_mask_function(ids)
    assert interval_of(masking_utils.causal_mask_function) == MaskInterval()
    assert interval_of(window) == MaskInterval(window=8)
    both = interval_of(masking_utils.and_masks(window, packed))
    assert both is not None
    assert both.window == 8
    assert both.sequence_ids is ids
    assert interval_of(masking_utils.or_masks(window, packed)) is None
    assert interval_of(lambda *where: True) is None


def test_what_transformers_has_initialised_is_marked(tmp_path: Path) -> None:
    saved = stock("llama")
    saved.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert internals.is_initialised(model.model.layers[0].self_attn.q_proj.weight)
    assert not internals.is_initialised(nn.Linear(2, 2))


def test_a_part_is_known_while_its_whole_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}
    original = modeling_utils.PreTrainedModel.post_init

    def post_init(self: Any) -> None:
        seen[type(self).__name__] = internals.is_part(self)
        original(self)

    monkeypatch.setattr(modeling_utils.PreTrainedModel, "post_init", post_init)
    stock("llama")
    LlamaForCausalLM(stock("llama").config)
    assert seen == {"LlamaModel": True, "LlamaForCausalLM": False}


def test_what_a_class_passes_over_is_known() -> None:
    class Passing(LlamaForCausalLM):
        _keys_to_ignore_on_load_unexpected = (r"^mtp.*",)

    assert internals.is_passed_over(Passing, "mtp.layers.0.weight")
    assert not internals.is_passed_over(LlamaForCausalLM, "mtp.layers.0.weight")


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_the_report_of_a_load_is_read_off_its_log(tmp_path: Path, level: int) -> None:
    saved = stock("llama")
    weights = saved.state_dict()
    weights.pop("model.norm.weight")
    saved.save_pretrained(tmp_path, state_dict=weights)
    logger = logging.getLogger(modeling_utils.__name__)
    filters, verbosity = len(logger.filters), transformers.logging.get_verbosity()
    handler = logging.Handler()
    handler.emit = (heard := []).append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    transformers.logging.set_verbosity(level)
    try:
        with internals.load_reports() as reports:
            LlamaForCausalLM.from_pretrained(tmp_path)
    finally:
        transformers.logging.set_verbosity(verbosity)
        logging.getLogger("transformers").removeHandler(handler)
    assert not heard  # as without the package, nothing of layers that were not sharded
    assert len(reports) == 1
    assert "model.norm.weight" in reports[0]
    assert (len(logger.filters), logger.level) == (filters, logging.NOTSET)


def test_what_dynamo_runs_while_it_makes_a_graph_is_known() -> None:
    seen = []

    def backend(graph: Any, example: Any) -> Any:
        seen.append(internals.tracing_context() is not None)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert seen == [True]
    assert internals.tracing_context() is None


def test_entries_of_a_torch_module() -> None:
    module = nn.BatchNorm1d(2)
    assert internals.buffers_of(module)["running_mean"] is module.running_mean
    assert set(internals.HOOKS) <= vars(module).keys()
    whole = nn.Sequential(module)
    assert internals.children_of(whole)["0"] is module
    assert not internals.is_compiled(module)
    module.compile()
    assert internals.is_compiled(module)
    assert not internals.is_replica(module)
    x = torch.zeros(4)
    assert internals.storage_of(x) == internals.storage_of(x[1:]) != internals.storage_of(x.clone())


def test_hooks_of_accelerate() -> None:
    module = nn.Linear(2, 2)
    assert (internals.has_hook(module), internals.placing_hooks(module)) == (False, [])
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    assert internals.has_hook(module)
    assert [x.execution_device for x in internals.placing_hooks(module)] == ["cpu"]


def test_frames() -> None:
    def inner() -> Any:
        return internals.frame_above(1)

    assert inner() is inspect.currentframe()
    ended: list[Any] = []
    (lambda: ended.append(inspect.currentframe()))()
    assert internals.is_running(inner())
    assert not internals.is_running(ended[0])
    assert internals.deepspeed_group() is None


def test_a_class_that_names_no_embeddings_of_tokens() -> None:
    """Transformers raises NotImplementedError there."""
    model = DecisionTransformerModel(DecisionTransformerConfig(hidden_size=8, n_layer=1, n_head=1))
    assert internals.input_embeddings(model) is None
    assert internals.input_embeddings(stock("llama")) is not None


def test_evaluating_bitsandbytes_weights_of_4_bit_packs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False).to("cpu")
    assert internals.packs_when_evaluated(layer)
    assert not internals.packs_when_evaluated(nn.Linear(1, 1))
