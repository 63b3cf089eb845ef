"""The model of a recipe: its method, its adapter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ..config import LongAttnConfig
from ..integration import apply, get_config, rope, update
from ..integration.internals import classes_for
from ..integration.layers import candidates_of
from ..integration.model import no_untrained_warning
from ..slots.registry import did_you_mean
from .recipe import Lora, Recipe

#: Of `lora.targets`: the projections of attention, whatever the model calls them.
ATTENTION = "attention"


def put_method(model: Any, recipe: Recipe, attention: LongAttnConfig | None, reads: int) -> None:
    """Put a method into a model, which then says that it reads the `reads` tokens of training if the method reaches so far."""
    if attention is None:
        return
    if recipe.strength is not None:
        attention = attention.replace(strength=recipe.strength.start)
    with no_untrained_warning():
        now = get_config(apply(model, attention))
        longest = max(int(min(reads, now.reach)), now.extended_to or 0)
        if now.train_length is not None and longest > now.train_length:
            update(model, extended_to=longest)
    if recipe.freeze:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".longattn." in name)
            if parameter.requires_grad:  # in bfloat16 a factor of 1 stays 1 under every step of less than 0.002
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"freeze leaves nothing to train: {attention.name} has no learned parameters with these settings")


def put_adapter(model: Any, lora: Lora, seed: int) -> Any:
    """A PEFT model around it, whose adapter starts as the identity.

    Raises:
        ValueError: a target is the name of no layer of the model; PEFT says nothing where others are.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ImportError('lora needs peft: pip install "hf_longattn[train]"') from None
    targets = [name for target in lora.targets for name in (_projections(model) if target == ATTENTION else [target])]
    config = LoraConfig(
        # by a task PEFT picks the class to load, wrong for a model with pictures; without one it takes the model's own
        task_type="CAUSAL_LM" if type(model) in classes_for(AutoModelForCausalLM, model.config) else None,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # how GPT-2 keeps its weights
        target_modules=targets if targets != ["all-linear"] else "all-linear",
    )
    own = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    absent = {t for t in targets if not any(f".{name}".endswith(f".{t}") for name, _ in model.named_modules())}
    absent -= {"all-linear"}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers
        try:
            wrapped = get_peft_model(model, config)
        except ValueError:
            if not absent:
                raise
        else:
            absent &= set(wrapped.peft_config["default"].target_modules)  # PEFT translates names of older models
        if absent:
            names = sorted({name.rpartition(".")[2] for name in own})
            hint = did_you_mean(first := min(absent), names)
            raise ValueError(f"lora.targets: the model has no {first!r}; {hint}it has {', '.join(names)}") from None
        return wrapped


def _projections(model: Any) -> list[str]:
    """Return the names of attention's linear layers, with their module where others have a layer of that name.

    Raises:
        ValueError: the model shows no attention that a method goes into.
    """
    linear = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) or hasattr(m, "in_features")]
    around = tuple(f"{layer.name}." for layer in candidates_of(model))
    if not (own := [name for name in linear if name.startswith(around)]):
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ValueError(f"lora.targets: this model shows no attention of its own; name layers of it: {names}")
    others = {name.rpartition(".")[2] for name in linear if not name.startswith(around)}
    named = [name.split(".") for name in own]
    return sorted({".".join(parts[-2:]) if parts[-1] in others else parts[-1] for parts in named})


@contextmanager
def unadapted(wrapped: Any, original: Any) -> Iterator[None]:
    """While open, a PEFT model is the model it was made from: no adapter, no method, the rotary encoding of `original`."""
    model = wrapped.get_base_model()
    with wrapped.disable_adapter():
        settings = rope.settings_of(original)
        if settings is None or settings == rope.settings_of(model):  # an adapter that records its method saw to it
            yield
            return
        tables = rope.exchange(model, rope.build(model, settings))
        try:
            yield
        finally:
            rope.exchange(model, tables)
