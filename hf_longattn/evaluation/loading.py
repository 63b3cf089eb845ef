"""Models under settings: built without weights, to find what is wrong; or loaded, adapter merged, method applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checks import Refused
from ..config import LongAttnConfig
from ..files import RECIPE_FILE
from ..integration import apply
from ..integration.layer_methods import facts_for
from ..integration.layers import View
from ..integration.model import no_untrained_warning, running
from ..scoped_method import AsItWas
from ..slots.method import SLOTS, ModelFacts
from ..user_warnings import warn
from .checkpoints import Checkpoint
from .settings import UNMODIFIED, Setting


def check_setting(setting: Setting, checkpoint: Checkpoint, head: bool = True) -> ModelFacts:
    """Check a setting on a checkpoint by its config alone, before any weights are read.

    Args:
        head: whether losses or answers will be measured, which takes a language-model head.

    Returns:
        The facts that methods know about the model, `train_length` among them.

    Raises:
        ValueError: the setting cannot be read, or its method does not fit the model or its position encoding.

    Warns of an adapter that records no attention.
    """
    asked = checkpoint.under(setting)
    asked.check_reads(head)
    try:
        empty = empty_under(setting, checkpoint)
        runs = running(empty)
        if setting.adapter is not None and runs is None and not _trained_as_a_control(Path(setting.adapter)):
            warn(
                f"setting {setting.name!r}: the adapter in {setting.adapter} records no attention, so it is measured without "
                "a method. If it was trained under one, name that in its entry of a settings file (method: ...)",
            )
        length, source = (None, "") if runs is None else (runs.train_length, runs.train_length_source)
        facts = facts_for(View(empty), LongAttnConfig(train_length=setting.train_length or length))
        # as it was told or read when the method that runs came
        return dataclasses.replace(facts, train_length_source=source) if source and not setting.train_length else facts
    except (ValueError, RuntimeError, KeyError) as error:  # the latter two of PEFT: other shapes, no such kind of adapter
        raise ValueError(f"setting {setting.name!r}: {error}") from None


def empty_under(setting: Setting, checkpoint: Checkpoint) -> Any:
    """A setting's model without weights, as it is read: its method applied."""
    empty = checkpoint.under(setting).build()
    if setting.config is not None:
        _put(setting.config, empty, setting, checkpoint)
    return empty


def _put(method: LongAttnConfig, model: Any, setting: Setting, checkpoint: Checkpoint) -> None:
    """Put a setting's method into its model. Slots that it leaves free keep what the checkpoint itself runs there; a method
    that an adapter brought goes as a whole.
    """
    own = running(model)
    if setting.adapter is not None:
        own = (checkpoint if setting.model is None else Checkpoint(setting.model)).method
    apply(model, filled(method, own))


def _trained_as_a_control(folder: Path) -> bool:
    """Tell whether a recipe beside an adapter says that it was trained without a method."""
    if not (file := folder / RECIPE_FILE).is_file():
        return False
    import yaml

    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    return isinstance(recipe, dict) and recipe.get("method", "") is None


def load_setting(
    setting: Setting,
    checkpoint: Checkpoint,
    dtype: str = "auto",
    device: str = "cpu",
    calibrated: Callable[[Any, LongAttnConfig], LongAttnConfig] | None = None,
) -> Any:
    """A model under a setting, for inference: weights loaded, rope edited, adapter merged, method applied.

    Args:
        dtype: see `Checkpoint.precision`.
        calibrated: from the loaded model and the setting's method to the one that is applied; None for the method itself.
    """
    asked = checkpoint.under(setting)
    loaded = asked.load(dtype=asked.precision(dtype, device))
    if setting.adapter is not None:
        loaded = _merged(loaded, setting.adapter)
    if setting.config is not None:
        with no_untrained_warning():
            method = calibrated(loaded, setting.config) if calibrated else setting.config
            _put(method, loaded, setting, checkpoint)
    return loaded.to(device).eval()


def _merged(adapted: Any, adapter: str) -> Any:
    """The model with its adapter merged. `Refused`: PEFT cannot, as with prompts, or not under such settings."""
    try:
        return adapted.merge_and_unload()
    except (AttributeError, ValueError, RuntimeError) as error:
        kind = adapted.active_peft_config.peft_type.value
        why = "" if isinstance(error, AttributeError) else f": {error}"
        raise Refused(
            f"{adapter} is of a kind that cannot be merged into a model ({kind}{why}): only merged ones are read"
        ) from None


class OneModel:
    """Loads settings of one checkpoint: one model gets method after method, beside what the checkpoint itself runs. Settings
    with another rotation or other weights get a model of their own.

    Args:
        checkpoint: of a folder, a Hub name or a loaded model; `put_back` leaves a loaded one as it was.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str = "auto", device: str = "cpu") -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.was: AsItWas | None = None

    def __call__(self, setting: Setting) -> Any:
        if setting.rope is not None or setting.adapter is not None or setting.model is not None:
            return load_setting(setting, self.checkpoint, self.dtype, self.device)
        if self.was is None:
            given, plain = self.checkpoint, Setting(UNMODIFIED)
            self.was = AsItWas(given.model if given.is_loaded else load_setting(plain, given, self.dtype, self.device))
        self.put_back()
        if setting.config is not None:
            with no_untrained_warning():
                self.was.put(filled(setting.config, self.was.config))
        return self.was.model

    def put_back(self) -> None:
        """Let the model run what it ran."""
        if self.was is not None:
            self.was.give_back()


def filled(asked: LongAttnConfig, own: LongAttnConfig | None) -> LongAttnConfig:
    """Join a config with a checkpoint's own methods in the slots that it leaves free; one of parts leaves none free."""
    if own is None:
        return asked
    if asked.parts:
        return asked if asked.train_length or not own.train_length else asked.replace(train_length=own.train_length)
    free = ("train_length", *SLOTS) if asked.train_length is None else SLOTS
    kept = {key: getattr(own, key) for key in free if getattr(asked, key) is None}
    known = own if "train_length" in kept else asked
    return dataclasses.replace(asked, **kept, train_length_source=known.train_length_source)
