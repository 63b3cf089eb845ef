"""measure and calibrate against a dense computation on what the model itself passes to its attention."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from cases import SUBSET
from helpers import close, stock, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

import hf_longattn
from hf_longattn import LongAttnConfig, Measurements
from hf_longattn.evaluation import calibrate as calibration
from hf_longattn.evaluation import copying_heads
from hf_longattn.integration.observer import observe

FIELDS = [f.name for f in dataclasses.fields(Measurements)]


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, check_dtype=False)


Calls = dict[int, tuple[Tensor, Tensor]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """By layer: scaled and capped scores, and outputs (batch, heads, q_len, ...), as eager attention has them."""
    seen: Calls = {}

    def record(modeling):  # type: ignore[no-untyped-def]
        eager = modeling.eager_attention_forward

        def recording(module, query, key, value, mask, scaling, **kwargs):  # type: ignore[no-untyped-def]
            out = eager(module, query, key, value, mask, scaling=scaling, **kwargs)
            scores = scaling * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
            if cap := kwargs.get("softcap"):
                scores = cap * torch.tanh(scores / cap)
            seen[module.layer_idx] = scores, out[0].transpose(1, 2)
            return out

        monkeypatch.setattr(modeling, "eager_attention_forward", recording)

    record(modeling_llama)
    record(modeling_gemma2)
    return seen


@pytest.mark.parametrize(("family", "sinks"), [("llama", 1), ("llama", 3), ("gemma2", 1)])
def test_measure_is_the_dense_computation(family: str, calls: Calls, sinks: int) -> None:
    model, text = stock(family), tokens(batch=2, length=150)  # more rows than one block
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(text)
    dense = dict(calls)
    found = hf_longattn.measure(model, [text], sinks)
    assert found.tokens == 300
    assert model.config._attn_implementation == "eager"
    i, j = torch.arange(150)[:, None], torch.arange(150)
    for layer, (scores, out) in dense.items():
        if family == "gemma2" and model.config.layer_types[layer] != "full_attention":
            continue
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


@pytest.mark.parametrize("carrier", ["compact", "dense"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batching_change_nothing(side: str, carrier: str, request: pytest.FixtureRequest) -> None:
    """Neither as keys nor as rows."""
    if carrier == "dense":
        request.getfixturevalue("unknown_masks")
    model, (long, short) = stock("llama"), (tokens(batch=1, length=20, seed=1), tokens(batch=1, length=12, seed=2))
    pad = torch.zeros_like(long[:, :8])
    padded = torch.cat([long, torch.cat([pad, short] if side == "left" else [short, pad], 1)])
    apart = hf_longattn.measure(model, [long, short])
    together = hf_longattn.measure(model, [{"attention_mask": (padded != 0).long(), "input_ids": padded}])
    assert together.tokens == apart.tokens == 32
    for name in FIELDS[:-1]:
        same(getattr(together, name), getattr(apart, name))


@pytest.mark.parametrize("method", [None, "scale_invariant"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("family", SUBSET)
def test_measuring_leaves_the_model_as_it_was(family: str, fails: bool, method: str | None) -> None:
    model, text = stock(family), tokens()
    if method is not None:
        hf_longattn.apply(model, method)

    def state():  # type: ignore[no-untyped-def]
        with torch.no_grad():
            logits = model(text).logits
        return logits, model.config.to_dict(), model.config._attn_implementation, str(hf_longattn.describe(model))

    before = state()
    if fails:
        with pytest.raises(Exception, match="index out of range"):
            hf_longattn.measure(model, [text, text + 10**6])
    else:
        hf_longattn.measure(model, [text])
    after = state()
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
    assert all("_longattn" not in m.__dict__ for m in model.modules()) or method is not None


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", ["output_standardise", "output_layer_norm"])
def test_a_calibrated_norm_keeps_the_mean_and_spread(name: str, per_head: bool) -> None:
    model, text = stock("llama"), tokens(length=64)

    def spread() -> tuple[Tensor, Tensor]:
        """Of the first layer's outputs: those above it read changed inputs."""
        with torch.no_grad(), observe(model, lambda layer, call, output: outputs.append(output), [0]):
            model(text)
        by_token = outputs[-1].transpose(1, 2) if per_head else outputs[-1].transpose(1, 2).flatten(2)
        return by_token.mean(-1).mean((0, 1)), by_token.std(-1, correction=0).mean((0, 1))

    outputs: list[Tensor] = []
    before = spread()
    hf_longattn.apply(model, hf_longattn.calibrate(model, [text], name, per_head=per_head))
    torch.testing.assert_close(spread(), before, atol=1e-5, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_copying_heads_attend_to_what_came_next(family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four passages of 128 tokens in 2048: read again from 1024 on, the nearest first; and the heads found are capped."""
    model, text = stock(family), tokens(batch=1, length=2048)
    model.set_attn_implementation("eager")
    again = text.clone()
    sources = {1024: 768, 1280: 512, 1536: 256, 1792: 0}
    for target, source in sources.items():
        again[:, target : target + 128] = text[:, source : source + 128]
    with torch.no_grad():
        model(again)
    want, i, j = torch.full((4, 4), torch.nan), torch.arange(2048)[:, None], torch.arange(2048)
    full = [n for n in calls if family == "llama" or model.config.layer_types[n] == "full_attention"]
    for layer in full:
        p = torch.softmax(calls[layer][0][0].masked_fill(j > i, -torch.inf), -1)
        each = [p[:, t + n, s + n + 1] for t, s in sources.items() for n in range(16, 127)]
        want[layer] = torch.stack(each, -1).mean(-1)
    found = copying_heads(model, text)
    torch.testing.assert_close(found, want, atol=1e-7, rtol=1e-3, check_dtype=False, equal_nan=True)

    groups = found.unflatten(1, (2, 2)).amax(-1)
    monkeypatch.setattr(calibration, "COPYING", float(groups.nanmedian()))
    stretch = hf_longattn.calibrate(model, [text], "leaky_rerope", window=100, stretch=3).positions.stretch
    each = [layer if isinstance(layer, tuple) else (layer, layer) for layer in stretch]
    assert each == [tuple(math.inf if p >= calibration.COPYING else 3 for p in layer) for layer in groups.tolist()]
    assert {math.inf, 3} == {k for layer in each for k in layer}
    assert all(stretch[n] == 3 for n in range(4) if n not in full)
    padded = {"input_ids": torch.nn.functional.pad(text, (1500, 0)), "attention_mask": torch.ones(1, 2048)}
    padded["attention_mask"] = torch.nn.functional.pad(padded["attention_mask"], (1500, 0))
    assert hf_longattn.calibrate(model, padded, "leaky_rerope", window=100, stretch=3).positions.stretch == stretch


def test_calibrating_heads_needs_a_text_and_one_stretch() -> None:
    with pytest.raises(ValueError, match="at least 1024 tokens"):
        copying_heads(stock("llama"), tokens(1, 500))
    with pytest.raises(ValueError, match="leaky_rerope has nothing to calibrate"):
        hf_longattn.calibrate(stock("llama"), [tokens(1, 1024)], "leaky_rerope", stretch=[2, 3, 4, 5])


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


@pytest.mark.parametrize("name", ["scale_invariant", "output_standardise", "scale_invariant+output_layer_norm"])
def test_a_calibrated_model_survives_saving(name: str, tmp_path: Path) -> None:
    model, text = stock("gemma3"), tokens(length=40)
    config = hf_longattn.calibrate(model, [text], name)
    with torch.no_grad():
        want = hf_longattn.apply(model, config)(text).logits
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(text).logits, want)
    assert hf_longattn.get_config(loaded) == hf_longattn.get_config(model)


@pytest.mark.parametrize(
    "method", ["scale_invariant+logn:train_length=4", "rerope+attention_sink:window=4", "output_layer_norm"]
)
def test_what_is_measured_is_the_models_own_under_a_method_too(method: str) -> None:
    """In the first layer, whose inputs no method has changed yet."""
    text = tokens(length=40)
    plain = hf_longattn.measure(stock("llama"), [text])
    under = hf_longattn.measure(hf_longattn.apply(stock("llama"), LongAttnConfig.parse(method)), [text])
    for name in FIELDS[:-1]:
        close(getattr(under, name)[0], getattr(plain, name)[0])


def test_layers_that_no_method_changes_are_not_measured() -> None:
    found = hf_longattn.measure(stock("gemma3"), [tokens()])
    windowed = [kind != "full_attention" for kind in stock("gemma3").config.layer_types]
    assert found.logit_mean.isnan().all(-1).tolist() == windowed


# the fit of App. F --------------------------------------------------------------------------------------------------


def entropy(row: Tensor) -> float:
    return float(torch.special.entr(torch.softmax(row, -1)).sum())


def sample(theta: float, wanted: float, seed: int) -> Tensor:
    """Logits of the given entropy at temperature 1 whose element 0 is most probable at temperature theta.

    d/dβ log p_0 = l_0 - E_β l, which is 0 where l_0 is the mean of the others under β = 1/θ; log p_0 is concave in β.
    """
    others = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def at(spread: float) -> Tensor:
        x = spread * others
        return torch.cat([(torch.softmax(x / theta, -1) @ x)[None], x])

    low, high = 0.0, 60.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy(at(middle)) > wanted else (low, middle)
    return at(low)


def test_the_fit_finds_the_polynomial_that_made_the_samples() -> None:
    """1/θ = 0.2 H² + 0.1, at seven θ that lie on the grid."""
    thetas = (0.6, 0.7, 0.8, 1.0, 1.5, 2.0, 2.5)
    logits = [sample(theta, ((1 / theta - 0.1) / 0.2) ** 0.5, seed) for seed, theta in enumerate(thetas)]
    for row, theta in zip(logits, thetas, strict=True):
        assert entropy(row) == pytest.approx(((1 / theta - 0.1) / 0.2) ** 0.5, abs=1e-9)
        assert row.argmax() != 0
    sharp = [torch.tensor([5.0, 0.0, 1.0]), torch.tensor([0.3, 0.0, 0.0, 0.0])]  # their target is the largest: left out
    fitted = hf_longattn.fit_adaptive_temperature(iter(sharp + logits), [0] * 9, degree=2, threshold=0.3, beyond="saturate")
    assert fitted.coefficients == pytest.approx((0.2, 0.0, 0.1), abs=1e-8)
    assert (fitted.threshold, fitted.beyond) == (0.3, "saturate")


def test_the_fit_needs_more_samples_than_coefficients() -> None:
    rows = [torch.randn(9, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    largest = [int(r.argmax()) for r in rows]
    with pytest.raises(ValueError, match="only 0 samples"):
        hf_longattn.fit_adaptive_temperature(rows, largest)
    second = [int(r.argsort()[-2]) for r in rows[:2]]
    with pytest.raises(ValueError, match=r"only 2 samples .* needs more than 2"):
        hf_longattn.fit_adaptive_temperature(rows, second + largest[2:], degree=2)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        hf_longattn.fit_adaptive_temperature(rows, [0])


@torch.no_grad()
def test_batches_may_be_embeddings() -> None:
    m, ids = stock("llama"), tokens()
    got, want = (hf_longattn.measure(m, x) for x in ({"inputs_embeds": m.get_input_embeddings()(ids)}, ids))
    assert torch.equal(got.logit_mean, want.logit_mean)
