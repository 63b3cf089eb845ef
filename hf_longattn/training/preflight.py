"""Preflight of a run: what cannot work is refused before weights are read, and what it will take is estimated."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..checks import check_output
from ..config import NO_METHOD, LongAttnConfig
from ..core.kernels.precision import auto_dtype
from ..evaluation.checkpoints import Checkpoint, load_tokenizer
from ..evaluation.measures.probe import TOKENS
from ..evaluation.settings import Setting
from ..integration.engines.ulysses import check_heads
from ..integration.layer_methods import facts_for
from ..integration.layers import View
from ..integration.trained_length import recorded
from ..slots.method import Method
from . import estimate
from .data import Data
from .held_out import texts_read
from .models import put_adapter, put_method
from .reach import BEFORE, PASSAGES, PROBED, distances
from .recipe import Evaluation, Recipe, Skip
from .run_folder import refuse_beside_another, resumed_from
from .trainer import arguments

#: Where the recipe does not say: tokens of the long text at the end, and the share of the training's time for measuring.
FAR, SHARE = 16384, 1 / 3


@dataclass
class Prepared:
    """Everything a run needs but its weights; made by `prepare`, which refuses what cannot work.

    Args:
        start: the model before training, with the recipe's position encoding; `original` has its own.
        empty: the model before training, without weights; `built` puts method and adapter into it.
        reads: the longest text that the model sees in training, jumps of positions counted.
        methods: what the slots hold, with what the model fills in.
        qk_norm: whether the model normalises its queries and keys.
        back: from how far back copies are probed at the end.
        unprobed: why none are, where the recipe asks for it; else empty.
        text: the length of the long text that is read at the end, or None.
        shortened: whether less is measured than could be, so that it takes no longer than a share of the training.
    """

    recipe: Recipe
    checkpoint: str | None
    tokenizer: Any
    data: Data
    start: Checkpoint
    original: Checkpoint
    empty: Any
    args: TrainingArguments
    reads: int
    methods: tuple[Method, ...]
    qk_norm: bool
    back: tuple[int, ...]
    unprobed: str
    text: int | None
    resume: bool
    shortened: bool = False

    @property
    def output(self) -> Path:
        """The folder that the run writes to."""
        return Path(str(self.recipe.output))

    @functools.cached_property
    def attention(self) -> LongAttnConfig | None:
        """The recipe's method."""
        return self.recipe.setting.config

    @functools.cached_property
    def built(self) -> tuple[Any, int, int]:
        """The model without weights, under its method and in its adapter; its parameters, and those that are trained."""
        model = self.empty
        put_method(model, self.recipe, self.attention, self.reads)
        parameters = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if self.recipe.lora is not None:
            trained = put_adapter(model, self.recipe.lora, self.recipe.seed).get_nb_trainable_parameters()[0]
        return model, parameters, trained

    @functools.cached_property
    def seconds(self) -> tuple[float, float]:
        """Estimated seconds of training, and of measuring at the end."""
        work = self.operations(self.built[1])
        return estimate.duration(self.recipe, self.args, self.start.text_config, work)

    def operations(self, parameters: int) -> tuple[float, float]:
        """Floating-point operations of training, and of measuring at the end."""
        windows = self.windows * self.args.max_steps // self.args.world_size
        read = (self.read_at_the_end, self.read_meanwhile)
        return estimate.operations(self.recipe, self.args, parameters, self.start.text_config, windows, *read)

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

    @property
    def windows(self) -> int:
        """Windows that a step takes from all processes."""
        args, processes = self.args, self.args.world_size // self.recipe.sequence_parallel
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * processes)

    @property
    def trained_length(self) -> int:
        """The length that the model was trained at; `sys.maxsize` where its config does not say."""
        return _trained_length(self.original)

    @property
    def read_at_the_end(self) -> list[int]:
        """The length of every text that is read once the model is trained."""
        texts = texts_read(self.recipe, self.data, self.final_lengths) + [TOKENS] * (len(self.back) * PASSAGES)
        return texts * self.compared

    @property
    def compared(self) -> int:
        """How many models read these: the trained one; to compare, its base, and that under the method."""
        return 1 + self.recipe.evaluation.compare * (1 + (self.attention is not None))

    @functools.cached_property
    def yarn(self) -> tuple[str, Checkpoint | None, str]:
        """The base with YaRN for the recipe's longest length, to compare where that is beyond the trained one: what it is
        called, it or None, and why the model takes none.
        """
        factor = max(self.recipe.final_lengths) / self.trained_length
        name = f"{BEFORE} + YaRN x{factor:g}"
        if (
            factor <= 1
            or not self.recipe.evaluation.compare
            or not getattr(self.original.text_config, "rope_parameters", None)
        ):
            return name, None, ""
        try:
            return name, self.original.under(Setting(name, rope=f"yarn:{factor}")), ""
        except ValueError as error:  # it is scaled already, or remapped
            return name, None, str(error)

    @property
    def read_meanwhile(self) -> list[int]:
        """The length of every held-out text that is read while the model trains."""
        recipe, args = self.recipe, self.args
        every = args.eval_steps if args.eval_strategy.value == "steps" else 0
        times = args.max_steps // math.ceil(every if every >= 1 else every * args.max_steps) if every else 0
        return texts_read(recipe, self.data, recipe.lengths) * times


def prepare(recipe: Recipe, *, resume: bool = False) -> Prepared:
    """Check a recipe against its files, its output directory and its model's config; no weights are read.

    Raises:
        ValueError: something is missing, too short, in the way or contradictory.
        OSError: a file or a model cannot be read.
    """
    args = arguments(recipe)
    if recipe.dtype == "auto":
        recipe = replace(recipe, dtype=auto_dtype(args.device))
    output = Path(str(recipe.output))
    refuse_beside_another(output)
    checkpoint, began = resumed_from(recipe, output, resume)
    check_output(output)
    original = Checkpoint(str(recipe.model))
    tokenizer = load_tokenizer(recipe.tokenizer or original.model)
    original.check_reads()
    start = original.under(recipe.setting)
    empty = start.build(dtype=recipe.dtype)
    skip = _skip(recipe, _trained_length(original))
    reads = (skip and skip.target_length) or recipe.length
    _check_model(recipe, original, reads)
    reaches, methods, qk_norm = _reach(recipe, start, empty, reads)
    held_out = min(reaches, _far(began.evaluation))
    data = Data(recipe, tokenizer, skip, began, max(held_out, PROBED) if held_out else 0)
    original.check_tokens(data.held_out)
    back, unprobed = distances(reaches, len(data.held_out)) if _far(recipe.evaluation) else ((), "")
    run = Prepared(
        recipe=recipe,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        data=data,
        start=start,
        original=original,
        empty=empty,
        args=args,
        reads=reads,
        methods=methods,
        qk_norm=qk_norm,
        back=back,
        unprobed=unprobed,
        text=_long_text(recipe, data, min(reaches, _far(recipe.evaluation))),
        resume=resume,
    )
    return run if recipe.evaluation.far is not None else _within_budget(run)


def _skip(recipe: Recipe, trained: int) -> Skip | None:
    """How positions jump, with the length that they show, which a recipe may leave to the model; None: they do not jump."""
    if recipe.positions != "skip":
        return None
    if recipe.skip.target_length is not None:
        return recipe.skip
    if trained == sys.maxsize:
        raise ValueError("the model's config does not say at what length it was trained: give skip.target_length")
    return replace(recipe.skip, target_length=4 * max(trained, recipe.length))


def _trained_length(checkpoint: Checkpoint) -> int:
    return recorded(checkpoint.text_config, checkpoint.text_config.longattn).length or sys.maxsize


def _check_model(recipe: Recipe, original: Checkpoint, reads: int) -> None:
    """Raise ValueError for windows, positions or processes that the model does not take."""
    if original.end is not None:
        _check_table(recipe, reads, original.end)
    if recipe.distill is not None and recipe.length > (trained := _trained_length(original)):
        raise ValueError(
            f"the teacher was trained at {trained} tokens; windows of {recipe.length} are beyond it: lower length"
        )
    if recipe.sequence_parallel > 1:
        heads = original.text_config.num_attention_heads
        check_heads(heads, getattr(original.text_config, "num_key_value_heads", None) or heads, recipe.sequence_parallel)


def _check_table(recipe: Recipe, reads: int, table: int) -> None:
    """Raise ValueError for what a model with a position table (GPT-2, GPT-J) of so many entries does not take."""
    if recipe.longest > table:
        raise ValueError(f"this model takes its positions from a table of {table:,}: it cannot read {recipe.longest:,} tokens")
    remap = (attention := recipe.setting.config) and attention.remap
    wrong = [f"{remap.name} changes rotary distances"] if remap else []
    wrong += ["skipped positions lie beyond it"] if reads > table else []
    if wrong:
        raise ValueError(
            f"this model takes its positions from a table of {table:,}, and {' and '.join(wrong)}: give "
            "method=infoscale:clamp=false (or null) and positions=plain; the recipe method_lora has both"
        )


def _reach(recipe: Recipe, start: Checkpoint, empty: Any, reads: int) -> tuple[int, tuple[Method, ...], bool]:
    """Return the length that the model reads after training (0: not asked), its bound methods, and whether it has QK-norm."""
    attention = recipe.setting.config
    try:
        facts = facts_for(View(empty), attention or NO_METHOD)
        bound = attention.bind(facts) if attention else None
    except ValueError:
        if attention is not None:
            raise
        return 0, (), False  # no method goes into it, and no probe, which jumps over positions
    reaches = max(int(min(reads, bound.reach)) if bound else reads, facts.train_length or 0)
    return min(reaches, start.end or reaches), bound.methods if bound else (), facts.qk_norm


def _long_text(recipe: Recipe, data: Data, most: int) -> int | None:
    """Return how much of the held-out text is read in one piece at the end, where the recipe does not say."""
    length = min(most, len(data.held_out))
    asked = recipe.evaluation.final_lengths or data.test_task is not None
    return length if length > max(recipe.final_lengths) and not asked else None


def _far(evaluation: Evaluation) -> int:
    """The tokens of the long text that is asked for."""
    return FAR if evaluation.far is None else evaluation.far


def _within_budget(run: Prepared) -> Prepared:
    """A run that measures no more at its end than takes a `SHARE` of the training: first the long text becomes shorter, as
    long as it is longer than the model was trained at, then it goes, and then distances of the probe."""
    texts, parameters = [run.text], sum(p.numel() for p in run.empty.parameters())
    while (last := texts[-1]) is not None:
        texts.append(last // 2 if last // 2 > max(run.trained_length, *run.recipe.final_lengths) else None)
    ways = [(run.back, text) for text in texts]
    if len(run.back) > 2:
        ways.append(((run.back[0], run.back[-1]), None))  # the nearest and the farthest
    for back, text in ways:
        less = replace(run, back=back, text=text, shortened=(back, text) != (run.back, run.text))
        training, measuring = less.operations(parameters)
        if measuring <= SHARE * training:
            break
    return less
