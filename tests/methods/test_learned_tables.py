"""A logit map that learns its tables, KERPLE: the published formula, its gradients on every path, and what refuses it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import close, disturbed, logits, stock, tokens
from own_methods import Curves, Kerple, kerple
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.core.attend import KERNELS, attend
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout

pytestmark = [pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning"), pytest.mark.usefixtures("kerple_registered")]

METHODS = {
    "log": "kerple",
    "power": "kerple:kind=power",
    "sinks": "kerple:sink_tokens=2",
    "entropy": "kerple+adaptive_temperature",
    "remap": "kerple+rerope:window=6",
}


@pytest.fixture
def kerple_registered(own_registry: None) -> None:
    hf_longattn.register(Kerple)


def trained(method: str, backend: str = "auto", dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model with slopes that differ by layer and head."""
    m = hf_longattn.apply(stock("llama").to(dtype), METHODS[method])
    return hf_longattn.update(disturbed(m, only=".longattn."), backend=backend)


def with_gradients(m: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    out = m.train()(**inputs, use_cache=False).logits
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    out = torch.where(seen[..., None], out, 0.0)
    out.log_softmax(-1)[..., 3].sum().backward()
    return out.detach(), {name: x.grad for name, x in m.named_parameters()}


def inputs() -> dict[str, dict[str, Tensor]]:
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    places = torch.cat([torch.arange(9), torch.arange(15)]).expand(2, -1)
    return {
        "whole": {"input_ids": ids},
        "padded": {"input_ids": ids, "attention_mask": mask},
        "packed": {"input_ids": ids, "position_ids": places},
        "spread": {"input_ids": ids, "position_ids": (torch.arange(24) * 3).expand(2, -1), "attention_mask": mask**0},
    }


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_published_formula(kind: str) -> None:
    """Over plain attention, one head at a time."""
    method = Kerple(kind=kind)
    query, key, value = torch.randn(3, 1, 3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    r1, r2 = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in ([0.5, 1.0, 2.0], [0.25, 1.0, 1.5]))
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs().double()
    scores = query @ key.transpose(-1, -2) / 2 + kerple(kind, (r1, r2), distance)
    want = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1) @ value
    part = Curves(kind, 3).double()
    with torch.no_grad():
        part.r1.copy_(r1.flatten().log())
        part.r2.copy_(r2.flatten().log())
    rows = AttentionLayout.causal(7, 7, None, 0, torch.device("cpu"))
    for backend in ("auto", "tiled", "reference"):
        call = Call(
            query, key, value, LongAttnConfig(logit_map=method), rows, 0.5, learned={"logit_map": part}, backend=backend
        )
        close(attend(call), want, 1e-12, backend)


@pytest.mark.parametrize("given", ["whole", "padded", "packed", "spread"])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_the_reference_s(method: str, given: str) -> None:
    want, expected_gradients = with_gradients(trained(method, "reference"), **inputs()[given])
    got, gradients = with_gradients(trained(method), **inputs()[given])
    close(got, want, 1e-11)
    slopes = [name for name in expected_gradients if ".longattn." in name]
    assert len(slopes) == 8
    for name, gradient in expected_gradients.items():
        close(gradients[name], gradient, 1e-11, name)
    assert all(expected_gradients[name].abs().max() > 1e-4 for name in slopes)


@pytest.mark.parametrize("method", METHODS)
def test_decoding_is_one_pass(method: str) -> None:
    m, ids = trained(method, dtype=torch.float32).eval(), tokens()
    want = logits(m)
    close(want, logits(trained(method, "reference", torch.float32)), 1e-5)
    with torch.no_grad():
        out = m(ids[:, :15], use_cache=True)
        parts, cache = [out.logits], out.past_key_values
        parts += [m(ids[:, n : n + 1], past_key_values=cache).logits for n in range(15, 24)]
    close(torch.cat(parts, 1), want, 1e-5)


def test_two_layers_do_not_share_tables() -> None:
    """They share rows, config and shapes."""
    m = trained("log", dtype=torch.float32)
    with torch.no_grad():
        for layer in m.model.layers:
            layer.self_attn.longattn.logit_map.r1.fill_(layer.self_attn.layer_idx)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            close(m(tokens()).logits, hf_longattn.update(copy.deepcopy(m), backend="reference")(tokens()).logits, 1e-5)


def test_training_moves_slopes_that_are_saved_and_loaded(tmp_path: Path) -> None:
    m = hf_longattn.apply(stock("llama"), "kerple").train()
    optimizer = torch.optim.SGD([x for name, x in m.named_parameters() if ".longattn." in name], 1.0)
    m(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    parts = [layer.self_attn.longattn.logit_map for layer in m.model.layers]
    assert all((part.r1 != 0).all() and (part.r2 != 0).all() for part in parts)
    m.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(m))


@pytest.mark.slow
def test_compiled() -> None:
    want, want_gradients = with_gradients(trained("log", dtype=torch.float32), input_ids=tokens())
    m = trained("log", dtype=torch.float32)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    out = compiled.train()(input_ids=tokens(), use_cache=False).logits
    out.log_softmax(-1)[..., 3].sum().backward()
    close(out.detach(), want, 1e-5)
    for name, x in m.named_parameters():
        close(x.grad, want_gradients[name], 1e-5, name)


def test_kernels_without_gradients_of_tables_refuse() -> None:
    m = trained("log", "triton", torch.float32)
    with pytest.raises(ValueError, match="'triton' cannot compute this call: kerple learns its tables"):
        m(tokens())
    assert {name for name, kernel in KERNELS.items() if not kernel.lacks & {"map", "tables", "gradients"}} == {"tiled"}


class Wrong(nn.Module):
    def forward(self, gain: Tensor, bias: Tensor, own: Any = None) -> tuple[Tensor, Tensor]:
        return gain, bias[:, :-1]


def test_a_module_that_gives_other_tables_is_refused() -> None:
    wrong = type("Short", (Kerple,), {"name": "short", "module": lambda self, facts: Wrong()})
    with pytest.raises(ValueError, match=r"not shape \(4, 4096\), torch.float64 \(its module, bias\)"):
        hf_longattn.register(wrong)
