"""measure and calibrate against a dense computation on what the model itself passes to its attention."""

from __future__ import annotations

import pytest
import torch
from helpers import stock, tokens
from torch import Tensor
from transformers.models.llama import modeling_llama

import hf_longattn
from hf_longattn import LongAttnConfig, Measurements

FIELDS = ("logit_mean", "logit_variance", "entropy", "sink_mass")


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, check_dtype=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Scaled scores and outputs (batch, heads, q_len, ...) of every layer, as transformers' eager attention computes them."""
    seen = []
    eager = modeling_llama.eager_attention_forward

    def recording(module, query, key, value, mask, scaling, **kwargs):  # type: ignore[no-untyped-def]
        out = eager(module, query, key, value, mask, scaling, **kwargs)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        seen.append((scaling * query @ key.transpose(-1, -2), out[0].transpose(1, 2)))
        return out

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", recording)
    return seen


@pytest.mark.parametrize("sinks", [1, 3])
def test_measure_is_the_dense_computation(calls: list[tuple[Tensor, Tensor]], sinks: int) -> None:
    model, text = stock("llama"), tokens(batch=2, length=150)  # more rows than one block
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(text)
    found = hf_longattn.measure(model, [text], sinks)
    assert found.tokens == 300
    assert model.config._attn_implementation == "eager"
    i, j = torch.arange(150)[:, None], torch.arange(150)
    for layer, (scores, out) in enumerate(calls[: model.config.num_hidden_layers]):
        kept = scores[:, :, (j <= i) & (j >= sinks)].transpose(0, 1).flatten(1).double()
        p = torch.softmax(scores.masked_fill(j > i, -torch.inf), -1).double()
        same(found.logit_mean[layer], kept.mean(-1))
        same(found.logit_variance[layer], kept.var(-1, correction=0))
        same(found.entropy[layer], torch.special.entr(p).sum(-1).mean((0, 2)))
        same(found.sink_mass[layer], p[..., :sinks].sum(-1).mean((0, 2)))
        same(found.output_mean[layer], out.mean((0, 2, 3)))
        same(found.output_deviation[layer], out.std(-1, correction=0).mean((0, 2)))
        same(found.all_heads_mean[layer], out.mean())
        same(found.all_heads_deviation[layer], out.transpose(1, 2).flatten(2).std(-1, correction=0).mean())


def test_padding_and_batching_change_nothing() -> None:
    model, (long, short) = stock("llama"), (tokens(batch=1, length=20, seed=1), tokens(batch=1, length=12, seed=2))
    padded = torch.cat([long, torch.cat([torch.zeros_like(long[:, :8]), short], 1)])
    mask = torch.ones_like(padded)
    mask[1, :8] = 0
    apart = hf_longattn.measure(model, [long, short])
    together = hf_longattn.measure(model, [{"input_ids": padded, "attention_mask": mask}])
    for name in FIELDS:
        same(getattr(together, name), getattr(apart, name))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", ["output_standardise", "output_layer_norm"])
def test_a_calibrated_norm_keeps_the_mean_and_spread(name: str, per_head: bool) -> None:
    model, text = stock("llama"), tokens(length=64)
    before = hf_longattn.measure(model, [text])
    hf_longattn.apply(model, hf_longattn.calibrate(model, [text], name, per_head=per_head))
    after = hf_longattn.measure(model, [text])
    fields = ("output_mean", "output_deviation") if per_head else ("all_heads_mean", "all_heads_deviation")
    for field in fields:  # of the first layer: those above it read changed inputs
        torch.testing.assert_close(getattr(after, field)[0], getattr(before, field)[0], atol=1e-5, rtol=0.02)


def test_calibrate_sets_the_map_and_leaves_the_rest() -> None:
    model, text = stock("llama"), tokens(length=64)
    found: Measurements = hf_longattn.measure(model, [text])
    config = hf_longattn.calibrate(model, [text], "scale_invariant", tau=5.0, decay=0.5, backend="tiled")
    want = LongAttnConfig.preset(
        "scale_invariant",
        tau=5.0,
        decay=0.5,
        sink_tokens=1,
        logit_mean=tuple(map(tuple, found.logit_mean.tolist())),
        logit_variance=tuple(map(tuple, found.logit_variance.tolist())),
        backend="tiled",
    )
    assert config == want
    assert hf_longattn.calibrate(model, [text], "scale_invariant", sink_tokens=0).logit_map.sink_tokens == 0
    with pytest.raises(ValueError, match="nothing to calibrate"):
        hf_longattn.calibrate(model, [text], "infoscale")
    with pytest.raises(ValueError, match="no batches"):
        hf_longattn.measure(model, [])


def test_layers_that_no_method_changes_are_not_measured() -> None:
    found = hf_longattn.measure(stock("gemma3"), [tokens()])
    windowed = [kind != "full_attention" for kind in stock("gemma3").config.layer_types]
    assert found.logit_mean.isnan().all(-1).tolist() == windowed
