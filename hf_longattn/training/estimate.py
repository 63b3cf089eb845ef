"""Estimates of a run before weights are read: memory beside what there is, and time by the speed of the device."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from transformers import TrainingArguments

from ..integration.model_facts import inner_size
from .loss import CHUNK
from .recipe import Recipe

#: The share of its speed in one matrix product that a device reaches in a run: measured with SmolLM2-135M on one CPU core.
EFFICIENCY = 0.6


def memory(recipe: Recipe, args: TrainingArguments, parameters: int, trained: int, text: Any) -> float:
    """Bytes: weights, gradients and optimiser states of what is trained, activations kept for the backward pass, logits.

    Args:
        parameters, trained: numbers of weights.
        text: the model's text config.
    """
    width = torch.finfo(getattr(torch, recipe.dtype)).bits // 8
    activation = 2 if args.bf16 or args.fp16 else width
    tokens = args.per_device_train_batch_size * recipe.length // recipe.sequence_parallel
    if args.fsdp:
        parameters, trained = parameters // args.world_size, trained // args.world_size
    hidden, inner = text.hidden_size, inner_size(text)
    per_layer = hidden if args.gradient_checkpointing else 12 * hidden + 4 * inner
    logits = 3 * min(CHUNK, recipe.length) * args.per_device_train_batch_size * text.vocab_size * 4
    return (
        parameters * width
        + trained * (width + 8)
        + tokens * text.num_hidden_layers * per_layer * activation
        + logits * (2 if recipe.distill else 1)
    )


def machine(device: torch.device) -> float:
    """Bytes that a process may take: of its GPU, or its share of this machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return float(psutil.virtual_memory().total) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def way_out(recipe: Recipe, args: TrainingArguments, parameters: int, trained: int, text: Any, least: float) -> str:
    """Return overrides with which a run takes less than `least` bytes."""
    args = copy.copy(args)
    batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    while batch > 1:
        batch, steps = math.ceil(batch / 2), steps * 2
        args.per_device_train_batch_size = batch
        if (needed := memory(recipe, args, parameters, trained, text)) < least:
            same = f"trainer.per_device_train_batch_size={batch} trainer.gradient_accumulation_steps={steps}"
            return f"{same} makes the same steps in about {needed / 2**30:.1f} GiB"
    return "trainer.activation_checkpointing=true (gradient_checkpointing in older releases), or a smaller length, needs less"


def duration(recipe: Recipe, args: TrainingArguments, text: Any, work: tuple[float, float]) -> tuple[float, float]:
    """Seconds of training and of measuring at the end, for the `operations` of both."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else getattr(torch, recipe.dtype)
    speed = EFFICIENCY * _speed(args.device, dtype, text.hidden_size, inner_size(text))
    training, measuring = work
    return training / speed, measuring / speed


def operations(
    recipe: Recipe,
    args: TrainingArguments,
    parameters: int,
    text: Any,
    windows: int,
    measured: Sequence[int],
    evaluated: Sequence[int] = (),
) -> tuple[float, float]:
    """Floating-point operations of training and of measuring at the end.

    Args:
        windows: how many of them a process trains on.
        measured: the lengths, in tokens, of the texts that are read at the end.
        evaluated: the lengths of those that are read while it trains.
    """
    apart = 0 if getattr(text, "tie_word_embeddings", False) else text.vocab_size * text.hidden_size  # is only looked up
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    def forward(length: int) -> tuple[float, float]:
        """Operations of a text: with weights, and of attention."""
        return 2.0 * (parameters - apart) * length, 2.0 * text.num_hidden_layers * width * length**2

    weights, attention = forward(recipe.length)
    again = 1 if args.gradient_checkpointing else 0
    passes = (2 if recipe.lora is not None or recipe.freeze else 3) + again + (1 if recipe.distill else 0)
    training = windows * (passes * weights + (passes + 1.5) * attention)
    return training + sum(map(sum, map(forward, evaluated))), sum(map(sum, map(forward, measured)))


@functools.cache
def _speed(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> float:
    """Operations a second in a product of a model's sizes, measured once in a process."""
    left = torch.ones(128, hidden, device=device, dtype=dtype)
    right = torch.ones(hidden, inner, device=device, dtype=dtype)
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.3:
        start = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return 2.0 * left.shape[0] * right.numel() / min(times)  # the others prepare, or share the device with other work


def shown(seconds: float) -> str:
    """A duration for people."""
    minutes = seconds / 60
    return (
        f"{minutes / 60:,.1f} h" if minutes >= 90 else f"{minutes:.0f} min" if minutes >= 1.5 else f"{max(seconds, 1):.0f} s"
    )
