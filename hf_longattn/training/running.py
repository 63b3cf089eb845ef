"""A recipe from beginning to end: refuse what cannot work, say what will happen, train, measure, save."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainingArguments, set_seed

from ..checks import check_dtype, check_output
from ..config import LongAttnConfig
from ..core.kernels.precision import auto_dtype, multiplies_fast
from ..evaluation.calibrate import calibrate
from ..evaluation.checkpoints import Checkpoint, carry, load_tokenizer
from ..evaluation.measures.probe import TOKENS
from ..evaluation.rows import Row, alone, versions, write_whole
from ..evaluation.settings import Setting
from ..integration import describe
from ..integration.guards import table_entries
from ..integration.max_length import trained_at
from ..integration.planning import bound_config
from ..integration.trained_length import recorded
from ..sharing.card import Facts
from ..sharing.hub import save, write_card
from ..slots.method import Method
from . import estimate
from .data import Data
from .held_out import tokens_read
from .loss import CausalLoss, trained_by
from .models import put_adapter, put_method, unadapted
from .reach import AFTER, BEFORE, PASSAGES, PICTURE_FILE, PROBED, distances, picture, sentence, unprobed
from .recipe import Evaluation, Recipe, differences, dump
from .trainer import RecipeTrainer, arguments, check_processes, interruptible

RECIPE_FILE, METRICS_FILE, LOCK_FILE = "recipe.yaml", "metrics.json", "training.lock"
#: A run that takes longer is asked about first.
DAYS = 2
#: Where the recipe does not say: tokens of the long text at the end, and the share of the training's time for measuring.
FAR, SHARE = 16384, 1 / 3
#: From so many readings of each window on, a plan says so.
OFTEN = 10


@dataclasses.dataclass
class Prepared:
    """Everything a run needs but its weights; made by `prepare`, which refuses what cannot work.

    Args:
        start: the model before training, with the recipe's position encoding; `original` has its own.
        reads: the longest text that the model sees in training, jumps of positions counted.
        methods: what the slots hold, with what the model fills in.
        back: from how far back copies are probed at the end.
        unprobed: why none are, where the recipe asks for it; else empty.
        text: the length of the long text that is read at the end, or None.
        shortened: whether less is measured than could be, so that it takes no longer than a share of the training.
    """

    recipe: Recipe
    output: Path
    checkpoint: str | None
    tokenizer: Any
    data: Data
    attention: LongAttnConfig | None
    start: Checkpoint
    original: Checkpoint
    args: TrainingArguments
    reads: int
    methods: tuple[Method, ...]
    back: tuple[int, ...]
    unprobed: str
    text: int | None
    shortened: bool
    resume: bool

    @functools.cached_property
    def built(self) -> tuple[Any, int, int]:
        """The model without weights, under its method and in its adapter; its parameters, and those that are trained."""
        model = self.start.build(dtype=self.recipe.dtype)
        put_method(model, self.recipe, self.attention, self.reads)
        parameters = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if self.recipe.lora is not None:
            trained = put_adapter(model, self.recipe.lora, self.recipe.seed).get_nb_trainable_parameters()[0]
        return model, parameters, trained

    @functools.cached_property
    def seconds(self) -> tuple[float, float]:
        """Estimated seconds of training, and of measuring at the end."""
        windows = _windows(self.recipe, self.args) * self.args.max_steps // self.args.world_size
        text, read = self.start.text_config, (_read_at_the_end(self), _read_meanwhile(self))
        work = estimate.operations(self.recipe, self.args, self.built[1], text, windows, *read)
        return estimate.duration(self.recipe, self.args, text, work)

    @property
    def bytes(self) -> tuple[float, float]:
        """That a process needs, estimated, and that it may take here."""
        _, parameters, trained = self.built
        needed = estimate.memory(self.recipe, self.args, parameters, trained, self.start.text_config)
        return needed, estimate.machine(self.args.device)

    @property
    def seen(self) -> int:
        """The most keys that a row of training sees: skipped positions add distances, no keys."""
        positions = getattr(self.data.train, "positions", None)  # of packed documents, which do not see each other
        return self.recipe.length if positions is None else int(positions.max()) + 1

    @property
    def idle(self) -> tuple[Method, ...]:
        """The methods that change no row of training."""
        jumps = self.recipe.positions == "skip" and self.recipe.skip.unskipped < 1
        shown = self.reads if jumps else self.seen
        off = self.recipe.strength is not None and not (self.recipe.strength.start or self.recipe.strength.end)
        return tuple(
            m
            for m in dict.fromkeys(self.methods)
            if (self.seen if m.slot == "temperature" else shown) <= m.identity_below or (off and m.slot == "logit_map")
        )

    @property
    def final_lengths(self) -> list[int]:
        """Lengths at which the trained model and its base are measured at the end."""
        return self.recipe.final_lengths + ([] if self.text is None else [self.text])


def prepare(recipe: Recipe, *, resume: bool = False) -> Prepared:
    """Check a recipe against its files, its output directory and its model's config; no weights are read.

    Raises:
        ValueError: something is missing, too short, in the way or contradictory.
        OSError: a file or a model cannot be read.
    """
    assert recipe.output is not None
    output = Path(recipe.output)
    args = arguments(recipe)
    check_dtype(recipe.dtype, "auto")
    if recipe.dtype == "auto":
        recipe = dataclasses.replace(recipe, dtype=auto_dtype(args.device))
    if _first() and (output / LOCK_FILE).exists():  # held, or left behind by one that was killed
        with alone(output / LOCK_FILE, "training"):
            pass
    checkpoint = _checkpoint(recipe, output, resume)
    check_output(output)
    original = Checkpoint(str(recipe.model))
    attention = recipe.setting.config
    tokenizer = load_tokenizer(recipe.tokenizer or original.model)
    original.check_reads()
    start = original.under(recipe.setting)
    skip = _with_target_length(recipe, original)
    reads = (skip.skip.target_length if recipe.positions == "skip" else None) or recipe.length
    reaches, methods, parameters = _reach(recipe, start, attention, reads)
    started = _started(recipe, output, resume)
    held_out = min(reaches, _far(started))
    data = Data(dataclasses.replace(skip, evaluation=started), tokenizer, max(held_out, PROBED) if held_out else 0)
    _check_held_out(recipe, data)
    far = min(reaches, _far(recipe.evaluation))
    back = distances(reaches, len(data.held_out)) if far else ()
    why_not = unprobed(reaches, len(data.held_out)) if _far(recipe.evaluation) and not back else ""
    if recipe.distill is not None and recipe.length > (trained := _trained_length(original)):
        raise ValueError(
            f"the teacher was trained at {trained} tokens; windows of {recipe.length} are beyond it: lower length"
        )
    check_processes(recipe, args, start.text_config)
    text = _long_text(recipe, data, far)
    where = (recipe, output, checkpoint, tokenizer, data)
    run = Prepared(*where, attention, start, original, args, reads, methods, back, why_not, text, False, resume)
    return run if recipe.evaluation.far is not None else _within_budget(run, parameters)


def plan(run: Prepared) -> str:
    """Describe a run in lines: model, changed layers, tokens, memory, steps. Builds the model without weights."""
    recipe, args = run.recipe, run.args
    model, parameters, trained = run.built
    described = describe(model)
    changed = [row for row in described.rows if row[1] != "unchanged"]
    layers = f"{len(changed)} of {len(described.rows)} attention layers"
    rows = _windows(recipe, args)
    tokens = rows * recipe.length * args.max_steps
    have = "streamed" if recipe.hub.streaming else f"{len(run.data.train)} windows"  # type: ignore[arg-type]
    text = run.start.text_config
    sizes = (recipe, args, parameters, trained, text)
    positions = f"skip, up to {run.reads:,}" if recipe.positions == "skip" else recipe.positions
    needed, there = run.bytes
    memory = f"about {needed / 2**30:.1f} GiB per process (weights, gradients, optimiser, activations: an estimate)"
    if needed > there:
        memory += f", more than the {there / 2**30:.1f} GiB here: {estimate.way_out(*sizes, there)}"
    lines = [
        ("recipe", f"{recipe.name} -> {run.output}" + (f", resumed from {run.checkpoint}" if run.checkpoint else "")),
        ("model", f"{recipe.model}: {_count(parameters)} parameters, {_count(trained)} trained"),
        ("attention", f"{changed[0][1]}, in {layers}" if changed else f"unchanged, in all {len(described.rows)} layers"),
        ("rotary", str(text.rope_parameters) if getattr(text, "rope_parameters", None) else "none"),
        ("data", f"{have} of {recipe.length} tokens, positions {positions}; {len(run.data.held_out)} tokens held out"),
        ("steps", f"{args.max_steps}, windows per step: {rows}, processes: {args.world_size}; {_count(tokens)} tokens in all"),
        ("precision", _precision(recipe, args)),
        ("evaluation", f"at {recipe.lengths}, at the end at {run.final_lengths}{_reading(run)}"),
        ("memory", memory),
        ("time", _time(run)),
    ]
    lines += [("note", _without_effect(run, method)) for method in run.idle]
    if not recipe.hub.streaming and (often := rows * args.max_steps / max(1, len(run.data.train))) > OFTEN:  # type: ignore[arg-type]
        lines.append(("note", f"each window is read {often:.0f} times: give more text, or fewer steps (trainer.max_steps)"))
    if recipe.positions == "skip" and recipe.length > (known := _trained_length(run.original)):
        lines.append(("note", _longer_windows(recipe, known)))
    return "\n".join(f"{name:<11}{value}" for name, value in lines)


def run(prepared: Prepared, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None) -> dict[str, Any]:
    """Train, measure, and leave everything in the output directory; returns the metrics that are written there.

    Args:
        optimizer: makes one for the model, in place of Trainer's own.

    Raises:
        KeyboardInterrupt: of SIGINT. While it trains, the step is finished and a checkpoint saved first; a second one stops
            at once. Without a checkpoint nothing is left behind.
        Refused: another command trains into the output directory.
        ValueError: another one did, since `prepare`.
    """
    with alone(prepared.output / LOCK_FILE, "training") if _first() else nullcontext():
        if _first():
            _checkpoint(prepared.recipe, prepared.output, prepared.resume)
            for path in prepared.output.glob("checkpoint-*"):
                if not _whole(path):  # cut short: what is left of it would be read as it is written again
                    shutil.rmtree(path)
        try:
            return _run(prepared, optimizer)
        except BaseException:
            _discard(prepared)
            raise


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


def _discard(prepared: Prepared) -> None:
    """Remove what a run that failed early left in the way of the next."""
    output = prepared.output
    if prepared.checkpoint is not None or not output.is_dir() or not _first():
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
    measured, reach = _measured(prepared, trainer, base)
    told = sentence(reach, measured, prepared.text)
    if first:
        _tell(prepared, wrapped, measured, reach, told)
    metrics = {
        "recipe": recipe.name,
        "measured": measured,
        "reach": {"text": told, "probe": reach},
        "train_loss": result.training_loss,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * _windows(recipe, args) * recipe.length,
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


def _model(prepared: Prepared) -> tuple[Any, Any]:
    """The model under its method, calibrated if the recipe says so; and what is trained: it, or an adapter around it."""
    recipe, attention = prepared.recipe, prepared.attention
    model = prepared.start.load(dtype=recipe.dtype)
    if recipe.calibrate and attention is not None:
        model.eval()
        attention = calibrate(model, prepared.data.first_windows(-(-recipe.calibrate // recipe.length)), attention)
    put_method(model, recipe, attention, prepared.reads)
    return model, model if recipe.lora is None else put_adapter(model, recipe.lora, prepared.args.seed)


def _measured(
    prepared: Prepared, trainer: RecipeTrainer, base: Callable[[], AbstractContextManager[None]]
) -> tuple[dict[str, dict[int, dict[str, Any]]], dict[str, list[Row]]]:
    """Held-out losses by model and length, and the rows of a probe by model: of the trained model; to compare, of the
    unadapted base; and losses of the base with YaRN for the recipe's longest length, if that is beyond its trained one."""
    recipe, original = prepared.recipe, prepared.original
    beyond = max(recipe.final_lengths) / _trained_length(original) if recipe.evaluation.compare else 0.0
    rotates = getattr(original.text_config, "rope_parameters", None)
    yarn = f"{BEFORE} + YaRN x{beyond:g}" if beyond > 1 and rotates else None
    each = tokens_read(recipe, prepared.data, prepared.final_lengths) + len(prepared.back) * PASSAGES * TOKENS
    total = each * (1 + recipe.evaluation.compare)
    total += tokens_read(recipe, prepared.data, recipe.final_lengths) if yarn else 0
    measured: dict[str, dict[int, dict[str, Any]]] = {}
    reach: dict[str, list[Row]] = {}
    quiet = trainer.args.disable_tqdm or not trainer.is_world_process_zero()
    with tqdm(total=total, desc="Measuring", unit=" tokens", disable=quiet) as bar:

        def all_of(name: str) -> None:
            bar.set_postfix_str(name)
            measured[name] = trainer.held_out_metrics(prepared.final_lengths, bar.update)
            if prepared.back:
                reach[name] = trainer.probed(prepared.back, bar.update)

        all_of(AFTER)
        if recipe.evaluation.compare:
            with base() if recipe.lora is not None else _another(prepared, trainer, original):
                all_of(BEFORE)
        if yarn is not None:
            bar.set_postfix_str(yarn)
            with _another(prepared, trainer, original.under(Setting(yarn, rope=f"yarn:{beyond}"))):
                measured[yarn] = trainer.held_out_metrics(recipe.final_lengths, bar.update)
    return measured, reach


def _save(prepared: Prepared, trainer: RecipeTrainer, wrapped: Any) -> None:
    """The trained weights; with a method, as `hf_longattn.save` does."""
    recipe, output, weights = prepared.recipe, prepared.output, trainer.whole()
    first = trainer.is_world_process_zero()
    if prepared.attention is None:
        if (recipe.lora is None or recipe.setting.rope is not None) and prepared.reads > _trained_length(prepared.original):
            trained_at(trainer.causal, prepared.reads)
        trainer.save_model(str(output))
        if first and recipe.setting.rope is not None:
            trainer.causal.config.save_pretrained(output)  # a plain adapter does not record the rotary encoding
    elif first:
        made: dict[str, Any] = {"training_lengths": [recipe.length], "training": _training(prepared)}
        save(wrapped, output, tokenizer=prepared.tokenizer, overwrite=True, state_dict=weights, **made)
    if first and recipe.lora is None:
        carry(str(recipe.model), output, type(trainer.causal))


def _tell(
    prepared: Prepared,
    wrapped: Any,
    measured: dict[str, dict[int, dict[str, Any]]],
    reach: dict[str, list[Row]],
    told: str,
) -> None:
    """Draw what was measured and, with a method, write it on the card."""
    recipe, output, drawn = prepared.recipe, prepared.output, None
    if reach:
        trained = _trained_length(prepared.original)
        drawn = picture(reach, None if trained == sys.maxsize else trained)
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
        training=_training(prepared) | _losses(by_model, recipe.length),
        metrics=by_model[AFTER],
        base_metrics=by_model.get(BEFORE),
        evaluated_on=_names(recipe.heldout or recipe.data),
        reach=told + (f"\n\n![Losses by distance]({PICTURE_FILE})" if drawn else ""),
    )
    write_card(wrapped, output, output.name, facts)


def _training(prepared: Prepared) -> dict[str, str]:
    """Return the facts of a training that a card gives before it is measured."""
    recipe, args, lora = prepared.recipe, prepared.args, prepared.recipe.lora
    windows = _windows(recipe, args)
    what = "all weights" if not recipe.freeze else "the method's learned parameters alone"
    if lora is not None:
        targets = ["the projections of attention" if target == "attention" else target for target in lora.targets]
        what = f"LoRA of rank {lora.r}, alpha {lora.alpha}, on {', '.join(targets)}"
    reads = f", positions skipped up to {prepared.reads:,}" if recipe.positions == "skip" else ""
    shown = f"{windows} window{'s' * (windows > 1)} of {recipe.length:,} tokens"
    return {
        "recipe": recipe.name,
        "data": _names(recipe.data),
        "steps": f"{args.max_steps:,} of {shown}, {args.max_steps * windows * recipe.length:,} in all{reads}",
        "trained": what,
        "learning rate": f"{args.learning_rate:g}, {args.lr_scheduler_type.value}",
    }


def _losses(by_model: dict[str, dict[str, dict[int, float]]], length: int) -> dict[str, str]:
    """The held-out loss in windows as they were trained on, before and after."""
    before, after = (by_model.get(name, {}).get("loss", {}).get(length) for name in (BEFORE, AFTER))
    was = "" if before is None else f"{before:.3f} before, "
    return {} if after is None else {f"held-out loss at {length:,} tokens": f"{was}{after:.3f} after, in nats per token"}


def _first() -> bool:
    """Tell whether this is the first of the processes that train together, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def _windows(recipe: Recipe, args: TrainingArguments) -> int:
    """Windows that a step takes from all processes."""
    processes = args.world_size // recipe.sequence_parallel
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * processes)


def _checkpoint(recipe: Recipe, output: Path, resume: bool) -> str | None:
    """The checkpoint to go on from; None for a new run."""
    if not resume:
        there = output.exists() and (not output.is_dir() or any(p.name != LOCK_FILE for p in output.iterdir()))
        if there and _first():  # other processes may come after the first has begun to write
            raise ValueError(f"{output} exists; nothing is overwritten: choose another output, or continue with --resume")
        return None
    if not (output / RECIPE_FILE).is_file():
        raise ValueError(f"{output} holds no run to resume")
    if (output / METRICS_FILE).exists():
        raise ValueError(f"the run in {output} is finished: there is nothing to resume")
    if changed := [key for key in _changed(recipe, output) if not key.startswith("evaluation.")]:
        raise ValueError(
            f"{output / RECIPE_FILE} differs from this recipe in {', '.join(changed)}: resume with the settings that it was "
            "started with (those of evaluation may change)"
        )
    checkpoint = last_checkpoint(output)  # none: from the start
    return None if checkpoint is None else str(checkpoint)


def _changed(recipe: Recipe, output: Path) -> list[str]:
    """Return the keys in which a recipe differs from the one that started a run."""
    before = (output / RECIPE_FILE).read_text(encoding="utf-8")
    return [] if before == dump(recipe) else differences(before, recipe)


def _started(recipe: Recipe, output: Path, resume: bool) -> Evaluation:
    """Return how a run was to be measured when it began, by which its held-out text was chosen."""
    if not resume:
        return recipe.evaluation
    from omegaconf import OmegaConf

    return Evaluation(**OmegaConf.to_container(OmegaConf.load(output / RECIPE_FILE))["evaluation"])  # type: ignore[arg-type, index, call-overload]


def _check_held_out(recipe: Recipe, data: Data) -> None:
    """Raise ValueError if a resumed run is to be measured at a length that its held-out text does not have."""
    if data.test_task is None and (longest := max(*recipe.lengths, *recipe.final_lengths)) > len(data.held_out):
        raise ValueError(
            f"the run began with {len(data.held_out)} tokens held out, and evaluation at length {longest} needs as many: "
            "shorten evaluation.lengths and evaluation.final_lengths"
        )


def _precision(recipe: Recipe, args: TrainingArguments) -> str:
    """Describe the dtypes of weights and products, and say whether the device is slow at them."""
    used = "bfloat16" if args.bf16 else "float16" if args.fp16 else recipe.dtype
    message = f"weights in {recipe.dtype}, multiplied in {used}"
    slow = not multiplies_fast(used, args.device)
    return message + (f", which this {args.device.type.upper()} does slowly: float32 is faster" if slow else "")


def _reading(run: Prepared) -> str:
    if not run.back:
        return f"; {run.unprobed}" if run.unprobed else ""
    models = "the trained model and its base" if run.recipe.evaluation.compare else "the trained model"
    less = f"shortened to follow the training's time; evaluation.far={FAR} measures all, " if run.shortened else ""
    return f"; copies from up to {run.back[-1]:,} tokens back, of {models} ({less}evaluation.far=0 none)"


def _time(run: Prepared) -> str:
    training, measuring = run.seconds
    return (
        f"about {estimate.shown(training)} of training and {estimate.shown(measuring)} of measuring at the end (an estimate "
        f"from how fast this {run.args.device.type.upper()} multiplies)"
    )


def excess(run: Prepared) -> str:
    """Say what a run takes that is hardly meant: more than `DAYS`, or more memory than there is; empty if neither."""
    (needed, there), seconds = run.bytes, sum(run.seconds)
    said = [f"about {needed / 2**30:.1f} GiB of memory, and {there / 2**30:.1f} GiB are here"] * (needed > there)
    said += [f"about {estimate.shown(seconds)}"] * (seconds > DAYS * 24 * 3600)
    return ", and ".join(said)


def _read_at_the_end(run: Prepared) -> list[int]:
    """The length of every text that is read once a run is trained."""
    recipe = run.recipe
    texts = [n for n in run.final_lengths for _ in range(tokens_read(recipe, run.data, [n]) // n)]
    texts += [TOKENS] * (len(run.back) * PASSAGES)
    return texts * (1 + recipe.evaluation.compare)


def _read_meanwhile(run: Prepared) -> list[int]:
    """The length of every held-out text that is read while a run trains."""
    recipe, args = run.recipe, run.args
    every = args.eval_steps if args.eval_strategy.value == "steps" else 0
    times = args.max_steps // math.ceil(every if every >= 1 else every * args.max_steps) if every else 0
    return [n for n in recipe.lengths for _ in range(tokens_read(recipe, run.data, [n]) // n)] * times


def _within_budget(run: Prepared, parameters: int) -> Prepared:
    """A run that measures no more at its end than takes a `SHARE` of the training: first the long text becomes shorter, as
    long as it is longer than the model was trained at, then it goes, and then distances of the probe."""
    args, known = run.args, _trained_length(run.original)
    texts = [run.text]
    while (last := texts[-1]) is not None:
        texts.append(last // 2 if last // 2 > max(known, *run.recipe.final_lengths) else None)
    fewer = [run.back] + [run.back[:: len(run.back) - 1]] * (len(run.back) > 2)  # the nearest and the farthest
    ways = [(run.back, text) for text in texts] + [(back, None) for back in fewer[1:]]
    for back, text in ways:
        less = dataclasses.replace(run, back=back, text=text, shortened=(back, text) != (run.back, run.text))
        windows = _windows(run.recipe, args) * args.max_steps // args.world_size
        what = (parameters, run.start.text_config, windows, _read_at_the_end(less))
        training, measuring = estimate.operations(run.recipe, args, *what)
        if measuring <= SHARE * training:
            break
    return less


def _far(evaluation: Evaluation) -> int:
    """The tokens of the long text that is asked for."""
    return FAR if evaluation.far is None else evaluation.far


def _without_effect(run: Prepared, method: Method) -> str:
    """Warn of a method that changes no training row."""
    recipe, name, unchanged = run.recipe, method.name, method.identity_below
    if unchanged == math.inf or method.slot == "logit_map":
        return f"{name} changes nothing with these settings (strength, decay): nothing is learned of it"
    longer = f"length={2 * int(unchanged)}" if unchanged < sys.maxsize else "a longer length"
    if method.slot == "temperature":  # by the number of keys, which skipped positions do not raise
        clamped = ", or clamp=false, with which it acts on every row" if getattr(method, "clamp", False) else ""
        return (
            f"{name} changes no row that sees up to {unchanged:,.0f} keys, and rows of training see {run.seen:,} at most: "
            f"nothing is learned of it, in longer texts it acts as it is. To train it take {longer}{clamped}"
        )
    skips = recipe.positions == "skip" and recipe.skip.unskipped < 1
    shown = run.reads if skips else run.seen
    other = "a larger skip.target_length" if skips else "or positions=skip, which shows far distances in short windows"
    return (
        f"{name} changes nothing in texts of up to {unchanged:,.0f} tokens, and training shows {shown:,}: nothing is learned "
        f"of it. Take {longer}, {other}"
    )


def _longer_windows(recipe: Recipe, trained: int) -> str:
    """Warn of windows beyond the trained length whose positions skip even farther."""
    target = "" if recipe.skip.target_length else ", and so is what their positions skip to (four times the window)"
    return (
        f"windows of {recipe.length:,} tokens are longer than the {trained:,} that the model was trained at{target}: "
        f"length={trained} trains in windows that it knows"
    )


def _count(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.1f}k"


def _with_target_length(recipe: Recipe, original: Checkpoint) -> Recipe:
    """The recipe with the length that skipped positions show, which its file may leave to the model."""
    if recipe.positions != "skip" or recipe.skip.target_length is not None:
        return recipe
    if (trained := _trained_length(original)) == sys.maxsize:
        raise ValueError("the model's config does not say at what length it was trained: give skip.target_length")
    target_length = 4 * max(trained, recipe.length)
    return dataclasses.replace(recipe, skip=dataclasses.replace(recipe.skip, target_length=target_length))


def _trained_length(checkpoint: Checkpoint) -> int:
    return recorded(checkpoint.text_config, checkpoint.text_config.longattn).length or sys.maxsize


@contextmanager
def _another(prepared: Prepared, trainer: RecipeTrainer, checkpoint: Checkpoint) -> Iterator[None]:
    """While open, what is measured is another checkpoint, in the precision of the trained one."""
    loaded = checkpoint.load(dtype=prepared.recipe.dtype)
    trained, trainer.causal = trainer.causal, loaded.to(trainer.accelerator.device)
    try:
        yield
    finally:
        trainer.causal = trained


def _reach(
    recipe: Recipe, start: Checkpoint, attention: LongAttnConfig | None, reads: int
) -> tuple[int, tuple[Method, ...], int]:
    """Return the length that the model reads after training (0: not asked), its bound methods, and its number of
    parameters."""
    model = start.build(dtype=recipe.dtype)
    parameters = sum(p.numel() for p in model.parameters())
    table = table_entries(model)
    _check_table(recipe, attention, reads, table)
    try:
        bound, facts = bound_config(model, attention or LongAttnConfig())
    except ValueError:
        if attention is not None:
            raise
        return 0, (), parameters  # no method goes into it, and no probe, which jumps over positions
    reaches = max(int(min(reads, bound.reach)) if attention else reads, facts.train_length or 0)
    return min(reaches, start.end or reaches), bound.methods if attention else (), parameters


def _check_table(recipe: Recipe, attention: LongAttnConfig | None, reads: int, table: int | None) -> None:
    """Raise ValueError for what a model with a learned position table (GPT-2) of so many entries does not take."""
    if table is None:
        return
    remap, longest = attention and attention.remap, max(recipe.length, *recipe.lengths, *recipe.final_lengths)
    if longest > table:
        raise ValueError(f"this model learned its positions, in a table of {table:,}: it cannot read {longest:,} tokens")
    wrong = [f"{remap.name} changes rotary distances"] if remap else []
    wrong += ["skipped positions lie beyond it"] if reads > table else []
    if wrong:
        raise ValueError(
            f"this model learned its positions, in a table of {table:,}, and {' and '.join(wrong)}: give "
            "method=infoscale:clamp=false (or null) and positions=plain; the recipe method_lora has both"
        )


def _long_text(recipe: Recipe, data: Data, most: int) -> int | None:
    """Return how much of the held-out text is read in one piece at the end, where the recipe does not say."""
    length = min(most, len(data.held_out))
    asked = recipe.evaluation.final_lengths or data.test_task is not None
    return length if length > max(recipe.final_lengths) and not asked else None


def _names(sources: Any) -> str:
    """Name held-out text for a model card, without folders of this machine."""
    names = sources if isinstance(sources, list) else [sources]
    return ", ".join(Path(name).name if Path(name).exists() or "*" in name else name for name in names)
