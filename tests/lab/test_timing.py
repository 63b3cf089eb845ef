"""Every call that the benchmark of attention alone times: it runs, on a small shape."""

from __future__ import annotations

import pytest
import torch

from lab.speed.timing import ALL, DECODED, EACH_TIME, METHODS, TURNED, Shape, attention_calls

SHAPE = Shape(heads=2, kv_heads=1, length=40, head_dim=8)


@pytest.mark.parametrize("mode", ["forward", "forward+backward", *DECODED])
def test_every_call_runs(mode: str) -> None:
    chosen = [(name, "auto") for name in (METHODS if mode in DECODED else ALL) if name != "none"]
    chosen += [("none", "torch sdpa"), ("none", "eager")]
    chosen += [(name, backend) for name in TURNED for backend in ("auto", EACH_TIME)] if mode in DECODED else []
    for call in attention_calls(SHAPE, mode, torch.float32, "cpu", chosen).values():
        call()
