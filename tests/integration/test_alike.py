"""Layers that are called alike compute at once what the first of them found out; others find it out themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, DEFAULT
from helpers import close, disturbed, stock, tokens, with_sinks
from transformers import DynamicCache

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.core.kernels.kernel import KernelFailure
from hf_longattn.core.plan import ReadyPlan
from hf_longattn.integration import dispatch
from hf_longattn.integration.caches import CACHE

preset = LongAttnConfig.preset
LAYERS = 4


@pytest.fixture
def found_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the layers that found out themselves what they compute."""
    seen: list[int] = []
    original = dispatch.find_pass

    def find_pass(module: Any, *arguments: Any) -> Any:
        seen.append(module.layer_idx)
        return original(module, *arguments)

    monkeypatch.setattr(dispatch, "find_pass", find_pass)
    return seen


def attention(m: Any) -> list[Any]:
    return [x for x in m.modules() if hasattr(x, "layer_idx") and hasattr(x, "k_proj")]


def behind(m: Any) -> Any:
    """A KV cache that holds a text."""
    cache = DynamicCache(config=m.config)
    m(tokens(1), **{CACHE: cache})
    return cache


def decoded(m: Any, cache: Any) -> torch.Tensor:
    return m(tokens(1, 1, seed=3), **{CACHE: cache}).logits  # type: ignore[no-any-return]


def finders(m: Any, found_out: list[int]) -> list[int]:
    """The layers that find out themselves how a token is decoded; with gradients all do, and give the same logits."""
    want = decoded(m, behind(m)).detach()
    with torch.no_grad():
        cache = behind(m)
        found_out.clear()
        close(decoded(m, cache), want, 2e-6)
    return found_out


@pytest.mark.parametrize("case", ["infoscale", "rerope", DEFAULT, "output_layer_norm", "sink", "within"])
def test_the_first_of_layers_finds_out(case: str, found_out: list[int]) -> None:
    config = {"within": preset("infoscale"), "sink": preset("attention_sink")}.get(case) or CASES[case]
    m = disturbed(hf_longattn.apply(stock("llama", num_hidden_layers=LAYERS), config))
    assert finders(m, found_out) == [0]


def test_layers_with_sinks_of_their_own_are_alike(found_out: list[int]) -> None:
    default = {"rope_type": "default", "rope_theta": 1e4}
    m = with_sinks(
        "GptOss",
        num_experts_per_tok=2,
        rope_parameters=default,
        num_hidden_layers=LAYERS,
        layer_types=["full_attention"] * LAYERS,
    )
    assert finders(hf_longattn.apply(m, CASES["rerope"]), found_out) == [0]
    attention(m)[1].sinks = None
    assert finders(m, found_out) == [0, 1, 2]  # the last one noted is compared


def test_layers_with_other_numbers_are_others(found_out: list[int]) -> None:
    """A scaling, a method and heads of its own."""
    m = hf_longattn.apply(stock("llama", num_hidden_layers=LAYERS), CASES[DEFAULT])
    attention(m)[1].scaling *= 2
    assert finders(m, found_out) == [0, 1]
    m = hf_longattn.apply(
        stock("llama", num_hidden_layers=LAYERS), [preset(DEFAULT, layers=[0, 1]), preset("alibi", layers=[2, 3])]
    )
    assert finders(m, found_out) == [0, 2]


def test_a_layer_that_reads_both_ways_is_refused_behind_others() -> None:
    m = hf_longattn.apply(stock("llama", num_hidden_layers=LAYERS), CASES[DEFAULT])
    attention(m)[2].is_causal = False
    with torch.no_grad(), pytest.raises(ValueError, match="is_causal=False on its attention layers"):
        decoded(m, behind(m))


def test_a_capture_sees_its_layer_among_others() -> None:
    m = hf_longattn.apply(stock("llama", num_hidden_layers=LAYERS), CASES[DEFAULT])
    with torch.no_grad():
        want = decoded(m, behind(m))
        with hf_longattn.capture(m, [2], "logits") as seen:
            close(decoded(m, behind(m)), want, 2e-6)
    assert list(seen.result().layers) == [2]


@torch.no_grad()
def test_attention_weights_come_from_every_layer() -> None:
    m = hf_longattn.apply(stock("llama", num_hidden_layers=LAYERS), CASES[DEFAULT])
    out = m(tokens(1, 1, seed=3), **{CACHE: behind(m)}, output_attentions=True)
    assert len(out.attentions) == LAYERS
    assert all(x is not None and x.shape[-1] == 25 for x in out.attentions)


@torch.no_grad()
def test_a_kernel_that_fails_behind_the_first_layer_is_replaced(found_out: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    m = hf_longattn.apply(stock("llama", num_hidden_layers=LAYERS), CASES[DEFAULT])
    want, run, ran = decoded(m, behind(m)), ReadyPlan.run, [0]

    def failing(self: ReadyPlan, *arguments: Any) -> torch.Tensor:
        ran[0] += 1
        if ran[0] == 2:
            raise KernelFailure("it does not compile")
        return run(self, *arguments)

    cache = behind(m)
    monkeypatch.setattr(ReadyPlan, "run", failing)
    found_out.clear()
    close(decoded(m, cache), want, 2e-6)
    assert found_out == [0, 1]
