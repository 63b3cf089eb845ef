"""Adapters that know their attention.

PEFT saves no attention with an adapter: reloaded, it would run on the base model's own, in silence. Here the config of every
adapter, of any kind, records what the adapter's model runs (`integration.saved_method`), and loading puts that in.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

try:
    import peft
    from packaging.version import Version
    from peft import PeftConfig, PeftModel
    from peft.config import PeftConfigMixin
    from peft.tuners.lora import LoraModel, conversion

    if Version(peft.__version__) < Version("0.21.0"):  # PEFT 0.20 decides by its own types what to save
        raise ImportError(f"peft is {peft.__version__}")
except ImportError as error:
    raise ImportError('adapters need PEFT 0.21 or newer: pip install "hf_longattn[train]"') from error
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import ModulesToSaveWrapper, hotswap
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from ..config import PREFIX, LongAttnConfig
from ..files import ADAPTER_FILE
from ..integration import apply, rope, saved_method
from ..integration.changes import disable, enable, is_disabled, transaction
from ..integration.internals import get_implementation
from ..integration.layers import View, pretrained_in
from ..integration.max_length import announce_beside
from ..integration.model import no_untrained_warning, running
from ..integration.patch import Patch, install
from ..integration.saved_method import KEY, LEARNED, RECORD, computed, method_in, record_of, set_record
from ..integration.verify import verify_at_first_call
from ..slots.learned import container_of
from ..user_warnings import warn

#: The heads that these classes train beside an adapter, and add to the config that they were given, which we have copied.
HEADS = {peft.PeftModelForTokenClassification: ("classifier", "score"), peft.PeftModelForQuestionAnswering: ("qa_outputs",)}

# configs on disk ---------------------------------------------------------------------------------------------------------


def _save_config(original: Any, self: PeftConfigMixin, save_directory: str, **kwargs: Any) -> None:
    known, folder = record_of(self), Path(save_directory)
    if known.get("unsaved") and (method := method_in(known)) is not None:
        raise ValueError(
            f"the learned parameters of {method.name} came, or came back, after this adapter and are not in it, so that what "
            "is saved could not be loaded: save the whole model (merge_and_unload, then hf_longattn.save), or make the "
            "adapter while the model runs the method"
        )
    original(self, save_directory, **kwargs)
    if known:
        saved = saved_method.saved_in(folder / ADAPTER_FILE)
        saved["auto_mapping"] = {key: x for key, x in (saved["auto_mapping"] or {}).items() if key != KEY} or None
        saved |= {key: known[key] for key in RECORD} | {"peft_type": saved_method.refused_type(saved["peft_type"])}
        (folder / ADAPTER_FILE).write_text(json.dumps(saved, indent=2, sort_keys=True), encoding="utf-8")
    announce_beside(folder)


def _from_json_file(original: Any, cls: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    saved: dict[str, Any] = original(cls, *args, **kwargs)
    known = {key: saved.pop(key, None) for key in RECORD}
    if not known["longattn"] and str(saved.get("peft_type")).startswith(PREFIX):
        raise ValueError(
            "the config of the adapter says by its peft_type that it was trained under a method, and its longattn, which says "
            f"under which, is {known['longattn']!r}: put that back as it was saved, or write peft_type="
            f"{saved_method.type_of(saved)!r} to load it without a method"
        )
    if known["longattn"]:
        saved["auto_mapping"] = (saved.get("auto_mapping") or {}) | {KEY: known}
    return saved | {"peft_type": saved_method.type_of(saved)} if "peft_type" in saved else saved


# an adapter joins a model ------------------------------------------------------------------------------------------------


def _joining(config: Any, model: nn.Module, others: Collection[Any]) -> Any:
    """The config of an adapter that joins a model: as it is, or where a method is or comes in, a copy that records it.

    Args:
        others: the configs of the adapters that the model has.

    Raises:
        TypeError: the config asks for a method, and this is no transformers model.
        ValueError: as `_restore`; or the adapter cannot save the method's learned parameters, or not run the method.
    """
    base, target = pretrained_in(model), method_in(record_of(config))
    if base is None:
        if target is not None:
            raise TypeError(f"the adapter was trained under {target.name}, which {type(model).__name__} cannot run")
        return config
    if not _under_method(config, base):
        return config
    with transaction(base):
        if target is not None:
            _restore(config, target, base, others)
        runs = running(base)
        assert runs is not None
        saved_method.refuse_kind(config, runs)
        if target is None and config.inference_mode and any(map(record_of, others)):  # and was loaded
            warn(f"the adapter records no attention, and runs under {runs.name}, as the model's other adapters do")
        config = copy.copy(config)  # one LoraConfig may serve several models
        set_record(config, {key: x for key, x in record_of(config).items() if key in RECORD})  # it saves what came before it
        saved_method.record(config, base, runs)
        if hasattr(config, "modules_to_save"):
            config.modules_to_save = saved_method.with_learned(base, config.modules_to_save) or config.modules_to_save
        elif saved_method.has_learned(base) and not record_of(config)["base_has_method"]:
            raise ValueError(
                f"{type(config).__name__} has no modules_to_save, so the learned parameters of {runs.name} would not be saved "
                "with it: take a kind that has, or save the model first and make the adapter on what you load"
            )
    return config


def _under_method(config: Any, base: PreTrainedModel) -> bool:
    """Tell whether an adapter's model runs a method, or gets one with it."""
    return method_in(record_of(config)) is not None or running(base) is not None or is_disabled(base)


def _restore(config: Any, target: LongAttnConfig, model: PreTrainedModel, others: Collection[Any]) -> None:
    """Put the attention that an adapter was trained under into a model.

    Raises:
        ValueError: the model runs another method, or rotary settings that are neither the adapter's nor its base's, or has
            adapters that run without a method.
    """
    now = running(model)
    if now is not None and now.replace(backend="auto") != target.replace(backend="auto"):
        alone, beside = "load the base model without a method, or with the adapter's", "all adapters of a model share one"
        raise _other(target, now, f"give the adapter a model of its own, {beside}" if others else alone)
    if now is None and others:
        way = f"give it a model of its own, or apply {target.name} to this one first if the others are to run under it"
        raise ValueError(f"the adapter was trained under {target.name}, and the model's other adapters under no method: {way}")
    settings, known = rope.settings_of(model), record_of(config)
    trained = known["rope_parameters"]
    turned = trained is not None and trained != settings
    if turned:
        if settings != known["base_rope_parameters"]:
            raise ValueError(
                f"the adapter was trained with rope_parameters {trained}, the model has {settings}: load the base model with "
                "the adapter's (config.rope_parameters = ...)"
            )
        rope.exchange(model, rope.build(model, trained))
    further = now is not None and (target.extended_to or 0) > (now.extended_to or 0)
    if now is None or turned or further:
        try:
            with no_untrained_warning():
                apply(model, target if now is None else now.replace(extended_to=target.extended_to) if further else now)
        except NotImplementedError as error:  # PEFT makes every parameter without memory then
            raise NotImplementedError(
                f"{target.name} brings learned parameters, which low_cpu_mem_usage=True cannot add to a model: leave it out"
            ) from error


def _other(trained: LongAttnConfig, runs: LongAttnConfig | None, way_out: str) -> ValueError:
    now = "no method" if runs is None else f"{runs.name} with {runs.to_dict()}"
    return ValueError(
        f"the adapter was trained under {trained.name}, {trained.to_dict()}, but the model runs {now}: {way_out}"
    )


def _init(original: Any, self: PeftModel, model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any) -> None:
    heads, base = next((names for kind, names in HEADS.items() if isinstance(self, kind)), ()), pretrained_in(model)
    if heads and base is not None and hasattr(peft_config, "modules_to_save") and _under_method(peft_config, base):
        peft_config = copy.copy(peft_config)
        peft_config.modules_to_save = [*dict.fromkeys([*(peft_config.modules_to_save or ()), *heads])]
    original(self, model, peft_config, *args, **kwargs)


def _inject_adapter(original: Any, self: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    config = self.peft_config.pop(adapter_name)  # where it is refused, it is not the model's
    if not (args or kwargs) and _saves_learned(model):  # a weighted sum, which PEFT injects with nothing more
        raise NotImplementedError(
            f"a weighted sum of adapters leaves out the learned parameters of {get_implementation(model.config)}: use one of "
            "the adapters, or sum adapters of a method without learned parameters"
        )
    self.peft_config[adapter_name] = _joining(config, model, self.peft_config.values())
    original(self, model, adapter_name, *args, **kwargs)


def _cast_adapter_dtype(original: Any, self: BaseTuner, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
    original(self, adapter_name=adapter_name, autocast_adapter_dtype=autocast_adapter_dtype)
    if autocast_adapter_dtype:
        saved_method.widen_learned(self.model, adapter_name)


def _add_adapter(original: Any, self: PeftModel, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
    if peft_config.is_prompt_learning:
        peft_config = _following(peft_config, self.base_model, self.peft_config.values())
    original(self, adapter_name, peft_config, *args, **kwargs)


def _following(config: Any, model: nn.Module, others: Collection[Any]) -> Any:
    """Join an adapter of a kind that PEFT does not note on the model, and note it there, so that it follows later changes."""
    config = copy.copy(_joining(config, model, others))
    if (base := pretrained_in(model)) is not None:
        vars(base)["longattn_adapters"] = [*vars(base).get("longattn_adapters", ()), config]
    return config


# weights alone -----------------------------------------------------------------------------------------------------------


def _load_adapter(original: Any, self: PeftModel, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    if there := adapter_name in self.peft_config:
        _check_weights(model_id, kwargs, self)
    try:
        return original(self, model_id, adapter_name, *args, **kwargs)
    except KeyError as error:
        if f".{LEARNED}." not in str(error) or (runs := running(self)) is None:
            raise
        if not there:
            self.delete_adapter(adapter_name)
        raise ValueError(
            f"the adapter {model_id} was trained without the learned parameters of {runs.name}, which the model runs "
            f"({error} is not in it): give it a base model without them"
        ) from error


def _load_into_transformers(
    original: Any, self: Any, peft_model_id: Any = None, adapter_name: Any = None, peft_config: Any = None, **kwargs: Any
) -> Any:
    there = (adapter_name or "default") in (vars(self).get("peft_config") or ())
    if peft_model_id is not None and (there or not (peft_config is None or record_of(peft_config))):
        _check_weights(peft_model_id, kwargs | (kwargs.get("adapter_kwargs") or {}), self)
    if kwargs.get("hotswap") is True and (runs := running(self)) is not None:
        raise _no_hotswap(runs)
    info = original(self, peft_model_id, adapter_name, peft_config, **kwargs)
    if lost := [key for key in getattr(info, "unexpected_keys", ()) if f".{LEARNED}." in key]:
        raise NotImplementedError(
            f"transformers {transformers.__version__} does not load the learned parameters of an adapter ({lost[0]}, ...): "
            "load it with peft.AutoPeftModelForCausalLM.from_pretrained, or update transformers"
        )
    return info


def _check_weights(model_id: Any, options: dict[str, Any], model: nn.Module) -> None:
    try:
        config = PeftConfig.from_pretrained(model_id, **options)
    except ValueError:  # there are only weights, which say nothing
        return
    base = pretrained_in(model)
    _refuse_weights(config, None if base is None else running(base))


def _no_hotswap(method: LongAttnConfig) -> NotImplementedError:
    return NotImplementedError(
        f"hotswapping exchanges weights alone, and an adapter was trained under {method.name}: load the other one beside it "
        "(load_adapter under another name, then set_adapter)"
    )


def _refuse_hotswap(original: Any, config0: Any, config1: Any) -> None:
    original(config0, config1)
    if (method := method_in(record_of(config0)) or method_in(record_of(config1))) is not None:
        raise _no_hotswap(method)


def _refuse_weights(config: Any, runs: LongAttnConfig | None) -> None:
    target, scheduled = method_in(record_of(config)), ("strength",)
    if target is not None and computed(target, scheduled) != computed(runs, scheduled):
        raise _other(target, runs, "only its weights would be read. Load it into a base model (PeftModel.from_pretrained)")


def _convert_from_start(original: Any, cls: Any, model: Any, config: Any, path: Any, weights: Any, kwargs: Any) -> Any:
    """PEFT drops what is in modules_to_save."""
    return weights | original(cls, model, config, path, weights, kwargs)


def _refuse_conversion(original: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    base = pretrained_in(model)
    if base is not None and (runs := running(base)) is not None:
        raise NotImplementedError(
            f"the LoRA adapter that this conversion makes would not record {runs.name}, which the model runs: train a LoRA "
            "adapter in its place, or merge this one (merge_and_unload) and save the model"
        )
    return original(model, *args, **kwargs)


def _before_call(original: Any, self: PeftModel, *args: Any, **kwargs: Any) -> Any:
    names, base = kwargs.get("adapter_names"), pretrained_in(self)
    for config in self.peft_config.values():  # whichever came first, prompts or method
        if config.is_adaption_prompt and base is not None and (method := running(base)) is not None:
            saved_method.refuse_kind(config, method)
    if names is not None and base is not None and {*names} != {*self.active_adapters}:
        runs, active = get_implementation(self.base_model.config), ", ".join(self.active_adapters)
        if "__base__" in names and _bringing(self.peft_config) is not None and not is_disabled(base):
            raise NotImplementedError(
                f"adapter_names={names}: rows of __base__ would run {runs}, which came with the adapters, and not the base "
                "model's own attention. Give them a call of their own, inside model.disable_adapter()"
            )
        if _saves_learned(base):
            raise NotImplementedError(
                f"adapter_names={names}: the learned parameters of {runs} would be those of {active} in all rows. Give each "
                "adapter its rows in a call of its own, after model.set_adapter(...)"
            )
    if names is not None and base is not None and (state := View(base).state) is not None and state.unverified:
        verify_at_first_call(state, base)  # it reads one row, and PEFT's hooks of this call want one for each name
    return original(self, *args, **kwargs)


# off and on --------------------------------------------------------------------------------------------------------------


def _off(configs: dict[str, Any], model: nn.Module) -> None:
    """Let a model without its adapters be the base model again: without their method, and with the base's rotation."""
    if (known := _bringing(configs)) is not None:
        disable(model, known["base_rope_parameters"])


def _bringing(configs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of an adapter that brought the model's method; None: the base has it too, or there is none."""
    known = next(filter(None, map(record_of, configs.values())), None)
    return None if known is None or known["base_has_method"] else known


def _on(model: nn.Module) -> None:
    if (base := pretrained_in(model)) is not None:
        enable(base)


@contextmanager
def _disable_adapter(original: Any, self: PeftModel) -> Iterator[None]:
    model = self.get_base_model()
    outer = is_disabled(model)
    with original(self):
        _off(self.peft_config, model)
        parts = map(container_of, model.modules())
        left_on = [x for x in parts if isinstance(x, ModulesToSaveWrapper) and not x.disable_adapters]  # beside prompts
        for part in left_on:
            super(ModulesToSaveWrapper, part).enable_adapters(False)  # its own lets parameters be trained again
        try:
            yield
        finally:
            for part in left_on:
                super(ModulesToSaveWrapper, part).enable_adapters(True)
            if not outer:
                _on(model)


def _switch_adapter_layers(original: Any, self: BaseTuner, enabled: bool = True) -> None:
    if enabled:
        _on(self.model)
    else:
        _off(self.peft_config, self.model)  # first: beside a pass it is refused
    original(self, enabled)


def _saves_learned(model: nn.Module) -> bool:
    """Tell whether adapters of a model save learned parameters of its method, each its own."""
    return any(isinstance(container_of(module), ModulesToSaveWrapper) for module in model.modules())


def _refuse_other(model: nn.Module, names: Collection[str] | None, active: Collection[str]) -> None:
    """NotImplementedError: adapters are merged by name, and PEFT would take the learned parameters of the active one."""
    if names is not None and {*names} != {*active} and _saves_learned(model):
        raise NotImplementedError(
            f"adapter_names={[*names]}: the learned parameters of the method would be those of {', '.join(active)}. Make that "
            "adapter the active one first, model.set_adapter(...)"
        )


def _merge_adapter(original: Any, self: BaseTuner, adapter_names: Any = None, safe_merge: bool = False) -> None:
    _refuse_other(self.model, adapter_names, self.active_adapters)
    original(self, adapter_names, safe_merge)


def _unload(original: Any, self: BaseTuner, *args: Any, **kwargs: Any) -> Any:
    names = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("adapter_names")
    _refuse_other(self.model, names, self.active_adapters)
    _on(self.model)
    model = original(self, *args, **kwargs)
    for module in model.modules():
        if isinstance(part := container_of(module), ModulesToSaveWrapper):  # LNTuning leaves it
            setattr(module, LEARNED, part.unload_and_optionally_merge_module(True, False, None))
    return model


def _disable_adapters(original: Any, self: PreTrainedModel) -> None:
    _off(vars(self).get("peft_config") or {}, self)
    original(self)


def _enable_adapters(original: Any, self: PreTrainedModel) -> None:
    enable(self)
    original(self)
    for module in self.modules():
        if isinstance(module, ModulesToSaveWrapper):  # transformers switches them off, but not on
            module.enable_adapters(enabled=True)


PATCHES = (
    Patch(PeftConfigMixin, "save_pretrained", _save_config, "PEFT saves no attention; and alone it must refuse what has one"),
    Patch(PeftConfigMixin, "from_json_file", _from_json_file, "the type that PEFT alone refuses would be refused here too"),
    Patch(
        PeftModel,
        "__init__",
        _init,
        "the head that PEFT trains beside would be added to the config that it was given, not to our copy",
    ),
    Patch(BaseTuner, "inject_adapter", _inject_adapter, "a new adapter would record no attention, a loaded one get none"),
    Patch(
        BaseTuner,
        "_cast_adapter_dtype",
        _cast_adapter_dtype,
        "learned parameters of a model in half precision would stay in it, where most steps round away",
    ),
    Patch(PeftModel, "add_adapter", _add_adapter, "a new adapter of prompts, which are not injected, would record none"),
    Patch(PeftModel, "load_adapter", _load_adapter, "into an adapter that is there it loads weights of any attention"),
    Patch(
        PreTrainedModel,
        "load_adapter",
        _load_into_transformers,
        "weights of any attention would go into an adapter; older releases drop its learned parameters with a log line",
    ),
    Patch(
        PeftModel,
        "_enable_peft_forward_hooks",
        _before_call,
        "rows of other adapters would get one's learned parameters, those of the base a method; adaption prompts record none",
    ),
    Patch(hotswap, "check_hotswap_configs_compatible", _refuse_hotswap, "weights of any attention would be exchanged"),
    Patch(conversion, "convert_to_lora", _refuse_conversion, "the adapter's new config would record no attention"),
    Patch(
        LoraModel,
        "_convert_state_dict_for_initial_model",
        _convert_from_start,
        "PiSSA as plain LoRA would lose a method's learned parameters",
    ),
    Patch(PeftModel, "disable_adapter", _disable_adapter, "a base without its adapter runs its own attention"),
    Patch(
        BaseTuner,
        "_enable_adapter_layers",
        _switch_adapter_layers,
        "the base runs its own attention too where layers are switched",
    ),
    Patch(BaseTuner, "merge_and_unload", _unload, "what is merged while switched off would stay without the method"),
    Patch(BaseTuner, "unload", _unload, "what is unloaded while switched off would stay without the method"),
    Patch(BaseTuner, "merge_adapter", _merge_adapter, "adapters merged by name would get the active one's learned parameters"),
    Patch(PeftAdapterMixin, "disable_adapters", _disable_adapters, "a base without its adapter runs its own attention"),
    Patch(PeftAdapterMixin, "enable_adapters", _enable_adapters, "with its adapters again, it runs their attention"),
)
install(*PATCHES)
