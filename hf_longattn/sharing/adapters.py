"""LoRA adapters that know their attention.

PEFT saves no attention with an adapter: reloaded, it runs on the base model's own, in silence. `LongAttnLoraConfig`
is PEFT's LoRA under a type of its own, whose saved config records the method, its parameters and the rotary settings.
Loading puts them in; without this package it fails with an error that names it.

Other adapters on a model with a method warn, and get the same record as one more key in their adapter_config.json: PEFT
alone warns of the key and goes on, with this package imported the attention is put back, with a warning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

try:
    from peft import LoraConfig, LoraModel, PeftModel
    from peft.config import PeftConfigMixin
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    _ = LoraModel._get_adapter_state_dict  # PEFT 0.20 decides by its own types what to save
except (ImportError, AttributeError) as error:
    raise ImportError('adapters need PEFT 0.21 or newer: pip install "hf_longattn[train]"') from error
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import CONFIG_NAME, ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from ..config import LongAttnConfig
from ..integration import apply, config_of, rope
from ..integration.model import knowing, running
from ..integration.names import PREFIX, RECORD, is_ours
from ..integration.seam import Seam, install
from ..integration.state import disable, enable, transaction
from ..methods.learned import learned_parts
from ..telling import warn


class _PeftType(str):
    """Quacks like a member of PEFT's enum, which is closed."""

    @property
    def value(self) -> str:
        return str(self)


#: Without this package, PEFT's and transformers' loaders fail with a KeyError on this string: it says what to do.
PEFT_TYPE = _PeftType(PREFIX + "LORA: install the package hf_longattn, and import it before loading this adapter")
#: What adapters of earlier versions have there.
EARLIER_PEFT_TYPE = PREFIX + "LORA"
#: What `record` writes into an adapter's config: fields of ours, attributes of any other.
RECORDED = ("longattn", "rope_parameters", "base_rope_parameters", "base_has_method")


@dataclass
class LongAttnLoraConfig(LoraConfig):
    """PEFT's `LoraConfig` plus the attention that the adapter is trained under; use it in place of that.

    `get_peft_model` fills in what follows from the model, which must run a method by then. Later changes of the method
    (`hf_longattn.update`, ...) are followed.

    Args:
        longattn: the method, as `LongAttnConfig.to_dict` writes it.
        rope_parameters: the model's rotary settings, where they are not those of the base checkpoint (or that is not known).
        base_rope_parameters: the base checkpoint's own, where the former are given and it is known.
        base_has_method: the base checkpoint runs a method by itself, so that switching the adapter off leaves it on.
    """

    longattn: dict[str, Any] | None = field(default=None, metadata={"help": "The attention method, filled in."})
    rope_parameters: dict[str, Any] | None = field(default=None, metadata={"help": "Rotary settings, filled in."})
    base_rope_parameters: dict[str, Any] | None = field(default=None, metadata={"help": "The base's, filled in."})
    base_has_method: bool = field(default=False, metadata={"help": "Whether the base runs a method, filled in."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PEFT_TYPE
        if isinstance(self.longattn, LongAttnConfig):
            self.longattn = self.longattn.to_dict()

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        if self.longattn is None:
            raise ValueError(
                "this adapter's model runs no hf_longattn method any more, so there is none to save with it: apply it "
                "again, or merge_and_unload() and save the model"
            )
        super().save_pretrained(save_directory, **kwargs)


class LongAttnLoraModel(LoraModel):
    """PEFT's LoRA, which puts the recorded attention into the model, or records the model's."""

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"LongAttnLoraConfig adapts transformers models, not {type(model).__name__}: use peft.LoraConfig")
        with transaction(model):
            (record if config.longattn is None else restore)(config, model)
        if any(learned_parts(m) for m in model.modules()):
            config.modules_to_save = sorted({*(config.modules_to_save or ()), "longattn"})
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def disable_adapter_layers(self) -> None:
        """Switch all adapters off, and the method with them: the model is the base model again."""
        super().disable_adapter_layers()
        config = next(iter(self.peft_config.values()))
        if not config.base_has_method:
            disable(self.model, config.base_rope_parameters)

    def enable_adapter_layers(self) -> None:
        """Switch the adapters and the method on again."""
        enable(self.model)
        super().enable_adapter_layers()

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        enable(self.model)
        return super()._unload_and_optionally_merge(*args, **kwargs)


def record(config: Any, model: PreTrainedModel) -> None:
    """Write a model's attention into the config of a new adapter.

    Raises:
        ValueError: the model runs no method.
    """
    try:
        config.longattn = config_of(model).to_dict()
    except ValueError as error:
        raise ValueError(
            f"{error}: put one in first, with attn_implementation=... or hf_longattn.apply, or use peft.LoraConfig"
        ) from None
    checkpoint = _checkpoint(model)
    settings = rope.settings_of(model)
    base_settings = None if checkpoint is None else rope.settings_of(checkpoint)
    turned = settings != base_settings
    config.rope_parameters, config.base_rope_parameters = (settings, base_settings) if turned else (None, None)
    config.base_has_method = checkpoint is not None and bool(checkpoint.longattn or is_ours(checkpoint._attn_implementation))


def restore(config: Any, model: PreTrainedModel) -> None:
    """Put the attention that an adapter was trained under into a model.

    Raises:
        ValueError: the model runs another method, or rotary settings that are neither the adapter's nor its base's.
    """
    target = LongAttnConfig.from_dict(cast("dict[str, Any]", config.longattn))
    now = running(model)
    if now is not None and now.replace(backend="auto") != target.replace(backend="auto"):
        raise ValueError(
            f"the adapter was trained under {target.name}, with parameters {config.longattn}, but the model runs "
            f"{now.name} with {now.to_dict()}: load the base model without a method, or with the adapter's"
        )
    settings = rope.settings_of(model)
    turned = config.rope_parameters is not None and config.rope_parameters != settings
    if turned:
        if settings != config.base_rope_parameters:
            raise ValueError(
                f"the adapter was trained with rope_parameters {config.rope_parameters}, the model has {settings}: load the "
                "base model with the adapter's (config.rope_parameters = ...)"
            )
        rope.exchange(model, rope.build(model, cast("dict[str, Any]", config.rope_parameters)))
    if now is None or turned:
        try:
            with knowing():
                apply(model, now or target)
        except NotImplementedError as error:  # PEFT makes every parameter without memory then
            raise NotImplementedError(
                f"{target.name} brings learned parameters, which low_cpu_mem_usage=True cannot add to a model: leave it out"
            ) from error


def _checkpoint(model: PreTrainedModel) -> Any:
    """The config in the checkpoint that a model was loaded from; None if there is none or it is not at hand."""
    name = model.__dict__.get("name_or_path")
    if not name:
        return None
    revision = getattr(model.config, "_commit_hash", None) or "main"
    try:
        return type(model.config).from_pretrained(name, revision=revision, local_files_only=True)
    except OSError:
        return None


def note(config: Any, model: nn.Module) -> None:
    """Where an adapter of any other kind joins a model: restore what its folder recorded, or record the model's attention.

    Warns of both.

    Raises:
        ValueError: as `restore`.
    """
    base = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if base is None or isinstance(config, LongAttnLoraConfig):
        return
    now = running(base)
    if config.__dict__.pop("longattn_loaded", False):
        with transaction(base):
            restore(config, base)
        if now is None:
            warn(
                f"the adapter was trained under {config_of(base).name}, as its {CONFIG_NAME} says, so the model runs that "
                "now; hf_longattn.remove(model) takes it out",
            )
    elif now is not None:
        record(config, base)
        warn(
            f"{type(config).__name__} does not know that the model runs {now.name}: {_INCOMPLETE}",
        )
    else:
        config.longattn = None


_INCOMPLETE = (
    f"the adapter's {CONFIG_NAME} will say so, but that counts only where hf_longattn is imported before loading; "
    "disable_adapter() leaves the method on, and its learned parameters are neither trained nor saved. Use "
    "hf_longattn.LongAttnLoraConfig, or save the merged model"
)


def _inject_adapter(original: Any, self: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    note(self.peft_config[adapter_name], model)
    original(self, model, adapter_name, *args, **kwargs)


def _add_adapter(original: Any, self: PeftModel, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
    kinds = {isinstance(c, LongAttnLoraConfig) for c in (peft_config, *self.peft_config.values())}
    if len(kinds) > 1:
        raise ValueError(
            f"the adapter {adapter_name!r} is a {type(peft_config).__name__}, beside {', '.join(self.peft_config)}: PEFT "
            "takes adapters of one type, and those that record their attention have a type of their own. Make all of them "
            "with hf_longattn.LongAttnLoraConfig, which takes LoraConfig's arguments, or merge_and_unload() the one before"
        )
    if peft_config.is_prompt_learning:  # the others are injected
        note(peft_config, self.base_model)
    original(self, adapter_name, peft_config, *args, **kwargs)


def _disable_adapters(original: Any, self: PreTrainedModel) -> None:
    """As PEFT's `disable_adapter`: the model is the base model again."""
    original(self)
    config = next((c for c in self.peft_config.values() if isinstance(c, LongAttnLoraConfig)), None)
    if config is not None and not config.base_has_method:
        disable(self, config.base_rope_parameters)


def _enable_adapters(original: Any, self: PreTrainedModel) -> None:
    enable(self)
    original(self)
    for module in self.modules():
        if isinstance(module, ModulesToSaveWrapper):  # transformers switches them off, but not on
            module.enable_adapters(enabled=True)


def _save_pretrained(original: Any, self: PeftModel, *args: Any, **kwargs: Any) -> None:
    """The method may have come, or changed, after the adapter."""
    base = self.get_base_model()
    if isinstance(base, PreTrainedModel) and (now := running(base)) is not None:
        for name, config in self.peft_config.items():
            if not isinstance(config, LongAttnLoraConfig):
                record(config, base)
                warn(f"the adapter {name} does not know that its model runs {now.name}: {_INCOMPLETE}")
    original(self, *args, **kwargs)


def _save_config(original: Any, self: PeftConfigMixin, save_directory: str, **kwargs: Any) -> None:
    original(self, save_directory, **kwargs)
    if self.longattn is not None and not isinstance(self, LongAttnLoraConfig):
        path = Path(save_directory) / CONFIG_NAME
        result = {name: getattr(self, name, None) for name in RECORDED}
        saved = json.loads(path.read_text(encoding="utf-8")) | {RECORD: {k: v for k, v in result.items() if v}}
        path.write_text(json.dumps(saved, indent=2, sort_keys=True), encoding="utf-8")


def _from_peft_type(original: Any, cls: Any, **kwargs: Any) -> Any:
    recorded = kwargs.pop(RECORD, None)
    config = original(cls, **kwargs)
    if recorded is not None:
        config.__dict__.update(dict.fromkeys(RECORDED), **recorded, longattn_loaded=True)
    return config


SEAMS = (
    Seam(PeftConfigMixin, "longattn", lambda _: None, "every adapter's config follows changes of its model", whole=True),
    Seam(
        BaseTuner,
        "inject_adapter",
        _inject_adapter,
        "an adapter must record the attention that it is made under, or restore the one that it recorded",
    ),
    Seam(
        PeftModel,
        "add_adapter",
        _add_adapter,
        "PEFT takes adapters of one type; prompts are not injected, and record their attention here",
    ),
    Seam(PeftModel, "save_pretrained", _save_pretrained, "the method may have come, or changed, after the adapter"),
    Seam(PeftAdapterMixin, "disable_adapters", _disable_adapters, "a base without its adapter runs its own attention"),
    Seam(PeftAdapterMixin, "enable_adapters", _enable_adapters, "the same, back"),
    Seam(PeftConfigMixin, "save_pretrained", _save_config, "the attention is saved under a key that other readers ignore"),
    Seam(PeftConfigMixin, "from_peft_type", _from_peft_type, "that key would be dropped with a warning"),
)


def register() -> None:
    """Make the type known to PEFT, and wrap it, once per process however often it is called."""
    for kind in (PEFT_TYPE, EARLIER_PEFT_TYPE):
        PEFT_TYPE_TO_CONFIG_MAPPING[kind] = LongAttnLoraConfig
        PEFT_TYPE_TO_TUNER_MAPPING[kind] = LongAttnLoraModel
        PEFT_TYPE_TO_PREFIX_MAPPING[kind] = LongAttnLoraModel.prefix
    install(*SEAMS)


register()
