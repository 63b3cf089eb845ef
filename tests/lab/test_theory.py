"""The papers' statements about Gaussian logits, on short texts, and the committed run on long ones."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_longattn import LongAttnConfig
from hf_longattn.methods import InfoScale

ROOT = Path(__file__).parents[2]
COMMITTED: dict[str, Any] = json.loads((ROOT / "docs" / "theory" / "theory.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def theory() -> Any:
    from lab.theory import gaussian as theory

    return theory


@pytest.fixture(scope="module")
def result(theory: Any) -> dict[str, Any]:
    return theory.run(longest=2048, samples=64)


@pytest.mark.slow
def test_every_claim_holds_on_short_texts(theory: Any, result: dict[str, Any]) -> None:
    found = theory.claims(result)
    assert len(found) >= 40
    assert [c for c in found if not c["holds"]] == []


def test_a_wrong_formula_fails_a_claim(theory: Any, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims can fail: a map whose gain is right and whose shift is not."""
    wrong = LongAttnConfig.preset("scale_invariant", tau=10.0, strength=0.8)
    monkeypatch.setitem(theory.SCHEMES, theory.INVARIANT, wrong)
    curves = {name: dict(scheme) for name, scheme in result["schemes"].items()}
    closed = {n: dict(c) for n, c in result["closed"].items()}
    for n, letter in enumerate("ZN"):
        closed[theory.INVARIANT][letter] = [theory.unnormalised(wrong, t, 10 * t)[n] for t in closed[theory.INVARIANT]["t"]]
    failed = [c["claim"] for c in theory.claims(result | {"schemes": curves, "closed": closed}) if not c["holds"]]
    assert len(failed) == 2
    assert all("in [t, 10t) tends to" in claim for claim in failed)


def test_entropies_are_those_of_a_direct_sample(result: dict[str, Any]) -> None:
    """Softmax over 1,024 drawn logits in a few lines, without the package."""
    logits = torch.randn(400, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    t = torch.arange(1024, dtype=torch.float64)
    gain = torch.sqrt(1 + 2 * torch.log1p(t / 10))
    for name, mapped in (
        ("plain", logits),
        ("LogN, s = 0.4", 0.4 * math.log(1024) * logits),
        ("scale-invariant, τ = 10", gain * logits - gain**2 + 1),
    ):
        p = torch.softmax(mapped, -1)
        scheme = result["schemes"][name]
        at = scheme["lengths"].index(1024)
        for quantity, per_sample in (("entropy", torch.special.entr(p).sum(-1)), ("local_mass", p[:, :100].sum(-1))):
            error = math.hypot(float(per_sample.std()) / 20, scheme[quantity][at][1])
            assert scheme[quantity][at][0] == pytest.approx(float(per_sample.mean()), abs=5 * error)
        if name != "LogN, s = 0.4":
            q = torch.softmax(mapped[:, 100:1000], -1)
            curve = scheme["range_entropy"]["10"]
            value, error = curve["entropy"][curve["t"].index(100)]
            entropy = torch.special.entr(q).sum(-1)
            assert value == pytest.approx(float(entropy.mean()), abs=5 * math.hypot(float(entropy.std()) / 20, error))


def page(name: str, folder: str = "reference/methods") -> str:
    return " ".join((ROOT / "docs" / folder / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.25])
def test_ranges_keep_their_share_for_a_decay_of_1_alone(theory: Any, decay: float) -> None:
    """E[Z] and E[Ñ] over [t, 10t) grow by 10^(1 - γ) a decade, for any μ and σ²."""
    config = LongAttnConfig.preset("scale_invariant", decay=decay)
    found = {t: theory.unnormalised(config, t, 10 * t) for t in (100, 1000, 10_000, 100_000)}
    for n in (0, 1):
        assert found[100_000][n] / found[10_000][n] == pytest.approx(10 ** (1 - decay), rel=2e-3)
    told = page("scale_invariant.md")
    if decay == 0.25:
        assert f"grows from {found[100][0]:.0f} at t = 100 to {found[100_000][0]:,.0f} at t = 100,000" in told
    if decay == 1:
        assert f"where γ = 1 has {found[100][0]:.1f} and {found[100_000][0]:.1f}" in told
    t = torch.arange(5000, dtype=torch.float64)
    mean, variance = -7.2, 11.9
    calibrated = LongAttnConfig.preset("scale_invariant", decay=decay, logit_mean=mean, logit_variance=variance)
    assert calibrated.logit_map is not None
    gain, bias = (x[0] for x in calibrated.logit_map.tables(1, 5000, torch.device("cpu")))
    expected = gain * mean + bias + gain**2 * variance / 2  # ln E[exp L]
    torch.testing.assert_close(expected - expected[0], -decay * torch.log1p(t / 10))


@pytest.mark.parametrize("variance", [1.0, 11.9])
def test_infoscale_slows_the_growth_of_entropy_and_does_not_stop_it(variance: float) -> None:
    """The table of its page, on drawn logits."""
    factor = InfoScale(clamp=False).formula(torch.tensor([8192, 16384]), 64, 8192)
    assert factor.tolist() == pytest.approx([1.0, 1.0324], abs=1e-4)
    generator = torch.Generator().manual_seed(3)
    entropy = {}
    for n in (8192, 16384):
        logits = variance**0.5 * torch.randn(256, n, generator=generator)
        for name, scale in (("plain", 1.0), ("infoscale", float(factor[1]) if n == 16384 else 1.0)):
            per_row = torch.special.entr(torch.softmax(scale * logits, -1)).sum(-1)
            entropy[name, n] = (float(per_row.mean()), float(per_row.std()) / 16)
    told = re.findall(r"\| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page("infoscale.md"))
    for n, *cells in told[:2]:
        for name, cell in zip(("plain", "infoscale"), cells[:2] if variance == 1 else cells[2:], strict=True):
            value, error = entropy[name, int(n.replace(",", ""))]
            assert float(cell) == pytest.approx(value, abs=4 * error + 0.01)
    before, plain, scaled = entropy["plain", 8192][0], entropy["plain", 16384][0], entropy["infoscale", 16384][0]
    assert before + 0.1 < scaled < plain - 0.03
    if variance == 1:
        assert scaled == pytest.approx(math.log(16384) - float(factor[1]) ** 2 / 2, abs=0.01)


def test_infoscale_with_its_own_entropy_holds_it_as_the_page_says() -> None:
    committed = COMMITTED["infoscale"]
    assert committed["lengths"] == [8192, 16384, 65536]
    curves = committed["variances"]
    told = page("infoscale.md")
    for label, name in (("plain", "plain"), ("ε = 0", "published"), ("ε the entropy at 8,192 keys", "own entropy")):
        growth = [f"{c[name][-1][0] - c[name][0][0]:.2f}" for c in curves.values()]
        (line,) = re.findall(rf"\| growth, {label}(?: \([^|]*\))? \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", told)
        assert list(line) == growth
    factors = [curve["factor, own entropy"][-1] for curve in curves.values()]
    assert f"(factors {factors[0]:.2f}, {factors[1]:.2f}, {factors[2]:.2f})" in told
    for curve in curves.values():
        formula = InfoScale(clamp=False, epsilon=curve["plain"][0][0]).formula(torch.tensor([65536]), 64, 8192)
        assert float(formula) == pytest.approx(curve["factor, own entropy"][-1])
    deviation = curves["11.9"]["plain"][0][1] * 1024**0.5
    assert f"A single row's entropy deviates by {deviation:.1f} nats" in told


@pytest.mark.parametrize("alpha", [2.0, 8.0, 16.0])
def test_entropy_on_a_sphere_is_that_of_drawn_keys(theory: Any, alpha: float) -> None:
    """Eq. 9 of Li et al., and how far its Laplace and Taylor forms are from it: v = α / d at λ = 1."""
    keys = torch.randn(20_000, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    cosines = torch.nn.functional.normalize(keys, dim=-1)[:, 0]  # to a query along the first axis
    drawn = float(torch.special.entr(torch.softmax(alpha * cosines, 0)).sum()) - math.log(len(keys))
    exact = theory.on_a_sphere(alpha, 64)
    assert exact == pytest.approx(drawn, abs=0.05)
    t = (alpha / 64) ** 2
    assert abs(theory.by_laplace(t, 64) - exact) < 0.01
    if alpha == 16.0:
        assert exact - theory.by_taylor(t, 64) > 0.1


def test_infoscale_on_its_own_premise_is_what_the_pages_say() -> None:
    found = COMMITTED["premise"]
    curves, growth = found["products"], found["growth"].values()
    short = {p: a - b for p, a, b in zip(curves["product"], curves["quadrature"], curves["taylor"], strict=True)}
    shares = {k: [f"{g[k] / g['plain']:.2f}" for g in growth] for k in ("published", "own entropy")}
    lab, method = page("attention.md", "lab"), page("infoscale.md")
    for told in (lab, method):
        assert f"{short[0.3]:.2f} nats" in told
        assert f"{short[0.6]:.1f} nats" in told
    assert f"| 0 | {', '.join(shares['published'])} |" in lab
    assert f"| 0 | {', '.join(shares['own entropy'])} |" in lab
    assert " to ".join(shares["published"][::2]) in method.replace(" %", "")


def test_rope_under_cosscale_is_what_the_rotation_gives() -> None:
    """Theorem 3.5 under its premise in closed form: cos(q, R_t k) is η m_t, m_t the mean of cos(t θ), and a random rest."""
    t, i = torch.arange(1024.0)[:, None], torch.arange(64.0)
    m = torch.cos(t * 10_000.0 ** (-i / 64)).mean(1)
    found = COMMITTED["cosscale"]
    for c, eta, share in zip(found["scale"], found["peak"], found["at the peak"]["share"], strict=True):
        by_distance, rest = eta**2 * m.var(correction=0), (1 - eta**2) * (1 - m.square().mean()) / 127
        among_queries = eta**2 * ((1 + torch.cos(2 * t * 10_000.0 ** (-i / 64))).mean(1) / 2 - m**2).mean() / 65
        assert share == pytest.approx(float(by_distance / (by_distance + rest + among_queries)), rel=0.05, abs=5e-4), c
    assert max(found["even"]["share"]) < 0.005


def test_the_entropy_of_scale_invariant_attention_rises_as_the_page_says() -> None:
    schemes = COMMITTED["schemes"]
    found = schemes["scale-invariant, τ = 10"]
    first, last = found["entropy"][0][0], found["entropy"][-1][0]
    assert (found["lengths"][0], found["lengths"][-1]) == (16, 65536)
    assert f"from {first:.2f} nats over 16 keys to {last:.2f} over 65,536" in page("attention.md", "lab")


def test_the_committed_run_holds_and_is_what_its_claims_say(theory: Any) -> None:
    assert (COMMITTED["longest"], COMMITTED["samples"]) == (65536, 256)
    assert all(c["holds"] for c in COMMITTED["claims"])
    for again, before in zip(theory.claims(COMMITTED), COMMITTED["claims"], strict=True):
        assert again["claim"] == before["claim"]
        assert again["holds"]
        assert again["measured"] == pytest.approx(before["measured"])
