"""The longest text that a model says it reads: all entries that say so move together, and back."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..files import ADAPTER_FILE
from .layers import View, distinct, language_config
from .trained_length import KEPT, ORIGINAL, UNSCALED, named_lengths, rope_settings

#: What a config keeps, beside its own lengths, of the length at which generation ended.
GENERATION = "generation_config.max_length"
#: What says so beside the configs in a model's folder: a file, and its key.
FILES = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}


def announce(view: View, length: int | None) -> None:
    """Let a model's configs say that it reads `length` tokens, if they say less.

    None puts back what they announced before, or where a scaling of the rotation was added after training, what that reaches.
    A config whose rotation depends on its length (dynamic NTK, longrope without a factor) keeps it. Generation ends there too,
    if it ended where a config said.
    """
    configs, generation = _configs(view), getattr(view.model, "generation_config", None)
    length = _scaled_to(configs[0]) if length is None else length
    ends: int | None = None if generation is None else generation.max_length
    for c in configs:
        kept = vars(c).pop(KEPT, {})
        before = kept.pop(GENERATION, None)
        if generation is not None and before is not None and ends in named_lengths(c).values():
            generation.max_length = ends = before
        vars(c).update(kept)
    if length is None or length_changes_rotation(configs[0], length):
        return
    for c in configs:
        if less := {name: n for name, n in named_lengths(c).items() if n < length}:
            if generation is not None and ends is not None and ends in less.values():
                less[GENERATION], generation.max_length, ends = ends, length, None
            vars(c).update(dict.fromkeys(less.keys() - {GENERATION}, length) | {KEPT: less})


def announce_running(view: View) -> None:
    """Let a model's configs say the length that the method it runs was made for, or what they said before one."""
    config = view.running
    announce(view, None if config is None else config.extended_to)


def trained_at(model: Any, length: int) -> None:
    """`announce` for good: the model was trained at that length, and has no method that could be taken out."""
    announce(view := View(model), length)
    for c in _configs(view):
        vars(c).pop(KEPT, None)


def _scaled_to(config: Any) -> int | None:
    """The length that a text config says because YaRN, put in after training, reaches it."""
    settings, kept = rope_settings(config), vars(config).get(KEPT)
    if not kept or settings.get("rope_type") != "yarn" or not settings.get(ORIGINAL):
        return None
    reach = round(settings["factor"] * settings[ORIGINAL])
    return reach if reach in named_lengths(config).values() else None


def _configs(view: View) -> list[Any]:
    """Return the configs that name the longest text: the language model's first, then the whole model's."""
    whole = view.model.config
    text = language_config(whole) if view.target is None else view.target
    return distinct([text, *view.method_configs, whole])


def length_changes_rotation(config: Any, length: int) -> bool:
    """Tell whether a text config's model would rotate or place tokens otherwise, if the config named `length`."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = {kind: x for kind, x in settings.items() if isinstance(x, Mapping)}
    scaled = {kind: x for kind, x in (nested or {None: settings}).items() if x.get("rope_type", "default") not in UNSCALED}
    if not settings or any(x["rope_type"] not in ROPE_INIT_FUNCTIONS for x in scaled.values()):
        return True
    other = copy.deepcopy(config)
    vars(other).update(dict.fromkeys(named_lengths(other), length))
    for kind, x in scaled.items():
        compute = ROPE_INIT_FUNCTIONS[x["rope_type"]]
        for read in (None, 8 * length):  # some have other frequencies for a text that is longer than they say
            with torch.device("cpu"):  # whatever the model is being built on
                (own, scale), (new, new_scale) = (compute(c, None, read, layer_type=kind) for c in (config, other))
            if scale != new_scale or not torch.equal(own, new):
                return True
    return False


def announce_beside(folder: Path) -> None:
    """Let the tokenizer in a saved model's folder say what its config says, if it says less, or what it said before."""
    configs = [file for name in ("config.json", ADAPTER_FILE) if (file := folder / name).is_file()]
    if not configs:
        return
    length = max((n for file in configs for n in _extended(json.loads(file.read_text(encoding="utf-8")))), default=0)
    for file, key in ((folder / name, key) for name, key in FILES.items() if (folder / name).is_file()):
        data = json.loads(file.read_text(encoding="utf-8"))
        own = {key: data[key]} if isinstance(data.get(key), int) else {}
        own |= data.get(KEPT) or {}
        new = {k: v for k, v in data.items() if k != KEPT} | own
        if own and own[key] < length:
            new |= {key: length, KEPT: own}
        if new != data:
            aside = file.with_name(f".{file.name}-{os.getpid()}")  # several processes may save one model
            aside.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            aside.replace(file)


def _extended(saved: Any) -> Iterator[int]:
    """The lengths that a saved config's model was extended to."""
    if isinstance(saved, Mapping):
        yield from (saved[name] for name in saved.get(KEPT) or () if isinstance(saved.get(name), int))
        if isinstance(n := saved.get("extended_to"), int):
            yield n
        for value in saved.values():
            yield from _extended(value)
