"""Preflight: everything that can be wrong with a setting on a model, found on configs before weights are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..config import LongAttnConfig
from ..files import ADAPTER_FILE, RECIPE_FILE
from ..integration import apply
from ..integration.layer_methods import facts_for
from ..integration.layers import View
from ..integration.model import running
from ..integration.saved_method import method_in, saved_in
from ..slots.method import ModelFacts
from ..user_warnings import warn
from .checkpoints import Checkpoint
from .loading import filled, joined
from .settings import Setting


def check_setting(setting: Setting, checkpoint: Checkpoint, head: bool = True) -> ModelFacts:
    """Everything that can be wrong with a setting on a checkpoint, found on its config alone, before any weights are read.

    Args:
        head: whether losses or answers will be measured, which takes a language-model head.

    Returns:
        What the methods know about the model; `train_length` among it.

    Raises:
        ValueError: the method does not fit the model, or clashes with its position encoding.

    Warns of an adapter that no word about attention comes with.
    """
    asked = checkpoint.under(setting)
    _check_remapped(setting, asked)
    asked.check_reads(head)
    try:
        empty = asked.build()
        own = running(empty)
        if (method := setting.config) is not None:
            apply(empty, joined(method, setting, checkpoint, own))
        elif (method := _adapters_method(setting, own)) is not None:
            apply(empty, filled(method, own))
        known = method or own
        told = setting.train_length or (None if known is None else known.train_length)
        facts = facts_for(View(empty), LongAttnConfig(train_length=told))
        if told is None or setting.train_length or known is None or not known.train_length_source:
            return facts
        # as it was told or read when that method came
        return dataclasses.replace(facts, train_length_source=known.train_length_source)
    except (ValueError, RuntimeError, KeyError) as error:  # the latter two of PEFT: other shapes, no such kind of adapter
        raise ValueError(f"setting {setting.name!r}: {error}") from None


def _check_remapped(setting: Setting, asked: Checkpoint) -> None:
    """Raise ValueError if a setting changes the rotation of a checkpoint whose own method goes on remapping it."""
    if setting.rope is None or (setting.config is not None and setting.config.remap is not None):
        return
    if asked.method is not None and (remap := asked.method.remap) is not None and not remap.stack:
        raise ValueError(
            f"setting {setting.name!r}: the checkpoint runs {remap.name}, which remaps the rotation that it was trained with, "
            f"and {setting.rope} changes that rotation. Take the method out first, by hf_longattn.remove(model) and "
            "hf_longattn.save(model, folder), or give the model that it was put into"
        )


def _trained_as_a_control(folder: Path) -> bool:
    """Tell whether a recipe beside an adapter says that it was trained without a method."""
    if not (file := folder / RECIPE_FILE).is_file():
        return False
    import yaml

    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    return isinstance(recipe, dict) and recipe.get("method", "") is None


def _adapters_method(setting: Setting, own: LongAttnConfig | None) -> LongAttnConfig | None:
    """The method that an adapter's folder records, if any, for a checkpoint that runs `own`."""
    if setting.adapter is None:
        return None
    if (method := method_in(saved_in(Path(setting.adapter) / ADAPTER_FILE))) is not None:
        return method
    if own is None and not _trained_as_a_control(Path(setting.adapter)):
        warn(
            f"setting {setting.name!r}: the adapter in {setting.adapter} records no attention, so it is measured without "
            "a method. If it was trained under one, name that in its entry of a settings file (method: ...)",
        )
    return None
