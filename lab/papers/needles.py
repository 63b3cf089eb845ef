"""Training on needles: Anson et al., Table 2.

`needles` starts from the models of `length-generalisation` and trains all weights: more steps than the paper's 300, with Muon
as in their training, like the paper. `needles-pretrained` adapts SmolLM2-135M, trained at 8,192 with RoPE, to a method and to
needles in 256 tokens. Both go through the recipe `needle_lora`. `needles-beyond` adapts the bases of `conversion`, trained at
128 bytes with RoPE, to needles at four times that, and measures to 64 times it: here training, too, is beyond what the base
has seen.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_longattn.evaluation import answer_scores
from hf_longattn.evaluation.tasks import NeedleTask
from hf_longattn.training import load_recipe, prepare
from hf_longattn.training import run as train
from lab.papers import conversion
from lab.papers.conversion import CONVERSION, QK, TRAINED, Way
from lab.papers.experiment import Run, Settings, experiment, require
from lab.papers.length import LENGTH, training
from lab.papers.loop import fit
from lab.scratch.optim import Muon, MuonWithAdam
from lab.scratch.train import POSITIONS
from recipes.models import DOWNLOADED, SMOLLM2, obtain, random_model

#: A method and its parameters, by variant: LogN acts below the training length too, as in the paper, where s is learned.
METHODS = {"plain": "null", "logn": "logn:train_length=256:clamp=false", "scale_invariant": "scale_invariant"}
#: The conversions that `needles-beyond` trains; on the base with QK-norm, which the paper's models have; and models that were
#: trained under their method from scratch, as the paper's were.
ON_BASE = ("control", "yarn16", "rerope", "rerope+infoscale", "rerope+cosscale32+infoscale", "rerope+logn", "prope+map")
ON_QK = ("control", "prope+logn", "prope+map", "rerope", "rerope+logn")
FROM_SCRATCH = tuple(f"{QK}{name}-scratch" for name in ("prope", "prope+logn", "prope+scale_invariant", "alibi"))
BEYOND: dict[str, Way] = {n.replace("control", "plain"): TRAINED[n] for n in ON_BASE}
BEYOND |= {QK + n.replace("control", "plain"): replace(TRAINED[n], qk_norm=True) for n in ON_QK}
BEYOND |= {n: conversion.SCRATCH[n.removesuffix("-scratch")] for n in FROM_SCRATCH}


def run_needles(run: Run) -> dict[str, Any]:
    settings = run.settings
    model = run.models / LENGTH.name / f"{run.variant}-seed{run.seed}"
    require(model, f"{LENGTH.name} --only '^{run.variant}$' --seeds {run.seed}")
    muon = Muon(matrix_lr=settings.matrix_lr)
    own = {"method": "null", "lora": "null", "schedule.warmup": settings.warmup}
    return on_needles(run, model, own, lambda m: MuonWithAdam(m, muon))


def run_pretrained(run: Run) -> dict[str, Any]:
    model = obtain(SMOLLM2, DOWNLOADED) if run.settings.pretrained else random_model(run.models)
    return on_needles(run, model, {"dtype": run.dtype, "method": METHODS[run.variant]})


def on_needles(
    run: Run, model: Path, own: dict[str, Any], optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
) -> dict[str, Any]:
    """What the recipe measures at its end, with settings of this run's and its `own`."""
    settings = run.settings
    overrides = own | {
        "model": model,
        "data": f"[{','.join(map(str, run.texts.train))}]",
        "heldout": run.texts.heldout,
        "output": run.folder,
        "length": settings.length,
        "needle.needles": settings.needles,
        "evaluation.final_lengths": list(settings.lengths),
        "evaluation.samples": settings.samples,
        "evaluation.compare": False,
        "evaluation.far": 0,
        "positions": "plain",
        **training(settings.steps, settings.batch, run.seed, run.dtype),
    }
    metrics = train(prepare(load_recipe("needle_lora", [f"{k}={v}" for k, v in overrides.items()])), optimizer)
    trained = metrics["measured"]["trained"]
    return {
        "lengths": list(settings.lengths),
        "accuracy": [trained[n]["accuracy"] for n in settings.lengths],
        "loss": [round(trained[n]["loss"], 5) for n in settings.lengths],
        "train_loss": round(metrics["train_loss"], 5),
    }


class Bytes:
    """A tokenizer whose ids are the bytes of ASCII text, as the bases of `conversion` read it."""

    bos_token_id = eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": conversion.encode(text).tolist()}


def run_beyond(run: Run) -> dict[str, Any]:
    settings = run.settings
    base = CONVERSION.quick if settings == NEEDLES_BEYOND.quick else CONVERSION.settings
    train, heldout = "\n".join(conversion.read(p) for p in run.texts.train), conversion.read(run.texts.heldout)
    way = replace(BEYOND[run.variant], lora=settings.rank)
    torch.manual_seed(run.seed)
    data = conversion.mixture(train, base, run.seed + 1000)  # for calibration, which a base has not read
    if run.variant in FROM_SCRATCH:
        folder = run.models / "conversion" / f"{run.variant}-seed{run.seed}"
        require(folder, f"conversion --only '^{re.escape(run.variant)}$' --seeds {run.seed}")
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        model = conversion.model_of(replace(run, settings=base), way, False, data)
    model = conversion.adapted(model, way)
    task, drawn = NeedleTask(Bytes(), train, settings.needles, seed=run.seed), itertools.count()
    tests = NeedleTask(Bytes(), heldout, settings.needles, seed=1_000_000)  # the same texts for every variant and seed

    def loss(stage: dict[str, int]) -> Tensor:
        """Of the answers alone, in nats a byte."""
        samples = [task.sample(next(drawn), stage["length"]) for _ in range(stage["batch"])]
        ids, labels = (torch.stack([getattr(s, name) for s in samples]) for name in ("input_ids", "labels"))
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    out: dict[str, Any] = {"lengths": list(settings.lengths)}
    for name, stage in (("window", settings.window), ("beyond", settings.beyond)):
        optimizer = torch.optim.AdamW(model.parameters(), settings.rate, weight_decay=0.0)
        train_loss = fit(model, functools.partial(loss, stage), optimizer, stage["steps"], 0.05, run.dtype)
        out[name] = {"train_loss": round(train_loss, 5)} | found(model.get_base_model(), tests, settings)
    return out


def found(model: Any, tests: NeedleTask, settings: Settings) -> dict[str, list[float]]:
    """The share of answers that are right, and their loss in nats a byte, by length."""
    out: dict[str, list[float]] = {"accuracy": [], "loss": []}
    for length, count in zip(settings.lengths, settings.samples, strict=True):
        samples = [tests.sample(index, length) for index in range(count)]
        scores = [score for s in samples for score in answer_scores(model, s.input_ids[None], s.spans)]
        out["accuracy"].append(round(sum(s.exact for s in scores) / len(scores), 5))
        out["loss"].append(round(-sum(s.log_likelihood for s in scores) / sum(s.tokens for s in scores), 5))
    return out


NEEDLES = experiment("needles", POSITIONS, run_needles)
PRETRAINED = experiment("needles-pretrained", METHODS, run_pretrained)
NEEDLES_BEYOND = experiment("needles-beyond", BEYOND, run_beyond)
