"""Preflight: everything that can be wrong with a setting on a model, found on configs before weights are read."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checks import check_model
from ..config import LongAttnConfig
from ..integration import apply
from ..integration.internals import get_implementation
from ..integration.model import running
from ..integration.names import is_longattn_name, parsed_config
from ..integration.planning import bound_config
from ..integration.saved_method import ADAPTER, method_in, saved_in
from ..slots.method import ModelFacts
from ..user_warnings import warn
from .checkpoints import (
    build,
    class_for,
    class_of,
    config_from,
    speaks,
    with_adapter,
)
from .loading import beside_own, edited_config
from .settings import Setting


def check_reads(config: Any, source: str, head: bool = True) -> None:
    """Raise ValueError for a model that reads text with an encoder; and for one without a language-model head, if one is
    needed."""
    kind = class_of(config).__name__
    if config.is_encoder_decoder:
        raise ValueError(
            f"{source} is a {kind}, which reads text with an encoder: methods go into causal attention alone, and would not "
            "change how it reads"
        )
    if head and not speaks(config):
        raise ValueError(
            f"{source} is a {kind}, which has no language-model head: there is no loss of text to measure, or to train by. "
            "Measure the language model that it was made from, and put the method into this one by hf-longattn extend or "
            "hf_longattn.apply; hf-longattn inspect looks into its attention"
        )


def check_setting(setting: Setting, model: Any, head: bool = True) -> ModelFacts:
    """Everything that can be wrong with a setting on a model, found on its config alone, before any weights are read.

    Args:
        model: a checkpoint, or a loaded model.
        head: whether losses or answers will be measured, which takes a language-model head.

    Returns:
        What the methods know about the model; `train_length` among it.

    Raises:
        ValueError: the method does not fit the model, or clashes with its position encoding.

    Warns of an adapter that no word about attention comes with.
    """
    source = setting.model or model
    if isinstance(source, str):
        check_model(source)
    elif setting.rope is not None or setting.adapter is not None:
        raise ValueError(f"setting {setting.name!r}: a loaded model is measured under methods alone; give its name or folder")
    if setting.adapter is not None:
        check_model(setting.adapter, adapter=True)
    config = edited_config(setting, source)
    _check_remapped(setting, config)
    check_reads(config, source if isinstance(source, str) else "the model", head)
    try:
        empty = build(config)
        if setting.adapter is not None:
            if (other := class_for(setting.adapter, config)) is not None:
                raise ValueError(f"the adapter {setting.adapter} makes a {other.__name__} of a {type(empty).__name__}")
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # loading says the same
                with_adapter(empty, setting.adapter)
        if (method := setting.config or _adapters_method(setting, config)) is not None:
            apply(empty, beside_own(empty, method))
        known = method or running(empty)
        told = setting.train_length or (None if known is None else known.train_length)
        facts = bound_config(empty, LongAttnConfig(train_length=told))[1]
        if told is None or setting.train_length or known is None or not known.trained:
            return facts
        return dataclasses.replace(facts, trained=known.trained)  # as it was told or read when that method came
    except (ValueError, RuntimeError, KeyError) as error:  # the latter two of PEFT: other shapes, no such kind of adapter
        raise ValueError(f"setting {setting.name!r}: {error}") from None


def _check_remapped(setting: Setting, config: Any) -> None:
    """Raise ValueError if a setting changes the rotation of a checkpoint whose own method goes on remapping it."""
    own, asked = parsed_config(config.get_text_config()), setting.config
    remap = None if own is None or (asked is not None and asked.remap is not None) else own.remap
    if setting.rope is not None and remap is not None and not remap.stack:
        raise ValueError(
            f"setting {setting.name!r}: the checkpoint runs {remap.name}, which remaps the rotation that it was trained with, "
            f"and {setting.rope} changes that rotation. Take the method out first, by hf_longattn.remove(model) and "
            "hf_longattn.save(model, folder), or give the model that it was put into"
        )


def _adapters_method(setting: Setting, config: Any) -> LongAttnConfig | None:
    """The method that an adapter's folder records, if any."""
    if setting.adapter is None:
        return None
    if (method := method_in(saved_in(Path(setting.adapter) / ADAPTER))) is not None:
        return method
    if not is_longattn_name(get_implementation(config.get_text_config())):
        warn(
            f"setting {setting.name!r}: the adapter in {setting.adapter} records no attention, so it is measured without "
            "a method. If it was trained under one, name that in its entry of a settings file (method: ...)",
        )
    return None


def check_lengths(model: Any, lengths: Sequence[int]) -> None:
    """Raise ValueError if a length lies beyond a model's learned position table, which no method can extend."""
    text = config_from(model).get_text_config()
    size = getattr(text, "max_position_embeddings", None)
    learned = not getattr(text, "rope_parameters", None) and not getattr(text, "alibi", False)
    if learned and size is not None and max(lengths) > size:
        named = model if isinstance(model, str) else "the model"
        raise ValueError(
            f"{named} learned its positions and ends at {size} tokens; {max(lengths)} cannot be read under any method: "
            "shorten the lengths, or use a model with rotary positions"
        )
