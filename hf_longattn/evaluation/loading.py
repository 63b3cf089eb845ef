"""Models under settings: weights loaded, rope edited, adapter merged, method applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import LongAttnConfig
from ..integration import apply, get_config, rope
from ..integration.model import no_untrained_warning
from ..scoped_method import AsItWas
from ..slots.method import SLOTS
from .checkpoints import (
    config_from,
    load_weights,
    precision_of,
)
from .settings import UNMODIFIED, Setting, parse_rope


def load_setting(
    setting: Setting,
    model: str,
    dtype: str = "auto",
    device: str = "cpu",
    calibrated: Callable[[Any, LongAttnConfig], LongAttnConfig] | None = None,
) -> Any:
    """A model under a setting, for inference: weights loaded, rope edited, adapter merged, method applied.

    Args:
        dtype: see `precision_of`.
        calibrated: from the loaded model and the setting's method to the one that is applied; None for the method itself.
    """
    source = setting.model or model
    config = edited_config(setting, source)
    loaded = load_weights(source, config, setting.adapter, dtype=precision_of(source, dtype, device))
    if setting.adapter is not None:
        loaded = _merged(loaded, setting.adapter)
    if setting.config is not None:
        with no_untrained_warning():
            apply(loaded, beside_own(loaded, calibrated(loaded, setting.config) if calibrated else setting.config))
    return loaded.to(device).eval()


def _merged(adapted: Any, adapter: str) -> Any:
    try:
        return adapted.merge_and_unload()
    except (AttributeError, NotImplementedError):  # of prompts, and of kinds that depend on the input
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(
            f"{adapter} is of a kind that cannot be merged into a model ({kind}): only merged ones are read"
        ) from None


class OneModel:
    """Loads settings of one checkpoint: the same model under method after method, the checkpoint's own beside each. Settings
    of the rotation, or with other weights, get a model of their own.

    Args:
        model: a checkpoint; or a loaded model, which `put_back` leaves as it was, and which is asked for methods alone.
    """

    def __init__(self, model: Any, dtype: str = "auto", device: str = "cpu") -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.loaded: Any = None
        if not isinstance(model, str):
            self._take(model)

    def __call__(self, setting: Setting) -> Any:
        if setting.rope is not None or setting.adapter is not None or setting.model is not None:
            return load_setting(setting, self.model, self.dtype, self.device)
        if self.loaded is None:
            self._take(load_setting(Setting(UNMODIFIED), self.model, self.dtype, self.device))
        self.put_back()
        if setting.config is not None:
            with no_untrained_warning():
                self.was.put(filled(setting.config, self.own))
        return self.loaded

    def _take(self, model: Any) -> None:
        self.loaded = model
        self.was, self.own = AsItWas(model), beside_own(model, LongAttnConfig())

    def put_back(self) -> None:
        """Let the model run what it ran."""
        if self.loaded is not None:
            self.was.give_back()


def edited_config(setting: Setting, source: Any) -> Any:
    if setting.adapter is not None and (Path(setting.adapter) / "config.json").exists():
        source = setting.adapter
    config = config_from(source)
    if setting.rope is not None:
        edit_rope(config, setting.rope, setting.train_length)
    return config


def edit_rope(config: Any, encoding: str, train_length: int | None = None) -> Any:
    """A model's config with its position encoding changed, in place: "yarn:2" and the like (see `hf_longattn.rope`)."""
    name, numbers = parse_rope(encoding)
    return getattr(rope, name)(config, *numbers, **({} if name in ("prope", "nope") else {"train_length": train_length}))


def beside_own(model: Any, asked: LongAttnConfig) -> LongAttnConfig:
    """Join the requested method with the checkpoint's own methods in the slots that the request leaves free."""
    try:
        own = get_config(model)
    except ValueError:
        return asked
    return filled(asked, own)


def filled(asked: LongAttnConfig, own: LongAttnConfig) -> LongAttnConfig:
    """Join a config with another's methods in the slots that it leaves free; one of parts leaves none free."""
    if asked.parts:
        return asked if asked.train_length or not own.train_length else asked.replace(train_length=own.train_length)
    free = ("train_length", *SLOTS) if asked.train_length is None else SLOTS
    kept = {key: getattr(own, key) for key in free if getattr(asked, key) is None}
    return dataclasses.replace(asked, **kept, trained=own.trained if "train_length" in kept else asked.trained)
