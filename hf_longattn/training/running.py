"""A run from beginning to end: train, save, measure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..evaluation.calibrate import calibrate
from ..evaluation.checkpoints import carry
from ..evaluation.rows import versions, write_whole
from ..files import METRICS_FILE, RECIPE_FILE
from ..integration.max_length import trained_at
from ..sharing.hub import save
from .loss import CausalLoss, trained_by
from .measuring import measured, tell, training_facts
from .models import put_adapter, put_method, unadapted
from .preflight import Prepared
from .reach import sentence
from .recipe import dump
from .run_folder import is_first, locked, remove_begun, remove_cut_short, resumed_from
from .trainer import RecipeTrainer, interruptible


def run(prepared: Prepared, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None) -> dict[str, Any]:
    """Train, measure, and leave everything in the output directory; returns the metrics that are written there.

    Args:
        optimizer: makes one for the model, in place of Trainer's own.

    Raises:
        KeyboardInterrupt: of SIGINT. While it trains, the step is finished and a checkpoint saved first; a second one stops
            at once. Without a checkpoint nothing is left behind.
        Refused: another command trains into the output directory, or did since `prepare`.
    """
    with locked(prepared.output) if is_first() else nullcontext():
        if is_first():
            resumed_from(prepared.recipe, prepared.output, prepared.resume)  # another run may have begun since
            remove_cut_short(prepared.output)
        try:
            return _run(prepared, optimizer)
        except BaseException:
            if prepared.checkpoint is None:
                remove_begun(prepared.output)
            raise


def _run(prepared: Prepared, optimizer: Callable[[Any], torch.optim.Optimizer] | None) -> dict[str, Any]:
    recipe, output, args = prepared.recipe, prepared.output, prepared.args
    started, cpu = time.monotonic(), time.process_time()
    set_seed(args.seed)
    model, wrapped = _model(prepared)
    own = None if optimizer is None else optimizer(model)
    trainer = RecipeTrainer(recipe, prepared.data, wrapped, model, args, prepared.tokenizer, own)
    first = trainer.is_world_process_zero()
    if first and not prepared.resume:  # held-out text was chosen by the evaluation that a run began with
        write_whole(output / RECIPE_FILE, dump(recipe))
    base = functools.partial(unadapted, wrapped, prepared.original.config)
    jumps = recipe.positions == "skip"
    loss = CausalLoss(model, recipe.distill, base, jumps, trainer.part)
    with trained_by(model, loss), interruptible(trainer):
        result = trainer.train(resume_from_checkpoint=prepared.checkpoint)
    _save(prepared, trainer, wrapped)  # before what takes long, and may fail
    losses, reach = measured(prepared, trainer, base)
    told = sentence(reach, losses, prepared.text)
    if first:
        tell(prepared, wrapped, losses, reach, told)
    metrics = {
        "recipe": recipe.name,
        "measured": losses,
        "reach": {"text": told, "probe": reach},
        "train_loss": result.training_loss if prepared.checkpoint is None else mean_loss(trainer.state.log_history),
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * prepared.windows * recipe.length,
        "seed": args.seed,
        "processes": args.world_size,
        "resumed_from": prepared.checkpoint and Path(prepared.checkpoint).name,
        "command": " ".join([Path(sys.argv[0]).name.replace("__main__.py", "hf-longattn"), *sys.argv[1:]]),
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "settings": dataclasses.asdict(recipe),
        "log": trainer.state.log_history,
    }
    if first:
        write_whole(output / METRICS_FILE, json.dumps(metrics, indent=1) + "\n")
    return metrics


def mean_loss(log: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean training loss of all steps that were logged, those before a run was resumed among them; None: none was."""
    logged = [(0, 0.0), *((int(entry["step"]), float(entry["loss"])) for entry in log if "loss" in entry)]
    total = sum((step - before) * loss for (before, _), (step, loss) in itertools.pairwise(logged))
    return total / logged[-1][0] if logged[-1][0] else None


def _model(prepared: Prepared) -> tuple[Any, Any]:
    """The model under its method, calibrated if the recipe says so; and what is trained: it, or an adapter around it."""
    recipe, attention = prepared.recipe, prepared.attention
    model = prepared.start.load(dtype=recipe.dtype)
    if recipe.calibrate and attention is not None:
        model.eval()
        attention = calibrate(model, prepared.data.first_windows(-(-recipe.calibrate // recipe.length)), attention)
    put_method(model, recipe, attention, prepared.reads)
    return model, model if recipe.lora is None else put_adapter(model, recipe.lora, prepared.args.seed)


def _save(prepared: Prepared, trainer: RecipeTrainer, wrapped: Any) -> None:
    """The trained weights; with a method, as `hf_longattn.save` does."""
    recipe, output, weights = prepared.recipe, prepared.output, trainer.whole()
    first = trainer.is_world_process_zero()
    if prepared.attention is None:
        if (recipe.lora is None or recipe.setting.rope is not None) and prepared.reads > prepared.trained_length:
            trained_at(trainer.causal, prepared.reads)
        trainer.save_model(str(output))
        if first and recipe.setting.rope is not None:
            trainer.causal.config.save_pretrained(output)  # a plain adapter does not record the rotary encoding
    elif first:
        made: dict[str, Any] = {"training_lengths": [recipe.length], "training": training_facts(prepared)}
        save(wrapped, output, tokenizer=prepared.tokenizer, overwrite=True, state_dict=weights, **made)
    if first and recipe.lora is None:
        carry(str(recipe.model), output, type(trainer.causal))
