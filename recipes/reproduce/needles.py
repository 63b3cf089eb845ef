"""Needles after training from scratch: Anson et al., Table 2, through the recipe `needle_lora`, all weights trained.

It starts from the models of `length-generalisation`: more steps than the paper's 300, and Muon as in their training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiment import Experiment, Run
from length import LENGTH, training

from hf_longattn.training import POSITIONS, load_recipe, prepare
from hf_longattn.training import run as train


@dataclass(frozen=True)
class Settings:
    needles: int = 3
    length: int = 256
    batch: int = 8
    steps: int = 2000
    matrix_lr: float = 0.02
    warmup: float = 0.05
    lengths: tuple[int, ...] = (256, 1024, 4096)
    samples: int = 100


QUICK = Settings(needles=1, length=160, batch=2, steps=3, lengths=(160, 320), samples=2)


def measure(run: Run) -> dict[str, Any]:
    settings: Settings = run.settings
    model = run.models / LENGTH.name / f"{run.variant}-seed{run.seed}"
    if not (model / "config.json").is_file():
        raise ValueError(
            f"{model} holds no model to start from; make it with: {LENGTH.name} --only '^{run.variant}$' --seeds {run.seed} "
            "(and --again, if its row is there and the model is not)"
        )
    overrides = {
        "model": model,
        "lora": "null",
        "data": f"[{','.join(map(str, run.texts.train))}]",
        "heldout": run.texts.heldout,
        "output": run.folder,
        "length": settings.length,
        "needle.needles": settings.needles,
        "evaluation.final_lengths": list(settings.lengths),
        "evaluation.samples": settings.samples,
        "evaluation.compare": False,
        "optimizer.matrix_lr": settings.matrix_lr,
        "schedule.warmup": settings.warmup,
        **training(settings.steps, settings.batch, run.seed),
    }
    metrics = train(prepare(load_recipe("needle_lora", [f"{k}={v}" for k, v in overrides.items()])))
    found = metrics["measured"]["trained"]
    return {
        "lengths": list(settings.lengths),
        "accuracy": [found[n]["accuracy"] for n in settings.lengths],
        "loss": [round(found[n]["loss"], 5) for n in settings.lengths],
        "train_loss": round(metrics["train_loss"], 5),
    }


NEEDLES = Experiment(
    name="needles",
    about="those models fine-tuned to find a needle (Scale-invariant attention, Table 2)",
    variants=tuple(POSITIONS),
    seeds=(0, 1, 2),
    minutes=11.0,
    settings=Settings(),
    quick=QUICK,
    measure=measure,
    text=True,
    needs=LENGTH.name,
)
