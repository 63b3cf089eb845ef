"""transformers' Trainer with what the recipes need: loss by position, evaluation by length, a strength schedule."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.utils import is_liger_kernel_available

from ..core.tracing import wide_device
from ..evaluation.rows import Row
from ..integration import update
from ..integration.engines.ulysses import split_sequence, unsplit
from .data import Data, collated
from .held_out import Tick, held_out_sums, metrics, texts_read
from .loss import PARTS
from .reach import probed
from .recipe import Recipe, Strength

T = TypeVar("T")


def arguments(recipe: Recipe) -> TrainingArguments:
    """The recipe's TrainingArguments; ValueError where transformers refuses them, or where they report to what is not here."""
    settings: dict[str, Any] = {"report_to": "none", "remove_unused_columns": False, "label_names": ["labels"]}
    settings |= {"dataloader_pin_memory": torch.cuda.is_available()}
    if (schedule := recipe.schedule) is not None:
        steps = recipe.trainer["max_steps"]
        warmup, cooldown = round(schedule.warmup * steps), round(schedule.cooldown * steps)
        shape = {"num_decay_steps": cooldown, "decay_type": "linear"}
        settings |= {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": warmup, "lr_scheduler_kwargs": shape}
    args = TrainingArguments(output_dir=recipe.output, **settings | recipe.trainer)
    count = recipe.sequence_parallel
    if args.world_size % count:
        raise ValueError(f"sequence_parallel is {count}, which does not divide the number of processes, {args.world_size}")
    _check_reports(args.report_to)
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError("trainer.use_liger_kernel needs liger-kernel, which is not installed here: leave it out")
    if args.dataloader_persistent_workers and not args.dataloader_num_workers:
        raise ValueError("trainer.dataloader_persistent_workers keeps workers: give trainer.dataloader_num_workers too")
    if args.fp16 and args.device.type == "cpu":
        raise ValueError("trainer.fp16 does nothing on a CPU: leave it out, or take trainer.bf16")
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise ValueError(f"trainer.optim={getattr(args.optim, 'value', args.optim)}: {error}") from error
    return args


def _check_reports(names: list[str]) -> None:
    """Raise ValueError for a logger that is unknown or not installed, which Trainer would find out after loading the model."""
    get_reporting_integration_callbacks(names)
    missing = sorted({*names} - {*get_available_reporting_integrations(), "flyte"})  # flyte is never listed
    if missing:
        raise ValueError(f"trainer.report_to={missing[0]}, which is not installed here: install it, or leave report_to out")


class RecipeTrainer(Trainer):
    """Computes the loss that its model's forward gives (see `loss.CausalLoss`) and logs it by position.

    Args:
        causal: the causal language model inside `model`.
        optimizer: in place of the Trainer's own.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        model: Any,
        causal: Any,
        args: TrainingArguments,
        tokenizer: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.part = args.process_index % recipe.sequence_parallel, recipe.sequence_parallel  # of its windows, and of how many
        super().__init__(
            model,
            args,
            train_dataset=data.train,
            eval_dataset=data.train,  # never read: `evaluate` has the held-out text
            data_collator=partial(collated, *self.part),  # a tokenizer's adds a mask: packed documents would see each other
            processing_class=tokenizer,
            optimizers=(optimizer, None),
            callbacks=[] if recipe.strength is None else [StrengthSchedule(recipe.strength)],
        )
        self.model_accepts_loss_kwargs = True  # the loss is per token of the whole accumulated batch
        self.recipe, self.data, self.causal = recipe, data, causal
        self.seen: torch.Tensor | None = None
        if self.part[1] > 1:
            split_sequence(causal, torch.distributed.new_subgroups(self.part[1])[0])

    def get_train_dataloader(self) -> Any:
        """Processes that share windows get the same ones."""
        loader = super().get_train_dataloader()
        if self.part[1] > 1:
            shard: Any = loader.batch_sampler
            shard.num_processes //= self.part[1]
            shard.process_index //= self.part[1]
        return loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train nothing where a run was killed after its last step; Trainer itself would take a step first."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        sums = torch.stack([outputs["cross_entropy"], outputs["divergence"], outputs["tokens"]]).detach()
        self.seen = sums if self.seen is None else self.seen + sums
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.seen is not None:
            entropy, divergence, tokens = self.accelerator.reduce(self.seen, "sum")
            self.seen = None
            length = self.recipe.length
            for i in range(PARTS if self.data.test_task is None else 0):
                if tokens[i]:  # where only answers count there may be none
                    logs[f"loss_{i * length // PARTS}_{(i + 1) * length // PARTS}"] = float(entropy[i] / tokens[i])
            if self.recipe.distill is not None:
                logs["cross_entropy"] = float(entropy.sum() / tokens.sum())
                logs["divergence"] = float(divergence.sum() / tokens.sum())
        super().log(logs, start_time)

    def reading(self, what: str, tokens: int, leave: bool = True) -> Any:
        """A progress bar of so many tokens, shown by the first process unless disable_tqdm says otherwise."""
        quiet = self.args.disable_tqdm or not self.is_world_process_zero()
        return tqdm(total=tokens, desc=what, unit=" tokens", leave=leave, disable=quiet)

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Held-out loss (and needle accuracy) at every length of the recipe; `eval_loss` is that at the training length."""
        total = sum(texts_read(self.recipe, self.data, self.recipe.lengths))
        with self.reading("Held-out text", total, leave=False) as bar:
            result = self.held_out_metrics(self.recipe.lengths, bar.update)
        out = {f"{metric_key_prefix}_{k}_{n}": m[k] for n, m in result.items() for k in ("loss", "accuracy") if k in m}
        at = self.recipe.length if self.recipe.length in result else min(result)
        out[f"{metric_key_prefix}_loss"] = result[at]["loss"]
        self.log(out)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, out)
        self.model.train()
        return out

    def held_out_metrics(self, lengths: list[int], tick: Tick = lambda tokens: None) -> dict[int, dict[str, Any]]:
        share = (self.accelerator.process_index, self.accelerator.num_processes)
        sums = self._on_whole(held_out_sums, self.causal, self.recipe, self.data, lengths, share, tick)
        device = self.accelerator.device
        wide = torch.float64 if wide_device(device) == device else torch.float32
        sums = {n: self.accelerator.reduce(s.to(device, wide), "sum").cpu() for n, s in sums.items()}
        return metrics(sums, self.data.test_task is not None)

    def probed(self, back: Sequence[int], tick: Tick) -> list[Row]:
        """See `reach.probed`; every process does all of it."""
        return self._on_whole(probed, self.causal, self.data, back, tick)

    def _on_whole(self, function: Callable[..., T], *arguments: Any) -> T:
        """Compute as one call of the model where weights are sharded (trainer.fsdp): the call gathers them."""
        with unsplit(self.causal):
            if not isinstance(self.model, FSDPModule):
                return function(*arguments)
            model: Any = self.model
            model.longattn_held_out = function
            register_fsdp_forward_method(model, "longattn_held_out")
            result: T = model.longattn_held_out(*arguments)
            return result

    def whole(self) -> dict[str, Any] | None:
        """The weights to save in the first process, where the model's own are sharded (trainer.fsdp); all processes ask."""
        return self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else None


class StopAtStep(TrainerCallback):  # type: ignore[misc]
    """Ends training after the step in which it is told to, with a checkpoint and a log of what is not logged yet."""

    requested = stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.requested:
            self.stopped = True
            control.should_log = control.should_save = control.should_training_stop = True


@contextmanager
def interruptible(trainer: Trainer) -> Iterator[None]:
    """While open, a first SIGINT finishes the step and saves a checkpoint before it is a KeyboardInterrupt.

    A second one is a KeyboardInterrupt at once; of several processes, which would stop at different steps, so is the first.
    """
    if trainer.args.world_size > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = StopAtStep()
    trainer.add_callback(stop)

    def first(number: int, frame: Any) -> None:
        stop.requested = True
        signal.signal(number, before)
        print(
            "\nInterrupted: first this step ends, then a checkpoint is saved. Ctrl-C again stops at once, without saving.",
            file=sys.stderr,
        )

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        trainer.remove_callback(stop)
    if stop.stopped:
        raise KeyboardInterrupt


@dataclasses.dataclass
class StrengthSchedule(TrainerCallback):  # type: ignore[misc]
    """Sets the method's strength before every step, from the step alone: a resumed run does the same."""

    schedules: ClassVar = ("strength",)
    strength: Strength
    _now: float | None = dataclasses.field(default=None, init=False)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        span = self.strength.share * state.max_steps
        done = min(state.global_step / span, 1.0) if span else 1.0
        self._set(model, self.strength.start + (self.strength.end - self.strength.start) * done)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._set(model, self.strength.end)

    def _set(self, model: Any, value: float) -> None:
        if value != self._now:
            update(model, strength=value)
            self._now = value
