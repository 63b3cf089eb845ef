"""The papers' statements about Gaussian logits, on short texts, and the committed run on long ones."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_longattn import LongAttnConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def theory() -> Any:
    spec = importlib.util.spec_from_file_location("theory", ROOT / "benchmarks" / "theory.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result(theory: Any) -> dict[str, Any]:
    return theory.run(longest=2048, samples=64)


def test_every_claim_holds_on_short_texts(theory: Any, result: dict[str, Any]) -> None:
    found = theory.claims(result)
    assert len(found) >= 18
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


def test_the_committed_run_holds_and_is_what_its_claims_say(theory: Any) -> None:
    committed = json.loads((ROOT / "docs" / "theory" / "theory.json").read_text(encoding="utf-8"))
    assert (committed["longest"], committed["samples"]) == (65536, 256)
    assert all(c["holds"] for c in committed["claims"])
    for again, before in zip(theory.claims(committed), committed["claims"], strict=True):
        assert again["claim"] == before["claim"]
        assert again["holds"]
        assert again["measured"] == pytest.approx(before["measured"])
