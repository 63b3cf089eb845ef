"""Tiny checkpoints with weights in fewer bits, as their tools write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

#: By name: the scheme of compressed-tensors, or None for torchao's int8, and what vLLM needs beside it on a CPU.
KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "torchao int8": (None, {}),
    "int8 weights and activations": ("W8A8", {}),
    "int4 weights": ("W4A16", {"dtype": "bfloat16"}),
    "float8 weights and activations": ("FP8_DYNAMIC", {"dtype": "bfloat16"}),
}
GROUP = 32


def quantised(source: Path, kind: str, target: Path) -> Path:
    """A copy of a checkpoint, with quantised weights."""
    if not (target / "config.json").exists():
        scheme = KINDS[kind][0]
        (_torchao if scheme is None else _compressed)(source, target, scheme)
    return target


def _torchao(source: Path, target: Path, _: None) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    quantisation = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=quantisation).save_pretrained(target)


def _compressed(source: Path, target: Path, name: str) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"])
    scheme.weights.group_size = scheme.weights.group_size and GROUP
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)


@torch.no_grad()
def _calibrate(module: nn.Module) -> None:
    """Scales by the largest weight of a row, or of a group of a row."""
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.utils import calculate_qparams

    asked = module.quantization_scheme.weights
    groups = module.weight.unflatten(1, (-1, asked.group_size or module.weight.shape[1]))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), asked)
    module.weight_scale.copy_(scale.view_as(module.weight_scale))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.copy_(zero.view_as(module.weight_zero_point))
    module.quantization_status = QuantizationStatus.FROZEN
