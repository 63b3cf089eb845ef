"""Adapters on bases that are kept in 4 or 8 bit: a step of training, saving, and equal logits after loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from cases import CASES, model_config
from helpers import close, tokens, write_gguf
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import hf_longattn


def settings(kind: str) -> Any:
    if kind.startswith("gguf"):
        pytest.importorskip("gguf")
        return None
    if kind == "torchao int8":
        quantization = pytest.importorskip("torchao.quantization")
        return TorchAoConfig(quantization.Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True) if kind.endswith("8") else BitsAndBytesConfig(load_in_4bit=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["logn_learned", "rerope"])
@pytest.mark.parametrize("kind", ["bitsandbytes 8", "bitsandbytes 4", "torchao int8", "gguf 8"])
def test_an_adapter_on_a_quantised_base_reloads(kind: str, case: str, tmp_path: Path) -> None:
    quantised = {"quantization_config": settings(kind), "dtype": torch.float32, "device_map": "cpu"}
    wide = model_config("llama", hidden_size=64, intermediate_size=64, head_dim=16)  # blocks of 64 share a scale
    plain = AutoModelForCausalLM.from_config(wide)
    plain.save_pretrained(tmp_path / "base")
    if kind == "gguf 8":
        write_gguf(plain, tmp_path / "base" / "m.gguf", quantised=True)
        quantised = {"gguf_file": "m.gguf", "dtype": torch.float32}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **quantised)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    m = peft.get_peft_model(hf_longattn.apply(base, CASES[case]), config)
    optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.05)
    m(tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert all(p.grad.any() for name, p in m.named_parameters() if "lora_B" in name)  # through what is kept in few bits
    optimizer.step()
    m.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = m(tokens()).logits
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **quantised)
        close(peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()(tokens()).logits, logits, 1e-6, kind)
        with m.disable_adapter():
            assert (m(tokens()).logits - logits).abs().max() > 1e-3


def test_weights_of_4_bit_are_not_packed_while_rotations_are_verified(tmp_path: Path) -> None:
    """PEFT unpacks them to others when it loads an adapter, so that its logits would be wrong."""
    pytest.importorskip("bitsandbytes")
    wide = model_config("llama", hidden_size=128, intermediate_size=128, head_dim=32)  # two blocks of 64 in a row
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path)
    quantised = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "dtype": torch.float32, "device_map": "cpu"}
    m = AutoModelForCausalLM.from_pretrained(tmp_path, **quantised)
    for module in (packing := [x for x in m.modules() if hasattr(x, "support_avx512bf16_for_cpu")]):
        module.support_avx512bf16_for_cpu = True
    hf_longattn.apply(m, CASES["rerope"])
    assert packing
    assert not any(module.training or hasattr(module.weight.quant_state, "packing_format_for_cpu") for module in packing)
