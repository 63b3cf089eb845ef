"""InfoScale and CosScale in other encodings: Li et al., "Information Entropy Invariance", Tables 1, 7 and 8, and Theorem 3.5.

The model of masked.py after 400 steps of plain attention, and after as many more: of plain attention (`dot_product_warm`,
the control of equal steps), or of cosine attention. Encodings and temperatures are put in when it is measured, untrained;
PoSE is those steps at positions that jump.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.methods import CosScale, InfoScale
from hf_longattn.training.recipe import Skip
from lab.papers.experiment import Run, experiment, require
from lab.papers.masked import WARM, encoder, losses_by_length, projected, put, scale_of, states, texts_of, trainer

BASE = "dot_product"
ENCODINGS = ("rope", "yarn16", "yarn32", "windowed", "streaming", "lm_infinite")
POSE = "_pose"
#: Training lengths below which its positions jump, as in the paper.
REACH = 64
#: Keys this near count as near, on both sides.
NEAR = 4
#: What is trained after `BASE`, in the order of runs.
SCORES = ((BASE, WARM), ("cosscale128", WARM), ("cosscale16", WARM), (BASE, POSE), ("cosscale128", POSE))


def encoded(model: Any, encoding: str, scale: int | None, temperature: Any) -> Any:
    """The model in another encoding; for YaRN another model with its weights."""
    slots: dict[str, Any] = {"temperature": temperature}
    # YaRN has a temperature of its own, in the norms that a cosine takes away: the paper puts the two together
    slots |= {"score": CosScale(scale=float(scale), stack=True)} if scale else {}
    if encoding.startswith("yarn"):
        config = hf_longattn.rope.yarn(copy.deepcopy(model.config), float(encoding.removeprefix("yarn")))
        weights, model = model.state_dict(), LlamaForCausalLM(config).eval()
        model.load_state_dict(weights)
    elif encoding not in ("rope", POSE[1:]):
        slots["visibility"] = LongAttnConfig.preset(encoding).visibility
    return hf_longattn.apply(model, LongAttnConfig(**slots)) if any(slots.values()) else model


@torch.no_grad()
def by_distance(model: Any, ids: Tensor, scale: int | None) -> dict[str, float]:
    """Of texts (batch, length): the share of the variance of scores that distance alone explains, and attention on the keys
    at most `NEAR` away, both means over layers. Scores are what the softmax sees, over the pairs of a text.
    """
    length, seen = ids.shape[1], projected(model, ids)
    cos, sin = model.model.rotary_emb(seen[0][0], torch.arange(length)[None])
    distance = (torch.arange(length)[:, None] - torch.arange(length)).flatten() + length - 1
    shares, near = [], []
    for query, key in seen:
        q, k = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (query, key))
        if scale:
            score = scale * nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT
        else:
            score = q @ k.mT * q.shape[-1] ** -0.5
        flat = score.double().flatten(1)
        count = torch.bincount(distance, minlength=2 * length - 1) * len(flat)
        mean = torch.zeros(2 * length - 1, dtype=torch.float64).index_add_(0, distance, flat.sum(0)) / count
        explained = (count * (mean - flat.mean()).square()).sum() / count.sum()
        shares.append(float(explained / flat.var(correction=0)))
        attention = score.softmax(-1).flatten(1)
        near.append(float(attention[:, (distance - length + 1).abs() <= NEAR].sum() / (len(flat) * length)))
    return {"share": round(sum(shares) / len(shares), 5), "near": round(sum(near) / len(near), 5)}


def entropy(model: Any, ids: Tensor) -> float:
    """Of attention over texts (batch, length) in nats, a mean over rows, heads and layers."""
    with hf_longattn.capture(model, what="entropy") as seen, torch.no_grad():
        states(model, ids)
    return float(seen.result().overall("entropy").mean())


def run_encodings(run: Run) -> dict[str, Any]:
    settings = run.settings
    text, heldout = texts_of(run)
    scale = scale_of(run.variant)
    start = run.models / ENCODED.name / f"{BASE}-seed{run.seed}"
    torch.manual_seed(run.seed)
    model = encoder(settings)
    if run.variant != BASE:
        require(start, f"{ENCODED.name} --only '^{BASE}$' --seeds {run.seed}", "weights.pt")
        model.load_state_dict(torch.load(start / "weights.pt"))
    put(model, "cosscale" if scale else None, "", scale)
    own = run if run.variant == BASE else dataclasses.replace(run, seed=1_000_000 + run.seed)  # other batches than the start's
    skip = Skip(target_length=REACH * settings.length) if run.variant.endswith(POSE) else None
    result: dict[str, Any] = {"train_loss": trainer(model, text, own, skip)(), "lengths": list(settings.lengths)}
    run.folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), run.folder / "weights.pt")
    ids = heldout[: settings.texts * settings.length].view(settings.texts, settings.length)
    put(model, "cosscale" if scale else None, "", scale)
    epsilon = entropy(model, ids)
    result |= {"entropy": round(epsilon, 5), "by_distance": by_distance(model, ids, scale)}
    temperatures = {
        "none": None,
        "infoscale": InfoScale(clamp=False, stack=True),
        "infoscale, ε": InfoScale(clamp=False, stack=True, epsilon=epsilon),
        "softmax_plus 512": LongAttnConfig.preset("softmax_plus", clamp=False, train_length=512).temperature,
    }
    for encoding in encodings_of(run.variant):
        result[encoding] = {}
        for name in temperatures if encoding == "rope" and run.variant != BASE else list(temperatures)[:2]:
            put(model, None, "")
            measured = encoded(model, encoding, scale, temperatures[name])
            result[encoding][name] = losses_by_length(measured, heldout, settings, run.seed)
    return result


def encodings_of(variant: str) -> tuple[str, ...]:
    if variant.endswith(POSE):
        return (POSE[1:],)
    if variant == f"cosscale16{WARM}":  # the paper's scale for windows
        return ("rope", "windowed")
    return ENCODINGS if variant.endswith(WARM) else ENCODINGS[:1]


VARIANTS = (BASE, *(f"{score}{how}" for score, how in SCORES))
ENCODED = experiment("infoscale-cosscale-encodings", VARIANTS, run_encodings)
