"""Which precision this CPU multiplies fast."""

from __future__ import annotations

import functools
import platform

import torch


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has units for bfloat16 products.

    Asked and not timed: a busy machine would answer at random. A product of 2,048 x 128 x 512 takes a third of its time in
    float32 with them; without them 30 times as long (AVX2), or one and a half to twice (AVX512, where oneDNN still says yes).
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return _onednn_takes_bfloat16() and (not x86 or _has_avx512_bf16())


def fast_dtype() -> str:
    """The name of the precision to choose on this CPU: bfloat16 where it has units for it, else float32."""
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def _onednn_takes_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_avx512_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())
