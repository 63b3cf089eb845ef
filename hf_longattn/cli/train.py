"""`hf-longattn train`: adapt a model to a method by a recipe."""

from __future__ import annotations

import itertools
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .common import refusing, say


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="continue_lora, convert_distill, method_lora, needle_lora, or a YAML file."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe; dots for nested keys.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in the output directory.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Start without asking what takes days, or more memory than there is.")
    ] = False,
) -> None:
    """Train by RECIPE, a YAML file of settings, with your overrides.

    For example: hf-longattn train continue_lora model=HuggingFaceTB/SmolLM2-135M data=book.txt output=runs/book

    The output directory gets the adapter or model, the tokenizer, recipe.yaml (all settings as they were used) and
    metrics.json (losses of the trained model and of its base). At the end both are asked how far back they retrieve, which
    is told, drawn (reach.png) and put on the card; evaluation.far=0 leaves that out. Any of transformers'
    TrainingArguments can be set: trainer.learning_rate=3e-4, trainer.bf16=true, trainer.report_to=wandb. Several GPUs:
    accelerate launch -m hf_longattn.cli train ... Exit status 2 if something is refused before the start, 1 if the plan needs
    over two days or too much memory and you did not confirm (--yes).
    """
    from ..training import load_recipe

    with refusing():
        chosen = load_recipe(recipe, overrides or [])

    from ..files import disk_full
    from ..integration.classes import loaders
    from ..slots.registry import modules_of
    from ..training import excess, last_checkpoint, plan, prepare, run
    from ..training.run_folder import is_first

    with refusing():
        prepared = prepare(chosen, resume=resume)
        lines = plan(prepared)
        too_much = "" if yes else excess(prepared)
    if first := is_first():
        say(lines)
    if first and too_much:
        if dry_run or not sys.stdin.isatty():
            say(f"This run takes {too_much}. If that is meant: --yes")
            raise typer.Exit(1)
        typer.confirm(f"This run takes {too_much}. Start it?", abort=True)
    if dry_run:
        return
    try:
        metrics = run(prepared)
    except (KeyboardInterrupt, Exception) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted and not disk_full(error):
            raise
        if first:
            why = "Interrupted" if interrupted else f"The disk is full ({error})"
            say(_standing(why, prepared.output, last_checkpoint(prepared.output)))
        raise typer.Exit(130 if interrupted else 1) from None
    if first:
        for name, by_length in metrics["measured"].items():
            for length, m in by_length.items():
                result = f", accuracy {m['accuracy']:.3f}" if "accuracy" in m else ""
                say(f"{name} at {length}: loss {m['loss']:.3f}{result}")
        if told := metrics["reach"]["text"]:
            say(told)
        if why := prepared.unprobed:
            say(f"{why[0].upper()}{why[1:]}.")
        own = modules_of(prepared.attention.methods) if prepared.attention else ()
        loader = loaders(prepared.start.kind.__name__)[0]
        way = f"import {', '.join(['hf_longattn', *own])}; {loader}.from_pretrained({str(prepared.output)!r})"
        say(f"Written: {prepared.output}; load it with: {way}")


class TrainCommand(TyperCommand):
    """`train`, which says how a key of a recipe is written where it is given as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from ..training.recipe import CALLED, Recipe

        keys = {f.name: f.name for f in fields(Recipe)} | {called: f"trainer.{key}" for called, key in CALLED.items()}
        keys |= {"out": "output", "text": "data"}  # as other commands call them
        own = {option for parameter in self.params for option in parameter.opts}
        for word, after in itertools.zip_longest(args, args[1:]):
            option, equals, value = word.partition("=")
            key = keys.get(option.removeprefix("--").replace("-", "_"))
            if option.startswith("--") and option not in own and key is not None:
                value = value if equals else after if after and not after.startswith("-") else "..."
                raise typer.BadParameter(f"{option} is a key of the recipe: write {key}={value}", ctx=ctx)
        return list(super().parse_args(ctx, args))


def _standing(why: str, output: Path, checkpoint: Path | None) -> str:
    """Say where a stopped run stands, and what continues it."""
    from ..files import METRICS_FILE

    again = shlex.join(["hf-longattn", *sys.argv[1:], *["--resume"] * ("--resume" not in sys.argv)])
    if (output / METRICS_FILE).is_file():
        return f"{why} after all was written: the run in {output} is finished."
    if any(output.glob("*.safetensors")):
        why += f" after training. The weights are in {output}; only the measurement at the end is missing"
        if checkpoint is None:
            return f"{why}."
    elif checkpoint is None and any(output.glob("checkpoint-*")):
        return f"{why} while it saved the first checkpoint, which is unfinished. To start from the beginning: {again}"
    elif checkpoint is None:
        return f"{why} before the first checkpoint: nothing is kept; the same command starts again."
    return f"{why}. {checkpoint} is kept. To continue: {again}"
