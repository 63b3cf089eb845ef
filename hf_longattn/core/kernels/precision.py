"""The precisions that a device multiplies fast."""

from __future__ import annotations

import functools
import platform
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..plan import Operand


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Tell whether this CPU has units for bfloat16 products.

    Asked and not timed: a busy machine would answer at random. A product of 2,048 x 128 x 512 takes a third of its time in
    float32 with them; without them 30 times as long (AVX2), or one and a half to twice (AVX512, where oneDNN still says yes).
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return _onednn_takes_bfloat16() and (not x86 or _has_avx512_bf16())


def halves_are_fast(value: Tensor | Operand | None) -> bool:
    """Tell whether products of half-precision factors, summed in float32, beat those in float32."""
    if value is None or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    return value.device.type != "cpu" or (value.dtype == torch.bfloat16 and cpu_multiplies_bfloat16())


def multiplies_fast(dtype: str, device: str | torch.device = "cpu") -> bool:
    """Tell whether a device multiplies a precision at least as fast as float32."""
    if dtype in ("float32", "float64"):
        return dtype == "float32"
    kind = torch.device(device).type
    if kind == "cpu":
        return dtype == "bfloat16" and cpu_multiplies_bfloat16()
    return kind != "cuda" or dtype != "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)


def auto_dtype(device: str | torch.device = "cpu") -> str:
    """The precision to load a model in: "bfloat16" where the device has units for it, else "float32".

    Most checkpoints are in bfloat16, and `from_pretrained` leaves them so; on a CPU without such units that is several
    times slower than float32. `from_pretrained(name, dtype=hf_longattn.auto_dtype())` is fast on each.
    """
    return "bfloat16" if multiplies_fast("bfloat16", device) else "float32"


def _onednn_takes_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_avx512_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())
