"""The plan of a run in lines that a user reads before it begins."""

from __future__ import annotations

import math
import shlex
import sys
from typing import Any

from transformers import TrainingArguments

from ..core.kernels.precision import multiplies_fast
from ..integration import describe
from ..slots.method import Method
from . import estimate
from .preflight import FAR, Prepared
from .recipe import Recipe

#: A run that takes longer is asked about first.
DAYS = 2
#: A plan says so if each window is read more often than this.
OFTEN = 10


def plan(run: Prepared) -> str:
    """Describe a run in lines: model, changed layers, tokens, memory, steps. Builds the model without weights."""
    recipe, args = run.recipe, run.args
    model, parameters, trained = run.built
    described = describe(model)
    changed = [row for row in described.rows if row[1] != "unchanged"]
    layers = f"{len(changed)} of {len(described.rows)} attention layers"
    rows = run.windows
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
    if run.resume and run.checkpoint is None:
        left = ", and removes what is left of others" * any(run.output.glob("checkpoint-*"))
        lines.append(("note", f"{run.output} holds no whole checkpoint: this run begins at step 0{left}"))
    kept = len(run.data.held_out)
    if run.resume and run.data.test_task is None and recipe.evaluation.tokens > kept:
        lines.append(("note", f"what is held out stays as the run began, {kept:,} tokens: evaluation.tokens reads no more"))
    name, _, why = run.yarn
    lines += [("note", f"{name} is not compared: {why}")] * bool(why)
    lines += [("note", _without_effect(run, method)) for method in run.idle]
    if run.qk_norm and {"rerope", "infoscale"} <= {m.name for m in run.methods}:
        lines.append(("note", "this model has QK-norm, and such models retrieve better under method=rerope+logn"))
    if not recipe.hub.streaming and (often := rows * args.max_steps / max(1, len(run.data.train))) > OFTEN:  # type: ignore[arg-type]
        lines.append(("note", f"each window is read {often:.0f} times: give more text, or fewer steps (trainer.max_steps)"))
    if recipe.positions == "skip" and recipe.length > run.trained_length:
        lines.append(("note", _longer_windows(recipe, run.trained_length)))
    return "\n".join(f"{name:<11}{value}" for name, value in lines)


def excess(run: Prepared) -> str:
    """Say what a run takes that is hardly meant: more than `DAYS`, or more memory than there is; empty if neither."""
    (needed, there), seconds = run.bytes, sum(run.seconds)
    said = [f"about {needed / 2**30:.1f} GiB of memory, and {there / 2**30:.1f} GiB are here"] * (needed > there)
    said += [f"about {estimate.shown(seconds)}"] * (seconds > DAYS * 24 * 3600)
    return ", and ".join(said)


def _precision(recipe: Recipe, args: TrainingArguments) -> str:
    """Describe the dtypes of weights and products, and say whether the device is slow at them."""
    used = "bfloat16" if args.bf16 else "float16" if args.fp16 else recipe.dtype
    message = f"weights in {recipe.dtype}, multiplied in {used}"
    slow = not multiplies_fast(used, args.device)
    return message + (f", which this {args.device.type.upper()} does slowly: float32 is faster" if slow else "")


def _reading(run: Prepared) -> str:
    if not run.back:
        return f"; {run.unprobed}" if run.unprobed else ""
    models = (
        "the trained model",
        "the trained model and its base",
        "the trained model and its base with and without the method",
    )
    less = f"shortened to follow the training's time; evaluation.far={FAR} measures all, " if run.shortened else ""
    return f"; copies from up to {run.back[-1]:,} tokens back, of {models[run.compared - 1]} ({less}evaluation.far=0 none)"


def _time(run: Prepared) -> str:
    training, measuring = run.seconds
    return (
        f"about {estimate.shown(training)} of training and {estimate.shown(measuring)} of measuring at the end (an estimate "
        f"from how fast this {run.args.device.type.upper()} multiplies)"
    )


def _without_effect(run: Prepared, method: Method) -> str:
    """Warn of a method that changes no training row."""
    recipe, name, unchanged = run.recipe, method.name, method.identity_below
    if unchanged == math.inf or method.slot == "logit_map":
        return f"{name} changes nothing with these settings (strength, decay): nothing is learned of it"
    skips, seen = recipe.positions == "skip" and recipe.skip.unskipped < 1, run.seen
    other = ", or positions=skip, which shows far distances in short windows"
    if method.slot == "temperature":  # by the number of keys, which skipped positions do not raise
        other = f", or {_unclamped(recipe.method)}, which acts on every row" if getattr(method, "clamp", False) else ""
    elif skips:
        seen, other = run.reads, ", or a larger skip.target_length"
    longer = f"length={2 * int(unchanged)}" if unchanged < sys.maxsize else "a longer length"
    return (
        f"{name} does nothing up to {unchanged:,.0f} tokens, and training shows {seen:,}, so that training does not touch it. "
        f"It still acts in longer texts. To train it: {longer}{other}"
    )


def _unclamped(method: Any) -> str:
    """What to type for the recipe's method without its clamp."""
    if not isinstance(method, str):
        return "method.temperature.clamp=false"
    names, at, rope = method.partition("@")
    kept = [part for part in names.split(":") if not part.strip().startswith("clamp=")]
    return shlex.quote(f"method={':'.join([*kept, 'clamp=false'])}{at}{rope}")


def _longer_windows(recipe: Recipe, trained: int) -> str:
    """Warn of windows beyond the trained length whose positions skip even farther."""
    target = "" if recipe.skip.target_length else ", and so is what their positions skip to (four times the window)"
    return (
        f"windows of {recipe.length:,} tokens are longer than the {trained:,} that the model was trained at{target}: "
        f"length={trained} trains in windows that it knows"
    )


def _count(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.1f}k"
