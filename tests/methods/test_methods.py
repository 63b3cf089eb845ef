"""The formulas: what the papers claim for them, and their limits."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import closed_form
import numpy as np
import pytest
import torch
from cases import CASES, HEADS, LAYERS
from typer.testing import CliRunner

from hf_longattn.cli import app
from hf_longattn.methods import AdaptiveTemperature, AttentionSink, OutputLayerNorm, OutputStandardise, ScaleInvariant
from hf_longattn.methods.adaptive_temperature import PUBLISHED
from hf_longattn.slots.learned import FeatureAffine
from hf_longattn.slots.registry import method

CPU = torch.device("cpu")


def tables(method: Any, length: int = 400, heads: int = HEADS) -> tuple[np.ndarray, np.ndarray]:
    gain, bias = method.tables(heads, length, CPU)
    assert gain.dtype == bias.dtype == torch.float64
    assert gain.shape[1] == bias.shape[1] == length
    assert {gain.shape[0], bias.shape[0]} <= {1, heads}
    return gain.numpy(), bias.numpy()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("case", [c for c in CASES if CASES[c].logit_map is not None])
def test_tables_are_the_closed_form(case: str, layer: int) -> None:
    """L = gain S + bias for every S."""
    method = CASES[case].logit_map
    assert method is not None
    t, no_sink = np.arange(400), np.full(400, 10**9)
    gain, bias = tables(CASES[case].for_layer(layer).logit_map)
    for s in (-3.0, 0.0, 2.5):
        scores = np.full((1, HEADS, 1, 400), s)
        want = closed_form.LOGIT_MAPS[method.name](method.to_dict(), layer, scores, t, no_sink)[0, :, 0]
        np.testing.assert_allclose(np.broadcast_to(gain * s + bias, want.shape), want, atol=1e-12)


def test_equation_16_by_hand() -> None:
    gain, bias = tables(ScaleInvariant(tau=10.0))
    for t in (0, 1, 10, 100, 399):
        assert gain[0, t] == pytest.approx(math.sqrt(1 + 2 * math.log(1 + t / 10)), abs=1e-13)
        assert bias[0, t] == pytest.approx(-2 * math.log(1 + t / 10), abs=1e-13)
    assert (gain[0, 0], bias[0, 0]) == (pytest.approx(1, abs=1e-13), pytest.approx(0, abs=1e-13))


def test_boundary_condition_is_alpha_equal_beta_equal_root_e() -> None:
    root = math.exp(0.5)
    for a, b in zip(tables(ScaleInvariant()), tables(ScaleInvariant(alpha=root, beta=root)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def gaussian_mean(f, mean: float = 0.0, variance: float = 1.0) -> float:  # type: ignore[no-untyped-def]
    """E f(S) for S ~ N(mean, variance), by Gauss-Hermite quadrature."""
    x, w = np.polynomial.hermite_e.hermegauss(80)
    return float((w * f(mean + math.sqrt(variance) * x)).sum() / w.sum())


@pytest.mark.parametrize(("alpha", "beta", "tau"), [(math.exp(0.5), math.exp(0.5), 10.0), (0.8, 1.9, 2.0), (1.5, 0.7, 30.0)])
def test_expected_attention_falls_as_one_over_distance(alpha: float, beta: float, tau: float) -> None:
    """The property that gives the method its name: E exp L_t = α / (t/τ + 1), and E[L exp L] its entropy's β."""
    gain, bias = tables(ScaleInvariant(alpha=alpha, beta=beta, tau=tau))
    for t in (0, 1, 7, 50, 399):
        a, b, decay = gain[0, t], bias[0, t], t / tau + 1
        assert gaussian_mean(lambda s, a=a, b=b: np.exp(a * s + b)) == pytest.approx(alpha / decay, rel=1e-10)
        entropy = gaussian_mean(lambda s, a=a, b=b: (a * s + b) * np.exp(a * s + b))
        assert entropy == pytest.approx(beta / decay, rel=1e-10)


@pytest.mark.parametrize(("mean", "variance", "decay"), [(-5.4, 8.9, 1.0), (0.7, 0.5, 0.6), (2.0, 3.0, 0.0)])
def test_calibrated_form_falls_as_its_decay(mean: float, variance: float, decay: float) -> None:
    gain, bias = tables(ScaleInvariant(logit_mean=mean, logit_variance=variance, decay=decay, tau=4.0))
    at = [gaussian_mean(lambda s, t=t: np.exp(gain[0, t] * s + bias[0, t]), mean, variance) for t in (0, 1, 20, 300)]
    assert at[0] == pytest.approx(math.exp(mean + variance / 2), rel=1e-8)
    for t, value in zip((0, 1, 20, 300), at, strict=True):
        assert value / at[0] == pytest.approx((1 + t / 4.0) ** -decay, rel=1e-8)


def test_calibrated_form_holds_the_papers_and_plain_attention() -> None:
    standard = ScaleInvariant(logit_mean=0.0, logit_variance=1.0, decay=1.0)
    for a, b in zip(tables(standard), tables(ScaleInvariant()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    # α = e^{σ²/2}, β = σ² e^{σ²/2} is the same with variance σ², up to a constant that the softmax cancels
    sigma2 = 2.3
    paper = ScaleInvariant(alpha=math.exp(sigma2 / 2), beta=sigma2 * math.exp(sigma2 / 2))
    assert tables(paper)[0][0, 0] == pytest.approx(math.sqrt(sigma2))
    gain, bias = tables(ScaleInvariant(decay=0.0, logit_mean=-4.0, logit_variance=8.0))
    np.testing.assert_allclose(gain, 1.0)
    np.testing.assert_allclose(bias, 0.0)


def test_one_of_the_calibrated_parameters_is_enough() -> None:
    want = ScaleInvariant(logit_mean=0.0, logit_variance=2.0, decay=1.0)
    for a, b in zip(tables(ScaleInvariant(logit_variance=2.0)), tables(want), strict=True):
        np.testing.assert_array_equal(a, b)
    zero = ScaleInvariant(logit_mean=0.0)
    for a, b in zip(tables(zero), tables(ScaleInvariant()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_strength_blends() -> None:
    full, none, half = (tables(ScaleInvariant(strength=x)) for x in (1.0, 0.0, 0.5))
    np.testing.assert_array_equal(none[0], np.ones_like(none[0]))
    np.testing.assert_array_equal(none[1], np.zeros_like(none[1]))
    np.testing.assert_allclose(half[0], (full[0] + 1) / 2)
    np.testing.assert_allclose(half[1], full[1] / 2)


@pytest.mark.parametrize("tau", [1e-6, 1e-2, 10.0, 1e6, 1e12])
def test_a_million_tokens_stay_finite_and_monotone(tau: float) -> None:
    gain, bias = tables(ScaleInvariant(tau=tau), length=1_000_000)
    for table, sign in ((gain, 1), (bias, -1)):
        assert np.isfinite(table.astype(np.float32)).all()
        assert (sign * np.diff(table) >= 0).all()
    assert gain[0, -1] ** 2 == pytest.approx(1 + 2 * math.log1p(999_999 / tau), rel=1e-12)


def test_huge_tau_is_plain_attention() -> None:
    gain, bias = tables(ScaleInvariant(tau=1e15), length=4096)
    np.testing.assert_allclose(gain, 1.0, atol=1e-11)
    np.testing.assert_allclose(bias, 0.0, atol=1e-11)


def test_beta_at_its_bound_is_accepted() -> None:
    alpha = 3.0
    gain, _ = tables(ScaleInvariant(alpha=alpha, beta=alpha * math.log(alpha)))
    assert gain[0, 0] == pytest.approx(0.0, abs=1e-6)
    assert np.isfinite(gain).all()
    for alpha in (1.4266658782958985, *np.linspace(1.1, 20.0, 200)):  # rounding puts a_0² of some below 0
        gain, bias = tables(ScaleInvariant(alpha=float(alpha), beta=float(alpha) * math.log(float(alpha))))
        assert np.isfinite(gain).all()
        assert np.isfinite(bias).all()


def test_attention_by_distance_range_is_equal() -> None:
    """For Gaussian scores every range [t, 4t) far beyond τ gets the attention α τ ln 4; plain attention gives it 3t."""
    n, tau = 1 << 16, 4.0
    gain, bias = (x[0] for x in tables(ScaleInvariant(tau=tau), length=n))
    expected = np.exp(bias + gain**2 / 2)
    shares = [expected[4**k : 4 ** (k + 1)].sum() for k in range(5, 8)]
    np.testing.assert_allclose(shares, math.exp(0.5) * tau * math.log(4), rtol=0.01)


@pytest.mark.parametrize(("deviation", "smaller"), [(0.01, 0.05), (0.07, 0.001)])
def test_the_epsilon_of_output_norms_is_added_to_the_variance(deviation: float, smaller: float) -> None:
    """As docs/reference/methods/output_norm.md says; added to the deviation it would not be felt at either."""
    x = torch.randn(1, 2, 3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = deviation * (x - x.mean((1, 3), keepdim=True)) / x.std((1, 3), correction=0, keepdim=True)
    got = OutputStandardise().normalise(x).std((1, 3), correction=0)  # statistics over all heads together
    assert torch.allclose(got, torch.full_like(got, (1 + 1e-5 / deviation**2) ** -0.5), atol=1e-9)
    assert float(1 - got.mean()) == pytest.approx(smaller, rel=0.1)


@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parameters", [{}, {"deviation": 0.4, "mean": 0.1}, {"per_head": True}], ids=str)
def test_output_norms_of_half_precision_are_rounded_once(parameters: dict[str, Any], of_weights: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    affine = FeatureAffine(48)
    with torch.no_grad():
        for parameter, start in ((affine.weight, 0.3), (affine.bias, -0.5)):
            parameter.copy_(torch.linspace(start, start + 1, 48).bfloat16())
    for norm, part in ((OutputStandardise, None), (OutputLayerNorm, affine.to(of_weights))):
        got = norm(**parameters).normalise(x, part)
        want = norm(**parameters).normalise(x.double(), part)
        assert got.dtype == x.dtype
        assert bool(((got.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-5).all())


@pytest.mark.parametrize("beyond", ["published", "saturate"])
@pytest.mark.parametrize("coefficients", [(2.5,), (-1.0,), (0.3, 1.2), (1.0, 0.0, 2.0), (-1.0, 0.0, 2.0), PUBLISHED], ids=str)
def test_the_factor_is_the_polynomial_beyond_the_threshold(coefficients: tuple[float, ...], beyond: str) -> None:
    """Also where no number takes it below 1."""
    entropy = torch.linspace(0, 9, 1001, dtype=torch.float64)
    factor = AdaptiveTemperature(coefficients=coefficients, threshold=0.7, beyond=beyond).factor(entropy)
    h = entropy.numpy()
    grid = np.linspace(0.7, 16, 100_001)
    held = np.minimum(h, grid[np.polyval(coefficients, grid).argmax()]) if beyond == "saturate" else h
    want = np.where(h <= 0.7, 1.0, np.maximum(np.polyval(coefficients, held), 1.0))
    np.testing.assert_allclose(factor.numpy(), want, rtol=0, atol=1e-11)


def test_the_command_lists_every_method_as_the_page_of_methods_does() -> None:
    """One line each."""
    result = CliRunner().invoke(app, ["methods"])
    assert result.exit_code == 0, result.output
    rows = [re.split(r" {2,}", line) for line in result.output.splitlines()]
    assert rows[0] == ["name", "slot", "training", "what it does"]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "methods" / "README.md").read_text(encoding="utf-8")
    listed = {}
    for names, slot, what in re.findall(r"^\| (\[`.+?) \| (.+?) \| (.+?) \|$", page, re.M):
        listed |= {name: [slot.replace(" ", "_"), what] for name in re.findall(r"\[`(\w+)`\]", names)}
    known = {name: [slot, what] for name, slot, _, what in rows[1:]}
    assert known == listed, "docs/reference/methods/README.md has a line for each method"
    for name, _, training, _ in rows[1:]:
        assert (training == "needed") is method(name).needs_training, name
    assert [AttentionSink(logit=x).needs_training for x in (-1.0, 0.0, 1.0)] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "lines", "training"),
    [
        ("rerope:window=4k", ["rerope (positions): ", "window     4096 (default None)"], "not needed with these parameters."),
        (
            "infoscale+rerope",
            ["rerope (positions): ", "infoscale (temperature): ", "clamp         true "],
            "not needed with these parameters, but with clamp=false.",
        ),
        ("rerope+infoscale:clamp=false", ["clamp         false (default true)"], "needed for infoscale: a model that was not"),
        ("rerope+cosscale+logn:clamp=no", [], None),
        ("ssmax+cosscale:scale=2", [], None),
        ("rerope+infoscale+cosscale:clamp=false", ["cosscale (score): "], "needed for cosscale and infoscale: "),
    ],
)
def test_the_command_says_what_a_combination_needs(text: str, lines: list[str], training: str | None) -> None:
    result = CliRunner().invoke(app, ["methods", text])
    assert (result.exit_code == 0) is (training is not None), result.output
    at = [result.output.index(line) for line in lines]
    assert at == sorted(at)
    assert training is None or f"\nTraining: {training}" in result.output
