"""The FlashAttention backend, against a stand-in with its interface: the package itself needs a GPU."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import close
from torch import Tensor

from hf_longattn import LongAttnConfig, attention, reference_attention
from hf_longattn.core.kernels import flash

CASES = {
    "infoscale": LongAttnConfig.preset("infoscale", train_length=4),
    "infoscale+cosscale": LongAttnConfig.preset("infoscale+cosscale", train_length=4, scale=5.0),
    "output_standardise": LongAttnConfig.preset("output_standardise"),
}


def inputs(q_len: int = 9, kv_len: int = 9, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, h, n, 8, dtype=dtype) for h, n in ((4, q_len), (2, kv_len), (2, kv_len))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A module with flash_attn's function: (batch, length, heads, head_dim), lower-right causal, grouped heads."""
    seen: list[dict[str, Any]] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
        seen.append({"q": tuple(q.shape), "k": tuple(k.shape), "dtype": q.dtype})
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        s = softmax_scale * torch.einsum("bihd,bjhd->bhij", q.float(), k.float())
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        p = torch.softmax(s.masked_fill(hidden & causal, -torch.inf), -1)
        return torch.einsum("bhij,bjhd->bihd", p, v.float()).to(q.dtype)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    flash._flash.cache_clear()
    yield seen
    flash._flash.cache_clear()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (1, 9)])
def test_folded_methods_go_to_flash(name: str, q_len: int, kv_len: int, calls: list[dict[str, Any]]) -> None:
    tensors = inputs(q_len, kv_len)
    out = attention(*tensors, CASES[name], backend="flash")
    assert calls == [{"q": (2, q_len, 4, 8), "k": (2, kv_len, 2, 8), "dtype": torch.bfloat16}]
    want = reference_attention(*(x.double() for x in tensors), CASES[name])
    close(out.double(), want, tolerance=0.03)


def test_refused_with_a_reason(calls: list[dict[str, Any]]) -> None:
    q, k, v = inputs()
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[3, 1] = False
    for arguments, config, message in (
        ({}, LongAttnConfig.preset("scale_invariant"), "scale_invariant changes logits by distance"),
        ({"attention_mask": mask}, CASES["infoscale"], "padded, packed or masked"),
        ({"query_start": 3}, CASES["infoscale"], "padded, packed or masked"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, config, backend="flash", **arguments)
    with pytest.raises(ValueError, match="computes float16 and bfloat16"):
        attention(q.float(), k.float(), v.float(), CASES["infoscale"], backend="flash")
    assert not calls


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)
    flash._flash.cache_clear()
    with pytest.raises(ValueError, match="pip install flash-attn"):
        attention(*inputs(), CASES["infoscale"], backend="flash")
