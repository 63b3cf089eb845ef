"""The end of a run: the trained model and its base are measured, and the card says what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ..config import LongAttnConfig
from ..evaluation.checkpoints import Checkpoint
from ..evaluation.rows import Row, write_whole
from ..integration import apply, get_config
from ..integration.model import no_untrained_warning
from ..integration.saved_method import has_learned
from ..sharing.card import Facts
from ..sharing.hub import write_card
from .held_out import texts_read
from .preflight import Prepared
from .reach import AFTER, BEFORE, PICTURE_FILE, UNTRAINED, picture
from .trainer import RecipeTrainer


def measured(
    prepared: Prepared, trainer: RecipeTrainer, base: Callable[[], AbstractContextManager[None]]
) -> tuple[dict[str, dict[int, dict[str, Any]]], dict[str, list[Row]]]:
    """Measure the trained model and, to compare, its base: as it came, under the untrained method, and with YaRN where the
    recipe's longest length is beyond the trained one.

    Returns:
        Held-out losses by model and length; the rows of a probe by model, of all but YaRN.
    """
    recipe, original = prepared.recipe, prepared.original
    name, yarn, _ = prepared.yarn
    total = sum(prepared.read_at_the_end) + (sum(texts_read(recipe, prepared.data, recipe.final_lengths)) if yarn else 0)
    losses: dict[str, dict[int, dict[str, Any]]] = {}
    reach: dict[str, list[Row]] = {}
    with trainer.reading("Measuring", total) as bar:

        def all_of(name: str) -> None:
            bar.set_postfix_str(name)
            losses[name] = trainer.held_out_metrics(prepared.final_lengths, bar.update)
            if prepared.back:
                reach[name] = trainer.probed(prepared.back, bar.update)

        all_of(AFTER)
        if recipe.evaluation.compare:
            with base() if recipe.lora is not None else _another(prepared, trainer, original):
                all_of(BEFORE)
            if prepared.attention is not None:
                with _untrained(prepared, trainer):
                    all_of(UNTRAINED)
        if yarn is not None:
            bar.set_postfix_str(name)
            with _another(prepared, trainer, yarn):
                losses[name] = trainer.held_out_metrics(recipe.final_lengths, bar.update)
    return losses, reach


@contextmanager
def _another(
    prepared: Prepared, trainer: RecipeTrainer, checkpoint: Checkpoint, method: LongAttnConfig | None = None
) -> Iterator[None]:
    """While open, what is measured is another checkpoint, in the precision of the trained one."""
    loaded = checkpoint.load(dtype=prepared.recipe.dtype)
    if method is not None:
        with no_untrained_warning():
            apply(loaded, method)
    trained, trainer.causal = trainer.causal, loaded.to(trainer.accelerator.device)
    try:
        yield
    finally:
        trainer.causal = trained


@contextmanager
def _untrained(prepared: Prepared, trainer: RecipeTrainer) -> Iterator[None]:
    """While open, what is measured is the base under the method: with LoRA the same weights, if no others were trained."""
    if prepared.recipe.lora is not None and not has_learned(trainer.causal):
        from peft.helpers import rescale_adapter_scale

        with rescale_adapter_scale(trainer.causal, 0.0):
            yield
        return
    with _another(prepared, trainer, prepared.start, get_config(trainer.causal)):
        yield


def tell(
    prepared: Prepared,
    wrapped: Any,
    measured: dict[str, dict[int, dict[str, Any]]],
    reach: dict[str, list[Row]],
    told: str,
) -> None:
    """Draw what was measured and, with a method, write it on the card."""
    recipe, output, drawn = prepared.recipe, prepared.output, None
    if reach:
        drawn = picture(reach, None if prepared.trained_length == sys.maxsize else prepared.trained_length)
    if drawn:
        write_whole(output / PICTURE_FILE, drawn)
    if prepared.attention is None:
        return
    names = [name for name in ("loss", "accuracy") if name in measured[AFTER][recipe.length]]
    by_model: dict[str, dict[str, dict[int, float]]] = {
        model: {name: {n: x[name] for n, x in measured[model].items()} for name in names}
        for model in (AFTER, BEFORE)
        if model in measured
    }
    facts = Facts(
        training_lengths=[recipe.length],
        training=training_facts(prepared) | _losses(measured, recipe.length),
        metrics=by_model[AFTER],
        base_metrics=by_model.get(BEFORE),
        evaluated_on=_names(recipe.heldout) if recipe.heldout else f"the held-out end of {_names(recipe.data)}",
        reach=told + (f"\n\n![Losses by distance]({PICTURE_FILE})" if drawn else ""),
    )
    write_card(wrapped, output, output.name, facts)


def training_facts(prepared: Prepared) -> dict[str, str]:
    """Return the facts of a training that a card gives before it is measured."""
    recipe, args, lora = prepared.recipe, prepared.args, prepared.recipe.lora
    windows = prepared.windows
    what = "all weights" if not recipe.freeze else "the method's learned parameters alone"
    if lora is not None:
        targets = ["the projections of attention" if target == "attention" else target for target in lora.targets]
        what = f"LoRA of rank {lora.r}, alpha {lora.alpha}, on {', '.join(targets)}"
        what += ", and the method's learned parameters" * has_learned(prepared.built[0])
    reads = f", positions skipped up to {prepared.reads:,}" if recipe.positions == "skip" else ""
    shown = f"{windows} window{'s' * (windows > 1)} of {recipe.length:,} tokens"
    return {
        "recipe": recipe.name,
        "data": _names(recipe.data),
        "steps": f"{args.max_steps:,} of {shown}, {args.max_steps * windows * recipe.length:,} in all{reads}",
        "trained": what,
        "learning rate": f"{args.learning_rate:g}, {args.lr_scheduler_type.value}",
    }


def _losses(measured: dict[str, dict[int, dict[str, Any]]], length: int) -> dict[str, str]:
    """The held-out loss in windows as they were trained on, before and after."""
    after, base = measured[AFTER][length], measured.get(BEFORE, {}).get(length)
    if "loss" not in after:
        return {}
    was = "" if base is None else f"{base['loss']:.3f} of the base, "
    over = f"{after['tokens']:,} tokens" if "tokens" in after else f"the answers of {after['needles']:,} needles"
    told = f"{was}{after['loss']:.3f} after training, in nats per token, over {over}"
    return {f"held-out loss at {length:,} tokens": told}


def _names(sources: Any) -> str:
    """Name held-out text for a model card, without folders of this machine."""
    names = sources if isinstance(sources, list) else [sources]
    return ", ".join(Path(name).name if Path(name).exists() or "*" in name else name for name in names)
