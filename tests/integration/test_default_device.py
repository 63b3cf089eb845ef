"""Whatever torch's default device is (`torch.set_default_device("cuda")`, `with torch.device("cuda")`), a model computes where
it is. Here "meta" stands for a GPU: what is made there by mistake meets no other tensor.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stock, tokens
from torch import Tensor
from transformers import DynamicCache

import hf_longattn
from hf_longattn.integration.caches import CACHE

PACKAGE = Path(hf_longattn.__file__).parent
#: torch's functions that make a tensor on the default device.
MAKES = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
#: Learned parameters are made where whoever builds the model says, as those of any module.
FREE = {"slots/learned.py"}
#: On a CPU a remap of a few queries, and of many; maps, temperatures, norms, sinks; keys in several intervals.
METHODS = (
    *("infoscale", "logn:learned=true", "adaptive_temperature", "cosscale", "scale_invariant", "alibi", "windowed:window=16"),
    *("rerope+infoscale:window=16", "self_extend:window=16:group=4", "dual_chunk:chunk=24:local=8", "streaming:window=16"),
    *("lm_infinite:window=16", "attention_sink", "output_layer_norm", "softmax_plus"),
)


def makes_anywhere(tree: ast.Module) -> list[int]:
    """The lines on which a tensor is made on the default device."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    of_torch = [n for n in calls if isinstance(n.func.value, ast.Name) and n.func.value.id == "torch" and n.func.attr in MAKES]  # type: ignore[attr-defined]
    return [n.lineno for n in of_torch if not any(k.arg in ("device", None) for k in n.keywords)]


def test_every_tensor_names_its_device() -> None:
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if str(f.relative_to(PACKAGE)) not in FREE]
    found = {f"{f.name}:{n}" for f in files for n in makes_anywhere(ast.parse(f.read_text(encoding="utf-8")))}
    assert not found
    assert makes_anywhere(ast.parse("x = torch.arange(3)\ny = torch.ones(3, device='cpu')")) == [1]


def computed(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits of a whole text, then of a token and of three behind a cache, and the gradient of a weight."""
    out = []
    with torch.no_grad():
        out.append(model(ids).logits)
        cache = DynamicCache(config=model.config)
        for part in (ids[:, :50], ids[:, 50:51], ids[:, 51:54]):
            out.append(model(part, **{CACHE: cache}).logits)
    loss = model(ids, use_cache=False).logits.sin().sum()
    weight = next(p for n, p in model.named_parameters() if n.endswith("q_proj.weight"))
    return [*out, *torch.autograd.grad(loss, weight)]


@pytest.mark.parametrize("method", METHODS)
def test_a_model_computes_where_it_is(method: str) -> None:
    model = hf_longattn.apply(stock("llama", num_hidden_layers=1), method, train_length=32)
    ids = tokens(2, 64)
    want = computed(model, ids)
    with torch.device("meta"):
        got = computed(model, ids)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("method", ["rerope:window=16", "infoscale"])
def test_a_method_is_put_in(method: str) -> None:
    model, ids = stock("llama", num_hidden_layers=1), tokens(2, 64)
    want = hf_longattn.apply(stock("llama", num_hidden_layers=1), method, train_length=32)(ids).logits
    with torch.device("meta"):
        got = hf_longattn.apply(model, method, train_length=32)(ids).logits
    assert torch.equal(got, want)
