"""The attention in a saved config, under which its weights were trained: a model's or an adapter's, read in one way.

An adapter's config carries a record: in memory in `auto_mapping`, PEFT's field for what a base model is, which every copy of
a config takes along; on disk as keys of adapter_config.json. There its `peft_type` is one that PEFT alone refuses, so that no
adapter loads under another attention in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import CUSTOM, PREFIX, LongAttnConfig
from ..files import read_json
from ..slots.learned import LearnedParts, container_of, learned_parts
from . import rope
from .internals import commit_of, get_implementation
from .layers import View
from .names import is_longattn_name, ours_in, short

#: The record: the method as `LongAttnConfig.to_dict` writes it; rotary settings where they are not those of the base
#: checkpoint, or that is not known, and the base's; whether the base runs a method by itself, which stays on without adapters.
RECORD = ("longattn", "rope_parameters", "base_rope_parameters", "base_has_method")
#: Its key in `auto_mapping`, where `unsaved` beside it says whether learned parameters came after the adapter.
KEY = "hf_longattn"
#: The name of an attention module's learned parts, by which PEFT's modules_to_save knows them.
LEARNED = "longattn"


def refused_type(peft_type: str) -> str:
    """Return the string on disk for PEFT's own type: without this package its loaders fail on it with a KeyError."""
    return f"{PREFIX}{peft_type}: install the package hf_longattn, and import it before loading this adapter"


def type_of(saved: Mapping[str, Any]) -> str:
    """PEFT's own type of a saved adapter."""
    return str(saved["peft_type"]).removeprefix(PREFIX).partition(":")[0]


def saved_in(file: Path) -> dict[str, Any]:
    """A saved config; empty where there is no such file, ValueError where it is damaged."""
    return read_json(file) if file.is_file() else {}


def record_of(adapter: Any) -> dict[str, Any]:
    """The record in an adapter's config in memory; empty: it records no attention."""
    return (adapter.auto_mapping or {}).get(KEY) or {}


def set_record(adapter: Any, record: Mapping[str, Any]) -> None:
    """Put a record into an adapter's config, in place of the one there; an empty one takes that out."""
    others = {key: value for key, value in (adapter.auto_mapping or {}).items() if key != KEY}
    adapter.auto_mapping = others | ({KEY: dict(record)} if record else {}) or None


def method_in(saved: Mapping[str, Any]) -> LongAttnConfig | None:
    """The method that a saved config, or an adapter's record, asks for; None: it asks for none."""
    name, section = saved.get("attn_implementation"), saved.get("longattn")
    if (ours := ours_in(name)) is not None:
        return LongAttnConfig.parse(short(ours), section)
    return LongAttnConfig.parse(CUSTOM, section) if section else None  # written out: a text or a list is none of ours


def computed(config: LongAttnConfig | None, scheduled: Collection[str] = ()) -> dict[str, Any] | None:
    """The part of a config that decides what is computed, as a dict to compare with another's; None: no method.

    Args:
        scheduled: parameters that a run sets before each step, and which may therefore differ.
    """
    if config is None:
        return None
    parts = {key: value for key, value in config.to_dict().items() if key not in ("backend", "extended_to")}
    return {
        key: {k: v for k, v in part.items() if k not in scheduled} if isinstance(part, dict) else part
        for key, part in parts.items()
    }


def record(adapter: Any, model: PreTrainedModel, runs: LongAttnConfig | None) -> None:
    """Write the attention that a model runs into the config of its adapter; of a model without a method, take it out."""
    known = record_of(adapter)
    if runs is not None and not known:
        checkpoint = _checkpoint(model)
        own, base = rope.settings_of(model), None if checkpoint is None else rope.settings_of(checkpoint)
        known["rope_parameters"], known["base_rope_parameters"] = (own, base) if own != base else (None, None)
        ours = checkpoint is not None and (checkpoint.longattn or is_longattn_name(get_implementation(checkpoint)))
        known["base_has_method"] = bool(ours)
        if adapter.task_type is None:  # PEFT goes by these where a config names no task
            names = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
            adapter.auto_mapping = names | (adapter.auto_mapping or {})
    set_record(adapter, {} if runs is None else known | {"longattn": runs.to_dict()})
    if (kept := getattr(adapter, "modules_to_save", None)) and not has_learned(model):
        adapter.modules_to_save = sorted(x for x in kept if x.rpartition(".")[2] != LEARNED) or None


def record_in_adapters(view: View, runs: LongAttnConfig | None) -> None:
    """Let all adapters of a model record what it runs now."""
    model = view.model
    configs = vars(model).get("peft_config") or {}
    for name, adapter in configs.items():
        if runs is not None and not record_of(adapter):
            configs[name] = copy.copy(adapter)  # one LoraConfig may serve several models
        if runs is not None or record_of(adapter):
            record(configs[name], model, runs)
    for adapter in vars(model).get("longattn_adapters", ()):
        record(adapter, model, runs)


def differs_by_layer(config: LongAttnConfig) -> bool:
    """Tell whether a config differs between layers, by their numbers."""
    nests = (getattr(m, name) for m in config.methods for name in (*m.by_head, *m.by_layer))
    return len(config.each) > 1 or not isinstance(config.layers, str) or any(isinstance(x, tuple) for x in nests)


#: Kinds of adapters that no method goes with, by PEFT's type, and the reason.
_REFUSED_KINDS = {
    "SHADOW": "it makes a second network of its config, which would not follow {} when that changes or is loaded",
    "XLORA": "it mixes adapters in every pass, each of which may have been trained under another attention than {}",
    "ADAPTION_PROMPT": "it computes attention of its own, in which {} changes nothing",
}


def copy_learned(view: View) -> None:
    """Give each adapter that PEFT notes on a model its copies of the method's learned parts, where it has none: they came
    after the adapter, or the adapter while the method was away.

    Raises:
        ValueError: as `with_learned`; or several of these adapters are active.
    """
    parts = [part for x in view.layers if (part := container_of(x.module)) is not None]
    configs = {
        name: adapter
        for name, adapter in (vars(view.model).get("peft_config") or {}).items()
        if record_of(adapter) and hasattr(adapter, "modules_to_save")
    }
    new = [name for name in configs if any(name not in getattr(part, "modules_to_save", ()) for part in parts)]
    if not new:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    tuner: Any = next((x for x in view.modules if isinstance(x, BaseTunerLayer)), None)
    active = [] if tuner is None else [name for name in tuner.active_adapters if name in configs]
    if len(active) > 1:
        raise ValueError(
            f"the adapters {', '.join(active)} are active together, and each has learned parameters of the method of its own: "
            "set_adapter(...) one of them first"
        )
    kept = {name: with_learned(view.model, configs[name].modules_to_save) for name in new}
    for name, names in kept.items():
        configs[name].modules_to_save = names or None
        own = tuple(x for x in names if x.rpartition(".")[2] == LEARNED)
        for layer in view.layers:
            part = container_of(layer.module)
            if part is None or not own or not f"{layer.name}.{LEARNED}".endswith(own):
                continue
            wrapper: Any = part
            if isinstance(part, LearnedParts):
                wrapper = ModulesToSaveWrapper(part, name)
                wrapper.set_adapter([])
                setattr(layer.module, LEARNED, wrapper)
            wrapper.update(name)
            if name in active:
                wrapper.set_adapter(name, inference_mode=configs[name].inference_mode)
            if tuner is not None and tuner.disable_adapters:
                wrapper.enable_adapters(False)
        widen_learned(view.model, name)


def widen_learned(model: nn.Module, name: str) -> None:
    """Bring an adapter's copies of learned parameters to float32 where a model is in half precision, as PEFT does with the
    adapter's own: in bfloat16 a scale of 1 stays 1 under every step of less than 0.002."""
    for module in model.modules():
        parts = getattr(container_of(module), "modules_to_save", {})
        if name in parts and any(x.dtype in (torch.float16, torch.bfloat16) for x in parts[name].parameters()):
            parts[name].float()


def mark_unsaved(view: View, came_now: bool) -> bool:
    """Note in a model's adapters whether they lack the method's learned parts, which `copy_learned` cannot give to prompts
    and to kinds without modules_to_save; returns whether some lack them now.

    Args:
        came_now: whether some of these parts have just come.

    Raises:
        ValueError: as `with_learned`.
    """
    learned, now = has_learned(view.model), False
    for adapter in view.adapters:
        if not (known := record_of(adapter)):
            continue
        if hasattr(adapter, "modules_to_save"):
            lacks = learned and with_learned(view.model, adapter.modules_to_save) != sorted(adapter.modules_to_save or ())
        else:  # saved with a base that has the method, unless they came anew
            lacks = learned and (came_now or known.get("unsaved", False) or not known["base_has_method"])
        if lacks != known.get("unsaved", False):
            now |= lacks
            set_record(adapter, known | {"unsaved": lacks})
    return now


def refuse_kind(adapter: Any, method: LongAttnConfig) -> None:
    """Raise ValueError for an adapter that no method goes with, or that copies layers that a method tells apart by number."""
    if (why := _REFUSED_KINDS.get(adapter.peft_type)) is not None:
        why = why.format(method.name)
    elif getattr(adapter, "layer_replication", None) is not None and differs_by_layer(method):
        why = f"layer_replication copies and renumbers layers, and {method.name} is not the same in all of them"
    else:
        return
    way = "Take LoRA, IA3, prompt or prefix tuning, or a model without a method (hf_longattn.remove)"
    raise ValueError(f"{type(adapter).__name__}: {why}. {way}")


def with_learned(model: PreTrainedModel, kept: Collection[str] | None) -> list[str]:
    """The names of the modules that an adapter saves whole, with those of a model's learned parts, but for parts inside of
    others, which PEFT saves with these.

    ValueError: another adapter saves some inside of such a module, and this one by themselves, or the other way round; or
        the end of a name that PEFT is given is that of one of these parts.
    """
    others = {name for name in kept or () if name.rpartition(".")[2] != LEARNED}
    inside, alone = set[str](), set[str]()
    for name, module in model.named_modules():
        *path, own = name.split(".")
        if LEARNED in path and (short := next((other for other in others if name.endswith(other)), None)):
            raise ValueError(
                f"PEFT goes by the ends of names, and {name}, which is saved with the method, ends in {short!r} of "
                "modules_to_save too: write whole names there (model.named_modules() gives them) for the other modules that "
                "you mean, or leave it out if you mean none"
            )
        if own != LEARNED:
            continue
        within = any(".".join(path[: n + 1]).endswith(other) for n in range(len(path)) for other in others)
        (inside if within else alone).add(name)
        if (within and type(module) is not LearnedParts) or (not within and {"original_module", "modules_to_save"} & {*path}):
            raise ValueError(
                f"another adapter of the model saves the learned parameters {name} otherwise, which PEFT cannot: give this "
                "one the same modules_to_save, or a model of its own"
            )
    return sorted(others | (alone if inside or not alone else {LEARNED}))


def has_learned(model: PreTrainedModel) -> bool:
    """Tell whether a model's method brings learned parameters."""
    return any(learned_parts(module) for module in model.modules())


def _checkpoint(model: PreTrainedModel) -> Any:
    """The config in the checkpoint that a model was loaded from; None if there is none or it is not at hand."""
    name = model.__dict__.get("name_or_path")
    if not name:
        return None
    try:
        return type(model.config).from_pretrained(name, revision=commit_of(model.config), local_files_only=True)
    except OSError:
        return None
