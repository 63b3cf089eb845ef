"""What a run keeps in its output folder: the recipe that it began with, checkpoints, and a lock while it trains."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from zipfile import is_zipfile

import yaml
from safetensors import SafetensorError, safe_open

from ..checks import Refused
from ..evaluation.rows import alone
from ..files import ADAPTER_FILE, METRICS_FILE, RECIPE_FILE
from ..integration.saved_method import saved_in
from .recipe import Evaluation, Recipe, differences

LOCK_FILE = "training.lock"


def is_first() -> bool:
    """Tell whether this is the first of the processes that train together, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def locked(output: Path) -> AbstractContextManager[None]:
    """While open, no other command trains into a folder; `Refused` if one does."""
    return alone(output / LOCK_FILE, "training")


def refuse_beside_another(output: Path) -> None:
    """Raise `Refused` if another command trains into a folder; a lock whose holder was killed is removed."""
    if is_first() and (output / LOCK_FILE).exists():
        with locked(output):
            pass


def resumed_from(recipe: Recipe, output: Path, resume: bool) -> tuple[str | None, Recipe]:
    """The checkpoint to go on from, None for none; and the recipe as the run began, by whose evaluation text was held out.

    `Refused`: the folder holds another run, or none to go on with.
    """
    if not resume:
        there = output.exists() and (not output.is_dir() or any(p.name != LOCK_FILE for p in output.iterdir()))
        if there and is_first():  # other processes may come after the first has begun to write
            begun, finished = ((output / name).is_file() for name in (RECIPE_FILE, METRICS_FILE))
            state = f"the run in {output} is finished" if begun and finished else f"{output} exists"
            way = ", or continue with --resume" if begun and not finished else ""
            raise Refused(f"{state}; nothing is overwritten: choose another output{way}")
        return None, recipe
    if not (output / RECIPE_FILE).is_file():
        raise Refused(f"{output} holds no run to resume")
    if (output / METRICS_FILE).exists():
        raise Refused(f"the run in {output} is finished: there is nothing to resume")
    before = yaml.safe_load((output / RECIPE_FILE).read_text(encoding="utf-8"))
    if changed := [key for key in differences(before, recipe) if not key.startswith("evaluation.")]:
        raise Refused(
            f"{output / RECIPE_FILE} differs from this recipe in {', '.join(changed)}: resume with the settings that it was "
            "started with (those of evaluation may change)"
        )
    checkpoint = last_checkpoint(output)  # none: from the start
    if checkpoint is not None and (why := _damage(checkpoint)):
        raise Refused(
            f"the checkpoint {checkpoint} cannot be loaded ({why}): remove that folder to go on from the one before it, or "
            "from the start where there is none"
        )
    began = dataclasses.replace(recipe, evaluation=Evaluation(**before["evaluation"]))
    return None if checkpoint is None else str(checkpoint), began


def last_checkpoint(output: Path) -> Path | None:
    """The checkpoint that a run can go on from, or None."""
    whole = [path for path in output.glob("checkpoint-*") if _whole(path)]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2])) if whole else None


def _whole(checkpoint: Path) -> bool:
    """Tell whether a checkpoint is complete: the Trainer writes its state last."""
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _damage(checkpoint: Path) -> str:
    """Name a file of a checkpoint that is damaged or missing, as far as can be told without reading it; empty: none is."""
    files = sorted(checkpoint.iterdir())
    for what, names in (("weights", ("adapter_model", "model", "pytorch_model")), ("state of the optimizer", ("optimizer",))):
        if not any(file.is_dir() or file.name.startswith(names) for file in files):  # sharded ones lie in folders
            return f"it holds no {what}"
    return next((f"{file.name} is damaged" for file in files if not _readable(file)), "")


def _readable(file: Path) -> bool:
    """Tell whether a file is whole by its outline: that of safetensors, of torch's archives, of an adapter's config."""
    try:
        if file.suffix == ".safetensors":
            safe_open(file, "pt")
        archive = file.suffix in {".pt", ".pth"}
        return (not archive or is_zipfile(file)) and (file.name != ADAPTER_FILE or "peft_type" in saved_in(file))
    except (SafetensorError, ValueError):
        return False


def remove_cut_short(output: Path) -> None:
    """Remove checkpoints that were cut short: what is left of one would be read as it is written again."""
    for path in output.glob("checkpoint-*"):
        if not _whole(path):
            shutil.rmtree(path)


def remove_begun(output: Path) -> None:
    """Remove what a run that failed early left in the way of the next."""
    if not output.is_dir() or not is_first():
        return
    begun = [path for path in output.glob("checkpoint-*") if _holds_nothing(path)]
    if {p.name for p in output.iterdir()} <= {RECIPE_FILE, LOCK_FILE, *(p.name for p in begun)}:
        for folder in begun:
            shutil.rmtree(folder)
        (output / RECIPE_FILE).unlink(missing_ok=True)


def _holds_nothing(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was cut short before its weights: it holds settings alone, and no state of the Trainer."""
    files = [path for path in checkpoint.rglob("*") if not path.is_dir()]
    return all(path.suffix in {".json", ".md", ".jinja", ".txt"} and path.name != "trainer_state.json" for path in files)
