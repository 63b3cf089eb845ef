"""InfoScale and CosScale on masked bytes: Li et al., "Information Entropy Invariance", Tables 2, 3, 9 and 10, and Theorem 3.4.

transformers' Llama becomes an encoder through a 4-D mask that shows every key, so that methods are put in by name and see the
whole length. One head over the whole width, as in GAU. All texts in training have the same length, where InfoScale and softmax
plus are the identity: both are put in after training, and only the score needs a training of its own, from scratch or ("warm")
after as many steps of plain attention.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ByT5Tokenizer

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.training.data import skipped
from hf_longattn.training.held_out import windows_of
from hf_longattn.training.recipe import Skip
from lab.papers.experiment import Run, Settings, experiment
from lab.papers.loop import fit, small_llama

SCALES = (8, 16, 32, 64, 128, 256)
WARM, WARM_SCALES = "_warm", (16, 64, 128, 256)
#: cosscale's variants.
SCORED = (*(f"cosscale{c}" for c in SCALES), *(f"cosscale{c}{WARM}" for c in WARM_SCALES))
TEMPERATURES = ("", "infoscale", "softmax_plus")
BINS = 400


def encoder(settings: Settings) -> Any:
    """Random weights, over bytes."""
    vocabulary = len(ByT5Tokenizer(extra_ids=0))
    return small_llama(vocabulary, settings.layers, settings.width, heads=1, positions=settings.length)


def put(model: Any, score: str | None, temperature: str, scale: int | None = None) -> Any:
    """The model under a score and a temperature, both by name; neither is plain attention."""
    names = "+".join(filter(None, (score, temperature)))
    if not names:
        return hf_longattn.remove(model) if hf_longattn.describe(model).config else model
    parameters: dict[str, Any] = {"scale": float(scale)} if scale else {}
    parameters |= {"clamp": False} if temperature else {}
    # the mask leaves sdpa exact, and it is the fastest on short texts
    return hf_longattn.apply(model, LongAttnConfig.preset(names, backend="fused", **parameters))


def states(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The last hidden states of texts (batch, length), every token seeing all of its text; positions alike, or from 0."""
    everything = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    return model.model(ids, attention_mask=everything, position_ids=positions, use_cache=False).last_hidden_state


def predictions(model: Any, ids: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits at the masked places, (places, vocabulary). ids (batch, length), hidden bool alike: what the model must guess."""
    mask_id = ByT5Tokenizer(extra_ids=0).unk_token_id
    return model.lm_head(states(model, ids.masked_fill(hidden, mask_id), positions)[hidden])


def losses_by_length(model: Any, heldout: Tensor, settings: Settings, seed: int) -> dict[str, list[float]]:
    """Mean loss in nats, perplexity and accuracy on masked bytes, by length; the same bytes for every model of a seed."""
    out: dict[str, list[float]] = {"loss": [], "perplexity": [], "accuracy": []}
    for length in settings.lengths:
        generator = torch.Generator().manual_seed(seed)
        total = right = count = 0.0
        for ids in windows_of(heldout, length, settings.measured_tokens).split(max(settings.lengths[-1] // length, 1)):
            hidden = torch.rand(ids.shape, generator=generator) < settings.masked
            with torch.no_grad():
                logits, truth = predictions(model, ids, hidden), ids[hidden]
            total += float(nn.functional.cross_entropy(logits, truth, reduction="sum"))
            right += int((logits.argmax(-1) == truth).sum())
            count += len(truth)
        out["loss"].append(round(total / count, 5))
        out["perplexity"].append(round(math.exp(total / count), 4))
        out["accuracy"].append(round(right / count, 5))
    return out


def expected_peak(scale: float, head_dim: int) -> float:
    """Theorem 3.4: where exp(c η) (1 - η²)^((d - 3) / 2) is largest."""
    d = head_dim - 3
    return (-d + math.sqrt(d * d + 4 * scale * scale)) / (2 * scale)


@torch.no_grad()
def projected(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys before their rotation, (batch, length, width), of every layer."""
    seen: list[Tensor] = []
    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [p.register_forward_hook(lambda *a: seen.append(a[2])) for x in layers for p in (x.q_proj, x.k_proj)]
    try:
        states(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return list(zip(seen[::2], seen[1::2], strict=True))


def peaks(model: Any, ids: Tensor, scale: float) -> dict[str, Any]:
    """Where cos(q, k) before the rotation is most frequent over all pairs of a text (1, length), of all layers and of each.

    "weighted": pairs count as much as exp(c cos), the integrand of the theorem.
    """
    unit = [[nn.functional.normalize(x[0], dim=-1) for x in pair] for pair in projected(model, ids)]
    cosines = [(q @ k.T).flatten() for q, k in unit]
    plain = [torch.histc(c, BINS, -1, 1) for c in cosines]
    middle = (torch.arange(BINS) + 0.5) * 2 / BINS - 1
    weighted = [h * torch.exp(scale * (middle - 1)) for h in plain]

    def mode(histogram: Tensor) -> float:
        smooth = nn.functional.avg_pool1d(histogram[None, None].double(), 9, 1, 4)[0, 0]
        return round(float(middle[smooth.argmax()]), 4)

    return {
        "plain": mode(torch.stack(plain).sum(0)),
        "weighted": mode(torch.stack(weighted).double().sum(0)),
        "plain_by_layer": [mode(h) for h in plain],
        "weighted_by_layer": [mode(h) for h in weighted],
        "mean": round(float(torch.cat(cosines).mean()), 4),
        "deviation": round(float(torch.cat(cosines).std()), 4),
    }


def texts_of(run: Run) -> tuple[Tensor, Tensor]:
    """The bytes to train on and those to measure on."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    text, heldout = (
        torch.tensor(tokenizer("".join(p.read_text(encoding="utf-8") for p in paths), add_special_tokens=False)["input_ids"])
        for paths in (run.texts.train, [run.texts.heldout])
    )
    return text, heldout


def scale_of(variant: str) -> int | None:
    return int(variant.removeprefix("cosscale").partition("_")[0]) if variant.startswith("cosscale") else None


def trainer(model: Any, text: Tensor, run: Run, skip: Skip | None = None) -> Callable[[], float]:
    """Trains for the settings' steps on what its own generator draws next, at positions that `skip`; returns the loss."""
    settings = run.settings
    generator = torch.Generator().manual_seed(run.seed)
    rng = random.Random(run.seed)

    def loss() -> Tensor:
        first = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=generator)
        ids = text[first + torch.arange(settings.length)]
        hidden = torch.rand(ids.shape, generator=generator) < settings.masked
        positions = torch.stack([skipped(row, skip, rng)[1] for row in ids]) if skip else None
        return nn.functional.cross_entropy(predictions(model, ids, hidden, positions), ids[hidden])

    def train() -> float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
        return round(fit(model, loss, optimizer, settings.steps, warmup=0.1, dtype=run.dtype), 5)

    return train


def run_masked(run: Run) -> dict[str, Any]:
    settings = run.settings
    text, heldout = texts_of(run)
    scale = scale_of(run.variant)
    score = None if scale is None else "cosscale"
    torch.manual_seed(run.seed)
    model = encoder(settings)
    train = trainer(model, text, run)
    if run.variant.endswith(WARM):
        train()
    put(model, score, "", scale)
    result: dict[str, Any] = {"train_loss": train(), "lengths": list(settings.lengths)}
    for temperature in TEMPERATURES:
        put(model, score, temperature, scale)
        result[temperature or "none"] = losses_by_length(model, heldout, settings, run.seed)
    if scale is not None:
        put(model, score, "", scale)
        expected = round(expected_peak(scale, settings.width), 4)
        result["peak"] = {"expected": expected} | peaks(model, heldout[None, : settings.peak_length], scale)
    return result


MASKED = experiment("infoscale-cosscale", ("dot_product", *SCORED), run_masked)
