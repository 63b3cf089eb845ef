"""The papers' statements about Gaussian logits, checked on this package's formulas; writes theory.json and theory.png.

Scale-invariant attention (Anson et al. 2025): Fig. 1 (top), 2 and 6, and that total attention and negentropy per range are
constant. Vanishing variance (Li et al. 2025): Proposition 1. Softmax is not enough (Veličković et al. 2024): Lemma 2.1,
Proposition 3.2 and Fig. 5. Information entropy invariance (Li et al. 2025): how far InfoScale holds the entropy, of Gaussian
logits and on the paper's own premise (Eq. 8 to 12), and Theorem 3.5 on CosScale. Logits are drawn; the package's attention and
the sums behind `hf_longattn.capture` do the rest. One query per length looks back on independent keys. Exit status 1 if a
claim fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_longattn import LongAttnConfig
from hf_longattn.core.attend import attend
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout, RowBounds
from hf_longattn.evaluation.measures.diagnostics import Diagnostics
from hf_longattn.evaluation.measures.sums import Options, Sums, collect
from hf_longattn.evaluation.report.figures import COLOURS, MARKERS, png, pyplot
from hf_longattn.methods import InfoScale
from lab.papers.masked import expected_peak

TAU, DELTAS, HEADS, BATCH, WIDTH = 10.0, (2, 5, 10), 8, 4, 8
SCHEMES = {
    "plain": LongAttnConfig(),
    "LogN, s = 0.4": LongAttnConfig.preset("logn", scale=0.4, train_length=2, clamp=False),
    "scale-invariant, τ = 10": LongAttnConfig.preset("scale_invariant", tau=TAU),
}
PLAIN, LOGN, INVARIANT = SCHEMES
#: InfoScale: variances of the logits, the last one measured in a pretrained model, and the head dimension.
VARIANCES, HEAD_DIM = (1.0, 4.0, 11.9), 64
#: The paper's λv: its t of Eq. 10 is their square, and a logit's variance at λ = 1/√d is d times that.
PRODUCTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
#: Lemma 2.1 and Proposition 3.2: spreads of logits, numbers of items, and inverse temperatures.
SPREADS, ITEMS, INVERSE = (1.0, 5.0, 10.0), (16, 256, 4096, 65536), [0.05 * 1.2**k for k in range(30)]
#: Theorem 3.5: scales of cosine attention, keys, and the head dimension and base of its RoPE.
SCALES, KEYS, COSINE_DIM, BASE = (8, 16, 32, 64, 128, 256), 1024, 128, 10_000.0
OUT = Path(__file__).parents[2] / "docs" / "theory"


def simulate(config: LongAttnConfig, longest: int, samples: int, seed: int = 0) -> dict[int, Diagnostics]:
    """Attention of one query at each power of two up to `longest` over independent N(0, 1) logits and values, by Δ.

    A head width of 1 and queries of 1 make the keys the logits. Heads are independent groups of samples.
    """
    lengths = torch.tensor([2**k for k in range(4, int(math.log2(longest)) + 1)])
    last, none = lengths[None] - 1, torch.zeros(1, len(lengths), dtype=torch.int64)
    index = RowBounds(last, none, none, none, last).stacked()
    sums = {d: Sums(Options(what=("ranges",), delta=d)) for d in DELTAS[1:]}
    sums[DELTAS[0]] = Sums(Options(what=("ranges", "entropy", "mass", "outputs"), delta=DELTAS[0]))
    generator = torch.Generator().manual_seed(seed)
    query = torch.ones(BATCH, HEADS, len(lengths), 1)
    for _ in range(math.ceil(samples / (HEADS * BATCH))):
        key, value = (torch.randn(BATCH, HEADS, longest, width, generator=generator) for width in (1, WIDTH))
        rows = AttentionLayout(index)
        out = attend(Call(query.expand(-1, -1, -1, WIDTH) / WIDTH, key.expand(-1, -1, -1, WIDTH), value, config, rows, 1.0))
        for s in sums.values():
            s.add(Call(query, key, value, config, rows, 1.0), out)
    return {d: collect({0: s}) for d, s in sums.items()}


def unnormalised(config: LongAttnConfig, first: int, last: int) -> tuple[float, float]:
    """E[Z] and E[Ñ] over the distances [first, last): Σ E[exp L], Σ E[L exp L] (Eq. 4, 7), for N(0, 1) logits, exactly."""
    gain = torch.ones(last, dtype=torch.float64)
    bias = torch.zeros(last, dtype=torch.float64)
    if config.logit_map is not None:
        gain, bias = (x[0] for x in config.logit_map.tables(1, last, torch.device("cpu")))
    expected = torch.exp(bias + gain**2 / 2)[first:]
    return float(expected.sum()), float(((bias + gain**2)[first:] * expected).sum())


def curves_of(diagnostics: dict[int, Diagnostics]) -> dict[str, Any]:
    """Curves of one scheme: means over samples and their standard errors, from the spread over heads."""
    base = diagnostics[DELTAS[0]]

    def mean(x: torch.Tensor) -> list[list[float]]:
        return torch.stack([x.mean(0), x.std(0) / x.shape[0] ** 0.5], -1).tolist()

    ranges = {}
    for d in DELTAS:
        result = diagnostics[d]
        whole = [n for n, (first, last) in enumerate(result.ranges) if first >= 1 and last <= result.lengths[-1]]
        entropy = result["range_entropy"][0, :, -1]
        ranges[str(d)] = {"t": [result.ranges[n][0] for n in whole], "entropy": mean(entropy[:, whole])}
    return {
        "lengths": list(base.lengths),
        "entropy": mean(base["entropy"][0]),
        "local_mass": mean(base["local_mass"][0]),
        "output_deviation": mean(base["output_deviation"][0]),
        "range_entropy": ranges,
    }


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """A least-squares line and the share of variance it explains."""
    line = statistics.linear_regression(x, y)
    return {"slope": line.slope, "intercept": line.intercept, "r2": statistics.correlation(x, y) ** 2}


def temperatures(longest: int, samples: int, seed: int = 1) -> dict[str, Any]:
    """Entropy over n_tr = longest / 8, 2 n_tr and 8 n_tr logits from N(0, σ²), by σ²: plain, under InfoScale as published
    (ε = 0) and with ε the entropy over n_tr logits. Means over the same rows for all, with their standard errors.
    """
    trained, rows = longest // 8, 4 * samples
    lengths = torch.tensor([trained, 2 * trained, longest])
    drawn = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, longest, generator=drawn)

    def entropies(scales: Sequence[float]) -> list[list[float]]:
        found = []
        for n, scale in zip(lengths.tolist(), scales, strict=True):
            h = torch.cat([torch.special.entr((scale * part[:, :n]).softmax(-1)).sum(-1) for part in logits.split(64)])
            found.append([float(h.mean()), float(h.std()) / rows**0.5])
        return found

    by_variance = {}
    for variance in VARIANCES:
        plain = entropies([variance**0.5] * len(lengths))
        found = {"plain": plain}
        for name, epsilon in (("published", 0.0), ("own entropy", plain[0][0])):
            factor = InfoScale(clamp=False, epsilon=epsilon).formula(lengths, HEAD_DIM, trained)
            found[name] = entropies((variance**0.5 * factor).tolist())
            found[f"factor, {name}"] = factor.tolist()
        by_variance[str(variance)] = found
    return {"lengths": lengths.tolist(), "variances": by_variance}


def on_a_sphere(alpha: float, head_dim: int, points: int = 100_001) -> float:
    """Ĥ - ln n of Li et al.'s Eq. 9, by quadrature: entropy of softmax over n logits α cos θ, for directions of keys spread
    evenly over a sphere and n so large that sums are n times their expectation (their Assumptions 3.1 and 3.2, α = λ v d).
    """
    theta = torch.linspace(0, math.pi, points, dtype=torch.float64)[1:-1]
    density, logit = (head_dim - 2) * theta.sin().log(), alpha * theta.cos()
    normaliser = torch.logsumexp(density + logit, 0)
    return float(normaliser - torch.logsumexp(density, 0) - (torch.exp(density + logit - normaliser) * logit).sum())


def by_laplace(t: float, head_dim: int) -> float:
    """The same by Eq. 10, Laplace's method."""
    return head_dim / 2 * math.log((math.sqrt(4 * t + 1) - 1) / (2 * t))


def by_taylor(t: float, head_dim: int) -> float:
    """The same by Eq. 12, which InfoScale solves for λ."""
    return head_dim / 2 * math.log1p(-t)


def premise(longest: int) -> dict[str, Any]:
    """Eq. 9 beside Eq. 10 and 12 by λv; and on Eq. 9 the growth of entropy from n_tr = longest / 8 to longest keys, by the
    variance of the logits: plain, under InfoScale as published and with ε the entropy at n_tr.
    """
    products = {"product": list(PRODUCTS)} | {
        name: [f(p) for p in PRODUCTS]
        for name, f in (
            ("quadrature", lambda p: on_a_sphere(p * HEAD_DIM, HEAD_DIM)),
            ("laplace", lambda p: by_laplace(p * p, HEAD_DIM)),
            ("taylor", lambda p: by_taylor(p * p, HEAD_DIM)),
        )
    }
    trained, growth = longest // 8, {}
    for variance in VARIANCES:
        alpha = math.sqrt(variance * HEAD_DIM)
        before = math.log(trained) + on_a_sphere(alpha, HEAD_DIM)
        found = {"plain": math.log(8)}
        for name, epsilon in (("published", 0.0), ("own entropy", before)):
            factor = float(InfoScale(clamp=False, epsilon=epsilon).formula(torch.tensor([longest]), HEAD_DIM, trained))
            found[name] = math.log(longest) + on_a_sphere(factor * alpha, HEAD_DIM) - before
        growth[str(variance)] = found
    return {"products": products, "growth": growth}


def sharpness(seed: int = 3) -> dict[str, Any]:
    """Lemma 2.1: n times the largest weight that logits of a spread δ can have, as a share of its bound e^δ, by n. Proposition
    3.2 and Fig. 5: the largest rise of entropy from one inverse temperature to the next, over drawn logits and power series.
    """
    largest: dict[str, list[float]] = {}
    for spread in SPREADS:
        first = [torch.softmax(spread * (torch.arange(n) == 0).double(), 0)[0] for n in ITEMS]
        largest[str(spread)] = [n * float(w) / math.exp(spread) for n, w in zip(ITEMS, first, strict=True)]
    drawn = torch.randn(1000, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    powers = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.2, 1.4], dtype=torch.float64)[:, None] ** torch.arange(10)
    rises = {}
    for name, logits in (("drawn", drawn), ("power series", powers)):
        entropy = torch.stack([torch.special.entr((beta * logits).softmax(-1)).sum(-1) for beta in INVERSE])
        rises[name] = max(0.0, float((entropy[1:] - entropy[:-1]).max()))
    return {"items": list(ITEMS), "largest": largest, "rise": rises}


def cosines(samples: int, seed: int = 2) -> dict[str, Any]:
    """Cosine attention with RoPE of the last query over `KEYS` keys, by its scale c: the share of the variance of a row's
    scores that distance alone explains, and attention on the last 100 keys.

    "even": directions of keys are independent of the query's, as the paper assumes. "at the peak": before the rotation every
    key stands at the cosine η*(c) to the query, as its argument for Theorem 3.5 goes, and is else independent.
    """
    generator = torch.Generator().manual_seed(seed)
    distance = torch.arange(KEYS).flip(0)[:, None]
    angle = distance * BASE ** -(torch.arange(COSINE_DIM // 2) * 2 / COSINE_DIM)
    cos, sin = angle.cos(), angle.sin()
    out: dict[str, Any] = {"scale": list(SCALES), "peak": [expected_peak(c, COSINE_DIM) for c in SCALES]}
    rows = AttentionLayout.causal(1, KEYS, None, KEYS - 1, torch.device("cpu"))
    for name in ("even", "at the peak"):
        curves: dict[str, list[Any]] = {"share": [], "local_mass": []}
        for c in SCALES:
            query, key = (torch.randn(samples // HEADS, HEADS, n, COSINE_DIM, generator=generator) for n in (1, KEYS))
            query = torch.nn.functional.normalize(query, dim=-1)
            if name == "at the peak":
                key = torch.nn.functional.normalize(key - (key * query).sum(-1, keepdim=True) * query, dim=-1)
                peak = expected_peak(c, COSINE_DIM)
                key = peak * query + math.sqrt(1 - peak**2) * key
            first, second = key.chunk(2, -1)
            key = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)  # turned back by its distance
            score = torch.nn.functional.cosine_similarity(query, key, dim=-1)
            explained = score.mean((0, 1)).var(correction=0)
            rest = score.var((0, 1), correction=1).mean()
            config = LongAttnConfig.preset("cosscale", scale=float(c))
            value = torch.zeros(*key.shape[:-1], 1)
            sums = Sums(Options(what=("mass",)))
            sums.add(Call(query, key, value, config, rows, COSINE_DIM**-0.5), value[:, :, :1])
            mass = collect({0: sums})["local_mass"][0, :, -1]
            # of the mean over samples, a share of the rest is chance
            explained = (explained - rest / samples).clamp(min=0)
            curves["share"].append(float(explained / (explained + rest)))
            curves["local_mass"].append([float(mass.mean()), float(mass.std()) / HEADS**0.5])
        out[name] = curves
    return out


def run(longest: int, samples: int) -> dict[str, Any]:
    """Everything that the claims and the plots need."""
    schemes = {name: curves_of(simulate(config, longest, samples)) for name, config in SCHEMES.items()}
    for name in (PLAIN, INVARIANT):
        for curve in schemes[name]["range_entropy"].values():
            far = [(t, e) for t, (e, _) in zip(curve["t"], curve["entropy"], strict=True) if t >= 2]
            for key, scale in (("log", math.log), ("sqrt_log", lambda t: math.sqrt(math.log(t)))):
                curve[key] = fit([scale(t) for t, _ in far], [e for _, e in far])
    starts = [10**k for k in range(6)]
    closed = {
        name: {"t": starts, **{"ZN"[n]: [unnormalised(SCHEMES[name], t, 10 * t)[n] for t in starts] for n in (0, 1)}}
        for name in (PLAIN, INVARIANT)
    }
    result = {"longest": longest, "samples": samples, "schemes": schemes, "closed": closed}
    result |= {"infoscale": temperatures(longest, samples), "premise": premise(longest), "cosscale": cosines(samples)}
    return result | {"sharpness": sharpness()}


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each statement with what is expected and what came out; `holds` says whether they agree within `within`."""
    out: list[dict[str, Any]] = []

    def claim(text: str, expected: float, measured: float, within: float) -> None:
        holds = abs(measured - expected) <= within
        out.append({"claim": text, "expected": expected, "measured": measured, "within": within, "holds": holds})

    def more(text: str, bound: float, measured: float) -> None:
        out.append({"claim": text, "expected": bound, "measured": measured, "within": None, "holds": measured > bound})

    _total_claims(result["closed"], claim)
    _length_claims(result["schemes"], claim, more)
    _range_claims(result["schemes"], claim, more)
    _output_claims(result["schemes"][PLAIN], claim)
    _sharpness_claims(result["sharpness"], claim, more)
    _entropy_claims(result["infoscale"], claim, more)
    _premise_claims(result["premise"], claim, more)
    _cosine_claims(result["cosscale"], claim, more)
    return out


def _total_claims(closed: dict[str, Any], claim: Callable[..., None]) -> None:
    limit = math.exp(0.5) * TAU * math.log(10)
    for letter, what in (("Z", "total attention (Eq. 4)"), ("N", "negentropy (Eq. 7)")):
        value, expected = closed[INVARIANT][letter][-1], f"expected {what} in [t, 10t)"
        claim(f"scale-invariant: {expected} tends to e^½ τ ln 10, t = 100,000", limit, value, 1e-3 * limit)
        slope = _slope(closed[PLAIN], letter)
        claim(f"plain: {expected} grows in proportion to t (log-log slope)", 1, slope, 1e-9)


def _length_claims(schemes: dict[str, Any], claim: Callable[..., None], more: Callable[..., None]) -> None:
    longest = schemes[PLAIN]["lengths"][-1]
    entropy = {name: schemes[name]["entropy"][-1][0] for name in SCHEMES}
    claim(f"plain: entropy over n = {longest} keys is ln n - 1/2", math.log(longest) - 0.5, entropy[PLAIN], 0.02)
    slope = fit(*_far(schemes[PLAIN], "entropy"))["slope"]
    claim("plain: entropy grows like ln n (slope from 256 keys)", 1, slope, 0.01)
    more("Fig. 1: plain entropy is above LogN's", entropy[LOGN], entropy[PLAIN])
    more("Fig. 1: plain entropy is above scale-invariant's", entropy[INVARIANT], entropy[PLAIN])
    at = schemes[PLAIN]["lengths"].index(1024)
    for name in (PLAIN, LOGN):
        value, error = schemes[name]["local_mass"][at]
        text = f"Fig. 1: {name}: the last 100 of 1024 keys get 100/n of the attention"
        claim(text, 100 / 1024, value, 4 * error + 0.03 * 100 / 1024)
    local = schemes[INVARIANT]["local_mass"][-1]
    share = math.log(1 + 100 / TAU) / math.log(1 + longest / TAU)
    text = f"Fig. 1: scale-invariant: the last 100 of {longest} keys get E[Z] of 100 keys / E[Z] of n of the attention"
    claim(text, share, local[0], 0.05 * share + 4 * local[1])


def _range_claims(schemes: dict[str, Any], claim: Callable[..., None], more: Callable[..., None]) -> None:
    for delta, curve in schemes[PLAIN]["range_entropy"].items():
        name, last = f"Fig. 6: plain, Δ = {delta}", math.log((int(delta) - 1) * curve["t"][-1]) - 0.5
        claim(f"{name}: entropy in [t, tΔ) grows like ln t (slope)", 1.0, curve["log"]["slope"], 0.06)
        claim(f"{name}: at the last t it is ln((Δ - 1) t) - 1/2", last, curve["entropy"][-1][0], 0.02)
    for delta, curve in schemes[INVARIANT]["range_entropy"].items():
        name = f"Fig. 2: scale-invariant, Δ = {delta}"
        late = [(math.log(t), e) for t, (e, _) in zip(curve["t"], curve["entropy"], strict=True) if t >= TAU]
        slope = fit([t for t, _ in late], [e for _, e in late])["slope"]
        more(f"{name}: entropy grows more slowly than ln t (1 - slope from t = τ)", 0.5, 1 - slope)
        if len(curve["t"]) >= 4:
            text = f"{name}: a line in √ln t fits better than one in ln t (R²)"
            more(text, curve["log"]["r2"], curve["sqrt_log"]["r2"])


def _output_claims(plain: dict[str, Any], claim: Callable[..., None]) -> None:
    x, deviation = _far(plain, "output_deviation")
    y, limit = [math.log(d) for d in deviation], math.sqrt(math.e / plain["lengths"][-1])
    text = "Proposition 1: plain: deviation of outputs falls like n^-1/2 (log-log slope from 256 keys)"
    claim(text, -0.5, fit(x, y)["slope"], 0.03)
    claim("Proposition 1: plain: at the longest it is √(e/n)", limit, math.exp(y[-1]), 0.1 * limit)


def _far(scheme: dict[str, Any], quantity: str) -> tuple[list[float], list[float]]:
    """ln n and the quantity from 256 keys on."""
    far = [n for n, length in enumerate(scheme["lengths"]) if length >= 256]
    return [math.log(scheme["lengths"][n]) for n in far], [scheme[quantity][n][0] for n in far]


def _sharpness_claims(found: dict[str, Any], claim: Callable[..., None], more: Callable[..., None]) -> None:
    for spread, shares in found["largest"].items():
        text = f"Lemma 2.1: logits of spread {spread}: n times the largest weight stays below e^δ (1 less its share of that)"
        more(text, 0, 1 - max(shares))
    text = "Lemma 2.1: spread 10: that share tends to 1 with n, so the weight falls like 1/n"
    claim(text, 1, found["largest"]["10.0"][-1], 0.5)
    for name, rise in found["rise"].items():
        claim(f"Proposition 3.2: {name}: entropy never rises with 1/θ (largest rise, nats)", 0, rise, 1e-12)


def _premise_claims(found: dict[str, Any], claim: Callable[..., None], more: Callable[..., None]) -> None:
    curves = found["products"]
    errors = {
        name: [c - exact for c, exact in zip(curves[name], curves["quadrature"], strict=True)]
        for name in ("laplace", "taylor")
    }
    worst = max(errors["laplace"], key=abs)
    claim("InfoScale: on its premise, Eq. 10 is Eq. 9 for λv up to 0.6 (nats, largest difference)", 0, worst, 0.05)
    short = dict(zip(curves["product"], errors["taylor"], strict=True))
    claim("InfoScale: on its premise, Eq. 12 is Eq. 9 at λv = 0.1 (nats)", 0, short[0.1], 0.01)
    for product, bound in ((0.3, 0.4), (0.6, 6.0)):
        more(f"InfoScale: Eq. 12 is below Eq. 9 at λv = {product} by (nats)", bound, -short[product])
    for variance, growth in found["growth"].items():
        text = f"InfoScale: on its premise, σ² = {variance}: growth of entropy from n_tr to 8 n_tr"
        more(f"{text}: what remains (share)", 0.2, growth["published"] / growth["plain"])
        claim(f"{text}: what remains with ε the entropy at n_tr (share)", 0, growth["own entropy"] / growth["plain"], 0.35)


def _entropy_claims(found: dict[str, Any], claim: Callable[..., None], more: Callable[..., None]) -> None:
    trained, _, longest = found["lengths"]

    def laplace(n: int) -> float:
        """Entropy of the derivation: ln n + d/2 ln(1 - t), where t = λ² t_tr and the entropy at n_tr is ε = 0."""
        t = float(InfoScale(clamp=False).formula(torch.tensor([n]), HEAD_DIM, trained)) ** 2 * (1 - trained ** (-2 / HEAD_DIM))
        return math.log(n) + HEAD_DIM / 2 * math.log1p(-t)

    claim(
        "InfoScale: the derivation's entropy stays 0 where it was 0 at n_tr (closed form, at 8 n_tr)",
        0,
        laplace(longest),
        1e-6,
    )
    curves = found["variances"]["1.0"]
    text = "InfoScale: N(0, 1) logits: the entropy over 8 n_tr keys is ln n - λ²/2"
    claim(text, math.log(longest) - curves["factor, published"][-1] ** 2 / 2, curves["published"][-1][0], 0.02)
    for variance, curves in found["variances"].items():
        first, plain = curves["plain"][0][0], curves["plain"][-1][0]
        growth = {name: (curves[name][-1][0] - first) / (plain - first) for name in ("published", "own entropy")}
        text = f"InfoScale: σ² = {variance}: growth of entropy from n_tr to 8 n_tr"
        more(f"{text}: slowed by (share)", 0.02, 1 - growth["published"])
        more(f"{text}: what remains (share)", 0.2, growth["published"])
        claim(f"{text}: what remains with ε the entropy at n_tr (share)", 0, growth["own entropy"], 0.25)


def _cosine_claims(found: dict[str, Any], claim: Callable[..., None], more: Callable[..., None]) -> None:
    for name, share in zip(("c = 8", "c = 256"), (found["even"]["share"][0], found["even"]["share"][-1]), strict=True):
        claim(f"Theorem 3.5: directions evenly spread, {name}: distance explains none of a score's variance", 0, share, 0.005)
    value, error = found["even"]["local_mass"][0]
    text = f"Theorem 3.5: directions evenly spread, c = 8: the last 100 of {KEYS} keys get 100/n"
    claim(text, 100 / KEYS, value, 4 * error + 0.01 * 100 / KEYS)
    at = found["at the peak"]
    for quantity, values in (
        ("share of variance by distance", at["share"]),
        ("last 100 keys", [v for v, _ in at["local_mass"]]),
    ):
        least = min(b - a for a, b in itertools.pairwise(values))
        more(f"Theorem 3.5: cosines at η*(c): {quantity}: grows with every doubling of c (least growth)", 0, least)
    more("Theorem 3.5: cosines at η*(c): at c = 128 the last 100 keys get nearly all", 0.99, at["local_mass"][4][0])


def _slope(curve: dict[str, list[float]], letter: str) -> float:
    return fit([math.log(t) for t in curve["t"]], [math.log(v) for v in curve[letter]])["slope"]


Curves = dict[str, tuple[Sequence[float], Sequence[float]]]


def plot(result: dict[str, Any], path: Path) -> None:
    """Eight panels, legible at the width of a page."""
    figure, panels = pyplot().subplots(2, 4, figsize=(15, 7.4), layout="constrained")
    schemes, share = result["schemes"], {"ylabel": "share", "ylim": (0, 1.02)}

    def by_length(axes: Any, quantity: str, title: str, **labels: Any) -> None:
        curves = {name: (s["lengths"], [v for v, _ in s[quantity]]) for name, s in schemes.items()}
        _lines(axes, curves, title=title, xlabel="length n", xscale="log", **labels)

    by_length(panels[0, 0], "entropy", "Entropy of attention (Fig. 1)", ylabel="nats")
    by_length(panels[0, 1], "local_mass", "Attention on the last 100 keys (Fig. 1)", **share)
    by_length(panels[1, 2], "output_deviation", "Deviation of outputs (Prop. 1)", ylabel="standard deviation", yscale="log")
    plain, invariant = (schemes[name]["range_entropy"] for name in (PLAIN, INVARIANT))
    _in_ranges(panels[0, 2], plain, math.log, "log", title="Plain: entropy in [t, tΔ) (Fig. 6)", xlabel="ln t")
    title = "Scale-invariant: entropy in [t, tΔ) (Fig. 2)"
    _in_ranges(panels[1, 0], invariant, lambda t: math.sqrt(math.log(t)), "sqrt_log", title=title, xlabel="√ln t")
    totals = {name: (c["t"], c["Z"]) for name, c in result["closed"].items()}
    labels = {"title": "Expected total attention in [t, 10t)", "xlabel": "t", "ylabel": "E[Z], unnormalised"}
    _lines(panels[1, 1], totals, xscale="log", yscale="log", **labels)
    panels[1, 1].axhline(math.exp(0.5) * TAU * math.log(10), color="#666666", linestyle=":", linewidth=1)
    _growth(panels[0, 3], result["infoscale"])
    _distances(panels[1, 3], result["cosscale"])
    path.write_bytes(png(figure))


def _lines(axes: Any, curves: Curves, **labels: Any) -> None:
    for i, (name, (x, y)) in enumerate(curves.items()):
        i = list(SCHEMES).index(name) if name in SCHEMES else i
        axes.plot(x, y, label=name, color=COLOURS[i], marker=MARKERS[i], markersize=4)
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _in_ranges(axes: Any, curves: dict[str, Any], scale: Callable[[float], float], key: str, **labels: Any) -> None:
    shown = {f"Δ = {d}": ([scale(t) for t in c["t"]], [e for e, _ in c["entropy"]]) for d, c in curves.items()}
    _lines(axes, shown, ylabel="nats", **labels)
    for i, c in enumerate(curves.values()):
        x = [scale(t) for t in c["t"] if t >= 2]
        axes.plot(x, [c[key]["intercept"] + c[key]["slope"] * v for v in x], color=COLOURS[i], linestyle="--", linewidth=1)


def _growth(axes: Any, found: dict[str, Any]) -> None:
    labels = {"plain": "plain", "published": "InfoScale", "own entropy": "InfoScale, ε = H(n_tr)"}
    for i, (variance, curves) in enumerate(found["variances"].items()):
        for (key, label), style in zip(labels.items(), ("-", "--", ":"), strict=True):
            y = [h - curves["plain"][0][0] for h, _ in curves[key]]
            told = f"σ² = {float(variance):g}, {label}"
            axes.plot(found["lengths"], y, label=told, color=COLOURS[i], linestyle=style, marker=MARKERS[i], markersize=4)
    axes.set(title="Growth of entropy under InfoScale", xlabel="length n", ylabel="nats above n_tr's", xscale="log")
    axes.set_xticks(found["lengths"], [f"{n:,}" for n in found["lengths"]])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def _distances(axes: Any, found: dict[str, Any]) -> None:
    curves = {}
    for key, name in (("at the peak", "cosines at η*(c)"), ("even", "evenly spread")):
        curves[f"last 100 keys, {name}"] = (found["scale"], [v for v, _ in found[key]["local_mass"]])
        curves[f"variance by distance, {name}"] = (found["scale"], found[key]["share"])
    title = "RoPE under CosScale (Theorem 3.5)"
    _lines(axes, curves, title=title, xlabel="c", ylabel="share", xscale="log", ylim=(-0.02, 1.5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=2**16, help="the longest text, a power of two (default 65536)")
    parser.add_argument("--samples", type=int, default=256, help="independent texts per scheme (default 256)")
    parser.add_argument("--out", type=Path, default=OUT, help="where theory.json and theory.png go (default docs/theory)")
    arguments = parser.parse_args()
    result = run(arguments.longest, arguments.samples)
    result["claims"] = claims(result)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "theory.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    plot(result, arguments.out / "theory.png")
    for c in result["claims"]:
        target = f"> {c['expected']:.5g}" if c["within"] is None else f"{c['expected']:.5g} ± {c['within']:.2g}"
        print(f"{'holds' if c['holds'] else 'FAILS'}  {c['claim']}: {c['measured']:.5g} ({target})")
    return 0 if all(c["holds"] for c in result["claims"]) else 1


if __name__ == "__main__":
    sys.exit(main())
