"""Training on needles: Anson et al., Table 2, through the recipe `needle_lora`.

`needles` starts from the models of `length-generalisation` and trains all weights: more steps than the paper's 300, with Muon
as in their training, like the paper. `needles-pretrained` adapts SmolLM2-135M, trained at 8,192 with RoPE, to a method and to
needles in 256 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_longattn.training import POSITIONS, load_recipe, prepare
from hf_longattn.training import run as train
from recipes.models import SMOLLM2, obtain, random_model
from recipes.reproduce.experiment import Experiment, Run
from recipes.reproduce.length import LENGTH, training


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


@dataclass(frozen=True)
class Pretrained:
    pretrained: bool = True  # False: a tiny random model, for QUICK
    needles: int = 3
    length: int = 256
    batch: int = 1
    steps: int = 120
    lengths: tuple[int, ...] = (256, 1024, 4096)
    samples: int = 16


QUICK = Settings(needles=1, length=160, batch=2, steps=3, lengths=(160, 320), samples=2)
QUICK_PRETRAINED = Pretrained(pretrained=False, needles=1, length=160, steps=3, lengths=(160, 320), samples=2)
#: A method and its parameters, by variant: LogN acts below the training length too, as in the paper, where s is learned.
METHODS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "logn": ("logn", {"train_length": 256, "clamp": False}),
    "scale_invariant": ("scale_invariant", {}),
}
DOWNLOADED = Path(__file__).parents[2] / "models"


def run_needles(run: Run) -> dict[str, Any]:
    settings: Settings = run.settings
    model = run.models / LENGTH.name / f"{run.variant}-seed{run.seed}"
    if not (model / "config.json").is_file():
        raise ValueError(
            f"{model} holds no model to start from; make it with: {LENGTH.name} --only '^{run.variant}$' --seeds {run.seed} "
            "(and --again, if its row is there and the model is not)"
        )
    own = {"method": "null", "lora": "null", "optimizer.matrix_lr": settings.matrix_lr, "schedule.warmup": settings.warmup}
    return on_needles(run, model, own)


def run_pretrained(run: Run) -> dict[str, Any]:
    method, parameters = METHODS[run.variant]
    model = obtain(SMOLLM2, DOWNLOADED) if run.settings.pretrained else random_model(run.models)
    own: dict[str, Any] = {"dtype": run.dtype, "method": method or "null"}
    return on_needles(run, model, own | {f"parameters.{name}": value for name, value in parameters.items()})


def on_needles(run: Run, model: Path, own: dict[str, Any]) -> dict[str, Any]:
    """What the recipe measures at its end, with settings of this run's and its `own`."""
    settings: Settings | Pretrained = run.settings
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
        **training(settings.steps, settings.batch, run.seed, run.dtype),
    }
    metrics = train(prepare(load_recipe("needle_lora", [f"{k}={v}" for k, v in overrides.items()])))
    trained = metrics["measured"]["trained"]
    return {
        "lengths": list(settings.lengths),
        "accuracy": [trained[n]["accuracy"] for n in settings.lengths],
        "loss": [round(trained[n]["loss"], 5) for n in settings.lengths],
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
    measure=run_needles,
    text=True,
    dtype="bfloat16",
    needs=LENGTH.name,
)

PRETRAINED = Experiment(
    name="needles-pretrained",
    about="SmolLM2-135M adapted to a method and to needles at 256, tested beyond (Scale-invariant attention, Table 2)",
    variants=tuple(METHODS),
    seeds=(0,),
    minutes=12.0,
    settings=Pretrained(),
    quick=QUICK_PRETRAINED,
    measure=run_pretrained,
    text=True,
    dtype="bfloat16",
)
