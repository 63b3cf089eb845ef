"""Wrapped functions of Transformers and TRL, and why: `PATCHES`, below wrappers that call the original first or last."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling
from transformers import Cache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..config import CUSTOM, NO_METHOD, PREFIX, TRIPWIRE, LongAttnConfig, is_whole, read_name
from ..slots.method import freeze, thaw
from ..slots.registry import STOCK, method_class, parameters_of
from ..user_warnings import warn
from . import rope
from .base_attention import own_implementation
from .changes import remember
from .config_records import NameOf, Section, before, raw_section, record_in, set_record
from .internals import IMPLEMENTATION, get_implementation, is_part, set_implementation, tracing_context
from .layer_methods import prepare, refuse_name
from .layers import View, language_config, pretrained_in
from .max_length import announce_beside, announce_running
from .model import apply, change, fits, running, say_what_runs, warn_of_lost_softcap, warn_untrained
from .names import SERVED, hint, is_longattn_name, methods_in, name_for, ours_in, register_combination, short
from .offload import keep_learned, refuse_to_save
from .parameters import initialise
from .patch import Patch
from .resume import train
from .saved_method import differs_by_layer
from .shared import copy_configs, note_built
from .token_axes import carry_token_axes

#: What a composite config calls its language model's, and callers therefore also that of a model of text alone.
TEXT = "text_config"
#: Whether a model is being loaded, whose generation config comes last.
_LOADED: ContextVar[bool] = ContextVar("longattn_loaded", default=False)


def _get_section(self: PreTrainedConfig) -> dict[str, Any] | None:
    section = raw_section(self)
    return Section(section.to_dict()) if isinstance(section, LongAttnConfig) else section


def _plain(value: Any) -> Any:
    """A section, or a part of one, as plain data of its own: transformers writes configs as JSON, into its messages too."""
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    return thaw(freeze(value))


def _set_section(self: PreTrainedConfig, value: dict[str, Any] | LongAttnConfig | None) -> None:
    set_record(self, section=_plain(value))
    text = language_config(self)
    for key in self.sub_configs:  # as _attn_implementation does, but only towards the language model
        if (sub := getattr(self, key, None)) is not None and language_config(sub) is text:
            sub.longattn = value


def _to_dict(original: Callable[..., dict[str, Any]], self: PreTrainedConfig) -> dict[str, Any]:
    out = original(self)
    section = raw_section(self)
    for ours in ("_longattn", "longattn"):
        out.pop(ours, None)
    text = language_config(self)
    if text is self:
        observed = section == NO_METHOD  # a model without a method, while something looks on
        section = section.to_dict() if isinstance(section, LongAttnConfig) else section
        if is_longattn_name(name := get_implementation(self)) and not observed:
            out |= {"attn_implementation": PREFIX + short(name)}
            out |= {"longattn": section} if section else {}
        return out
    for key in self.sub_configs:
        sub, saved = getattr(self, key, None), out.get(key)
        if not isinstance(saved, dict):
            continue
        implementation = saved.pop("attn_implementation", None)
        own = saved.pop("longattn", None)
        # a nested name is overwritten on load, a dict at the top is not
        if implementation is not None and language_config(sub) is text:
            out |= {"attn_implementation": {key: implementation}, "longattn": own}
    return out


def _from_dict(original: Callable[..., Any], cls: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
    own, asked = config_dict.get("attn_implementation"), kwargs.get("attn_implementation", "")
    saved = ours_in(own) is not None
    if asked is None and saved:
        del kwargs["attn_implementation"]  # the caller has no wish; the checkpoint has
    if isinstance(asked, dict) and saved:  # nor for the parts that are not named
        kwargs["attn_implementation"] = (own if isinstance(own, dict) else {"": own}) | asked
    out = original(cls, config_dict, **kwargs)
    if saved:
        config = out[0] if isinstance(out, tuple) else out
        set_record(config, saved=True)
        if config.architectures and not {"vllm", "sglang"} & sys.modules.keys():  # to them a strict checkpoint stays one
            config.architectures = [name.removeprefix(TRIPWIRE) for name in config.architectures]
    return out


def _by_part(config: PreTrainedConfig, implementation: Any) -> Any:
    """Read an implementation by part; Transformers ignores parts that a config does not have.

    The text part of a model of text is the whole.

    Raises:
        TypeError: it is a config of ours, or several, and no name.
        ValueError: one of our names is asked for in a part that is not there.
    """
    if isinstance(implementation, (LongAttnConfig, list, tuple)):
        raise TypeError(
            f"attn_implementation takes a name, got a {type(implementation).__name__}: hf_longattn.apply(model, config) puts "
            'a config into a model, and longattn=config beside attn_implementation="longattn" loads one under it'
        )
    if isinstance(implementation, NameOf) and implementation in STOCK:  # of a whole whose language model runs the method
        name, method, key = str(implementation), implementation.method, _text_key(config)
        return name if key is None else {"": name, key: NameOf(name_for(method.name), method)}
    if not isinstance(implementation, dict):
        return implementation
    if language_config(config) is config and TEXT not in config.sub_configs and TEXT in implementation:
        implementation = {"" if key == TEXT else key: name for key, name in implementation.items()}
    known = ("", *config.sub_configs)
    if lost := [key for key, name in implementation.items() if key not in known and ours_in(name)]:
        parts = f"its parts are {', '.join(config.sub_configs)}" if config.sub_configs else "it has no parts"
        kind = type(config).__name__
        raise ValueError(f"attn_implementation={implementation} is for {lost[0]!r}, a part that {kind} does not have: {parts}")
    return implementation


def _text_key(config: PreTrainedConfig) -> str | None:
    """The key of a config's part that is the language model; None: that is the whole, or is deeper inside."""
    text = language_config(config)
    return next((key for key in config.sub_configs if text is not config and getattr(config, key, None) is text), None)


def _keeping_our_name(original: Any) -> property:
    """The config's property: None, "the default", does not take a method away, no name of ours is lost, and of a model that
    runs a method it gives a `NameOf`, from which TRL loads a trainer's reference model.
    """

    @functools.wraps(original.fget)
    def getter(self: PreTrainedConfig) -> str | None:  # every layer asks: as few calls as it takes
        if is_dynamo_compiling():
            return getattr(self, IMPLEMENTATION, None)
        own = object.__getattribute__(self, "__dict__")
        name: str | None = own.get(IMPLEMENTATION)
        record = own.get("_longattn")
        if record is None or record.named is None or record.named != name or tracing_context() is not None:
            return name
        runs = get_implementation(language_config(self)) if name in STOCK else name  # of a whole: its language model
        return record.named if runs is name or is_longattn_name(runs) else name

    def setter(self: PreTrainedConfig, value: str | dict[str, Any] | None) -> None:
        ours = get_implementation(self)
        original.fset(self, _by_part(self, value))
        if value is None and is_longattn_name(ours):
            set_implementation(self, ours)
        # a model that runs is switched by the name alone; one that is yet to be built finds its method in the name
        if isinstance(name := get_implementation(self), NameOf) and isinstance(raw_section(self), LongAttnConfig):
            set_implementation(self, str(name))

    return property(getter, setter, original.fdel, original.__doc__)


def _from_pretrained(original: Callable[..., Any], cls: type, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    if isinstance(config, PreTrainedConfig):
        config = _with_section(config, kwargs)
    _refuse_parameters(config, kwargs)
    asked = kwargs.get("attn_implementation", get_implementation(config))
    token = _LOADED.set(True)
    try:
        with _no_unknown_name(cls):
            out = original(cls, *args, config=config, **kwargs)
    finally:
        _LOADED.reset(token)
    model = out[0] if isinstance(out, tuple) else out
    view = View(model)
    keep_learned(view)
    announce_running(view)
    if (adapted := view.running) is not None and view.adapters and isinstance(asked, str) and not is_longattn_name(asked):
        warn(
            f"the adapter was trained under {adapted.name}, and runs under it: attn_implementation={asked!r} is for the "
            "layers that the method leaves alone. To run without it: hf_longattn.remove(model)"
        )
    if not record_in(model.config).saved:
        warn_untrained(view, view.running)
    return out


def _get_correct_attn_implementation(
    original: Callable[..., str], self: Any, requested: Any, *args: Any, **kwargs: Any
) -> str:
    register_combination(requested)
    if isinstance(requested, NameOf):
        requested = _put_method(language_config(self.config), requested)
    if isinstance(requested, str) and is_longattn_name(requested) and methods_in(requested) != short(requested):
        requested = _put_parameters(language_config(self.config), short(requested))
    try:
        return original(self, requested, *args, **kwargs)
    except ValueError as error:
        if meant := hint(requested):
            raise ValueError(f"there is no attention implementation {requested!r}; {meant}") from error
        raise


def _put_method(config: PreTrainedConfig, name: NameOf) -> str:
    """Put a name's method into the config's section, unless a model runs that, or parameters were typed there; returns the
    name alone.
    """
    section = raw_section(config)
    typed = isinstance(section, LongAttnConfig) or (section and not is_whole(section))
    if not typed and is_longattn_name(name) and fits(name.method, config):
        config.longattn = name.method.to_dict()
    return str(name)


def _put_parameters(config: PreTrainedConfig, implementation: str) -> str:
    """The name in a text with parameters, which go into the config's section; ValueError where slots stand there already."""
    section = config.longattn or {}
    if is_whole(section):
        raise ValueError(
            f"the checkpoint (or the config) describes its method with all parameters, and attn_implementation="
            f"{implementation!r} asks for others: load it as it is, and then hf_longattn.apply(model, {implementation!r})"
        )
    name, config.longattn = read_name(implementation, section)
    return name


def _refuse_parameters(config: PreTrainedConfig | None, kwargs: dict[str, Any]) -> None:
    """Parameters of a method beside its name would reach the model's constructor, which knows nothing of them."""
    named = get_implementation(config)  # auto classes read the name into the config
    if name := ours_in(kwargs.get("attn_implementation", named)):
        methods = [] if methods_in(name) == CUSTOM else methods_in(name).split("+")
        known = {"layers", "backend", "train_length"}.union(*map(parameters_of, methods))
        if given := {k: kwargs[k] for k in kwargs.keys() & known}:
            raise TypeError(f"{', '.join(given)} is for the method, not for the model: pass longattn={given}")


def _from_config(original: Callable[..., Any], cls: type, config: PreTrainedConfig, **kwargs: Any) -> Any:
    _refuse_parameters(config, kwargs)
    config = _with_section(config, kwargs)
    if ours_in(kwargs.get("attn_implementation")):  # which is written into it: other models may have it too
        config = copy.deepcopy(config)
    with _no_unknown_name(cls):
        return original(cls, config, **kwargs)


@contextmanager
def _no_unknown_name(cls: type) -> Iterator[None]:
    """Some models look their attention class up by name (Falcon, GPT-J), and die of a KeyError where it is ours."""
    try:
        yield
    except KeyError as error:
        name = error.args[0]
        if not isinstance(name, str) or not is_longattn_name(name):
            raise
        raise ValueError(
            f"{name} applies to 0 layers of {cls.__name__}: it, or a part of it, looks its attention up by name, not through "
            "transformers' attention interface. If that part is a tower beside the language model, name the latter "
            f'alone: attn_implementation={{"text_config": "{name}"}}'
        ) from error


def _with_section(config: PreTrainedConfig, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """The config, or a copy with the `longattn` that is taken out of kwargs."""
    if (section := kwargs.pop("longattn", None)) is not None:
        config = copy.deepcopy(config)
        config.longattn = section
    return config


def _leave_drafts_alone(model: PreTrainedModel) -> None:
    """Heads that predict several tokens ahead (`generate(use_mtp=True)`) are built on a copy of their model's config, and
    share its rotation. Where a method goes by the model's layers or turns its rotation back, they run the model's own
    attention: what they propose the model checks.
    """
    method = raw_section(model.config)
    if "num_mtp_layers" not in vars(model) or not isinstance(method, LongAttnConfig):
        return
    if differs_by_layer(method) or method.remap is not None:
        set_implementation(model.config, own_implementation(before(model.config)))
        model.config.longattn = None


def _post_init(original: Callable[..., None], self: PreTrainedModel) -> None:
    if is_part(self):
        return original(self)  # the whole model knows better what its towers and wrappers do
    _leave_drafts_alone(self)
    view = View(self)
    for c in view.configs:
        if is_longattn_name(get_implementation(c)):
            remember(view, c)
    if any(isinstance(raw_section(c), LongAttnConfig) for c in view.configs):  # of a model that runs a method, or a copy of it
        copy_configs(view)
        view = View(self)
    note_built(self)
    prepare(view)  # first: learned parts must exist before weights are initialised or loaded
    original(self)
    warn_of_lost_softcap(view.layers)
    if not _LOADED.get():
        announce_running(view)
    if not any(is_longattn_name(get_implementation(c)) for c in (self.config, language_config(self.config))):
        _check_unused_section(self.config)


def _check_unused_section(config: PreTrainedConfig) -> None:
    """Raise, or warn, where a config describes a method and does not name it."""
    if not (section := config.longattn):
        return
    if not is_whole(section):  # parameters as they are typed, not what a checkpoint saved
        raise ValueError(
            f"longattn={section} needs the name of its method beside it: attn_implementation="
            f"{section.get('name', 'scale_invariant')!r}" + ("" if "name" in section else ", or whichever it is")
        )
    runs = get_implementation(language_config(config))
    if runs in SERVED:
        return  # `engines.vllm` puts it in
    if runs is not None and runs.removeprefix("paged|") not in STOCK:
        raise ValueError(
            f"the checkpoint (or the config) was made under {LongAttnConfig.parse(section).name}, and attn_implementation="
            f"{runs!r} would run it without: a trainer asks so for an attention of its own, and what it trains would run "
            "under the method again wherever it is loaded. Turn that off (of TRL's AsyncGRPO the tree attention), or save "
            "the model without its method first: hf_longattn.remove(model), model.save_pretrained(...)"
        )
    warn(
        f"config.longattn is set, but the model runs {runs!r}, without the "
        'method: pass attn_implementation="longattn" to use it',
    )


def _replacement(model: PreTrainedModel, implementation: Any) -> LongAttnConfig | str | None:
    """The method that a name asks for in place of the one that a model runs, or ran until its attention was switched; None:
    the name asks for no other one.
    """
    if not isinstance(implementation, str) or not is_longattn_name(implementation):
        return None
    if (target := View(model).target) is None:
        return None
    config = raw_section(target)
    if not isinstance(config, LongAttnConfig) or not config.methods:  # somebody wrote there what is to run
        return None
    if isinstance(implementation, NameOf) and implementation.method.methods and fits(implementation.method, target):
        return None if implementation.method == config else implementation.method
    name = methods_in(implementation)
    if name == CUSTOM or (
        name == short(implementation) and {method_class(x).name for x in name.split("+")} == {m.name for m in config.methods}
    ):
        return None
    return short(implementation)


def _set_attn_implementation(
    original: Callable[..., None], self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any
) -> None:
    if (method := _replacement(self, attn_implementation)) is not None:
        apply(self, method)
        return
    with change(self) as view:
        before = [(c, get_implementation(c)) for c in view.configs]
        attn_implementation = _by_part(self.config, attn_implementation)
        original(self, attn_implementation, *args, **kwargs)
        says, names = language_config(self.config), [get_implementation(c) for c in view.configs]
        if any(map(is_longattn_name, (*names, *(name for _, name in before)))) and any(c is says for c in view.method_configs):
            # transformers passes over those of layers that were copied, and of a body from elsewhere
            for c in view.method_configs:
                set_implementation(c, get_implementation(says))
        for c, implementation in before:
            if is_longattn_name(get_implementation(c)) and not is_longattn_name(implementation):
                remember(view, c, implementation)
        if (name := ours_in(attn_implementation)) and not any(is_longattn_name(get_implementation(c)) for c, _ in before):
            refuse_name(view, name, raw_section(self.config))  # transformers logs that it stays with what it runs
        warn_of_lost_softcap(view.layers)
        prepare(view, verify=True)


def _save_pretrained(original: Callable[..., Any], self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(self, PreTrainedModel) and say_what_runs(self) is not None and kwargs.get("state_dict") is None:
        refuse_to_save(self)
    try:
        out = original(self, save_directory, *args, **kwargs)
    except ValueError as error:
        if "PEFT" not in str(error) or not is_longattn_name(get_implementation(getattr(self, "config", None))):
            raise
        raise ValueError(f"{error}; hf_longattn.save(model, {str(save_directory)!r}, overwrite=True) saves it now") from error
    announce_beside(Path(save_directory))
    return out


def _hash_module(original: Callable[..., str], module: nn.Module) -> str:
    if (base := pretrained_in(module)) is None:
        return original(module)
    return f"{original(module)} {running(base)} {rope.settings_of(base)}"


def _flatten_to_context(original: Callable[..., Any], obj: Any, tensors: list[Any]) -> Any:
    if isinstance(obj, Cache):
        obj = copy.copy(obj)
        vars(obj).pop("_longattn", None)
    return original(obj, tensors)


PATCHES = (
    Patch(
        PreTrainedConfig,
        "longattn",
        lambda _: property(_get_section, _set_section),
        "from_pretrained(longattn=...) accepts only known attributes",
        factory=True,
    ),
    Patch(PreTrainedConfig, "to_dict", _to_dict, "transformers never writes the attention implementation; we must"),
    Patch(
        PreTrainedConfig,
        "from_dict",
        _from_dict,
        "attn_implementation=None, or a dict that names other parts, would load a checkpoint of ours under sdpa; strict ones "
        "name other classes, for vLLM",
    ),
    Patch(
        PreTrainedConfig,
        "_attn_implementation",
        _keeping_our_name,
        "None would remove the method of a config that exists already, and a part that is not there be passed over; by the "
        "name alone TRL would load a reference model without its parameters",
        factory=True,
    ),
    Patch(PreTrainedModel, "from_pretrained", _from_pretrained, "with config=, longattn= would reach the model's constructor"),
    Patch(PreTrainedModel, "_from_config", _from_config, "longattn= would reach the model's constructor"),
    Patch(
        PreTrainedModel,
        "get_correct_attn_implementation",
        _get_correct_attn_implementation,
        "combinations of methods are registered where they are asked for; a typing mistake lists transformers' names only",
    ),
    Patch(
        PreTrainedModel,
        "_initialize_weights",
        initialise,
        "learned parameters that a checkpoint lacks would stay uninitialised, or start as other modules of their class do",
    ),
    Patch(PreTrainedModel, "post_init", _post_init, "check and plan while a model is built, not at its first step"),
    Patch(
        PreTrainedModel,
        "set_attn_implementation",
        _set_attn_implementation,
        "check and plan when the attention is switched",
    ),
    Patch(
        PreTrainedModel,
        "save_pretrained",
        _save_pretrained,
        "a tokenizer beside a longer model would go on cutting texts; of offloaded weights the error names no way out",
    ),
    Patch(PreTrainedTokenizerBase, "save_pretrained", _save_pretrained, "saved after its model, it would go on cutting texts"),
    Patch(
        Cache,
        "reorder_cache",
        carry_token_axes,
        "where pictures stand (M-RoPE) is kept beside a cache, and goes with its rows",
    ),
    Patch(Cache, "batch_repeat_interleave", carry_token_axes, "the positions of pictures are repeated with a cache's rows"),
    Patch(Cache, "batch_select_indices", carry_token_axes, "the positions of pictures are selected with a cache's rows"),
    Patch(
        "transformers.exporters.exporter_dynamo",
        "_flatten_to_context",
        _flatten_to_context,
        "an exported step would take no cache but one with the record of the example's, which those of exported prompts lack",
        optional=True,
    ),
    Patch("transformers.trainer:Trainer", "train", train, "it would continue from weights of another attention"),
    Patch(
        "trl.trainer.utils",
        "hash_module",
        _hash_module,
        "DPO and KTO would find the reference's log-probabilities that another attention gave the same weights",
        optional=True,
    ),
)
