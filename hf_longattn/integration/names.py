"""The names under which transformers finds us.

Every method and every combination ("rerope+infoscale") has a short name and a canonical one ("hf_longattn.scale_invariant"),
which is what a checkpoint stores: without this package, loading fails with a message that names it. Where a name is asked for,
parameters may stand behind it ("rerope:window=4096"); they go into the section.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

from transformers import AttentionInterface, AttentionMaskInterface

from ..config import CUSTOM, PREFIX, LongAttnConfig, names_in
from ..slots.registry import LISTENERS, STOCK, did_you_mean, from_elsewhere, list_methods, meant
from .config_records import raw_section
from .internals import get_implementation

#: What vLLM makes of the name of ours in a config, where it builds the model.
SERVED = ("vllm", "vllm_mla")
#: The attention and the mask function that transformers gets under all names.
_FUNCTIONS: list[Callable[..., Any]] = []
#: What is registered of attentions and of masks; not what is put around one in Transformers' own objects, as DeepSpeed does.
_KNOWN = AttentionInterface(), AttentionMaskInterface()


def register_names(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register the attention and the mask function under every name, now and later; both, or padding is lost in silence."""
    _FUNCTIONS[:] = attention, mask
    for name in (CUSTOM, *list_methods()):
        _register(name, may_share=True)
    LISTENERS.append(_register)


def _register(alias: str, may_share: bool = False) -> None:
    """Register the short and the canonical name; with `may_share` the latter alone if another package has the short one."""
    names = [alias, PREFIX + alias]
    if (other := _registered_by_another(alias)) is not None:
        if other in [function.__module__ for function in _FUNCTIONS]:
            raise ImportError(
                "hf_longattn was imported already, and taken out of sys.modules since; models and transformers hold what "
                "was imported first. Start Python anew, or importlib.reload(hf_longattn)"
            )
        if not may_share:
            raise ValueError(
                f"{alias!r} is the name of an attention that transformers has already: choose another for the method"
            )
        names.remove(alias)
    attention, mask = _FUNCTIONS
    for name in names:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def _registered_by_another(name: str | None) -> str | None:
    """The module of an attention or a mask function that transformers has under a name, and that does not call ours."""
    for known, own in zip(_KNOWN, _FUNCTIONS, strict=True):
        if (there := known.get(name)) is not own and there is not None and inspect.unwrap(there) is not own:
            return getattr(there, "__module__", None) or repr(there)
    return None


def refuse_taken(name: str | None) -> None:
    """Raise RuntimeError where another package's attention has one of our names, and would run in the method's place."""
    if (other := _registered_by_another(name)) is not None and is_longattn_name(name):
        raise RuntimeError(
            f"{other} registered an attention named {name!r} with transformers, which would run in place of hf_longattn's. "
            f"hf_longattn.apply(model, {name!r}) puts the method in under its full name, {PREFIX + short(name)!r}, which "
            "attn_implementation takes too"
        )


def register_combination(implementation: Any) -> None:
    """Make a combination of methods known under its name, once somebody uses it."""
    if isinstance(implementation, str) and "+" in implementation and is_longattn_name(implementation):
        _register(methods_in(implementation))


def hint(name: Any) -> str:
    """Suggest a name in place of one that Transformers does not know, if it looks like a method's."""
    if not isinstance(name, str):
        return ""
    parts = methods_in(name).split("+")
    unknown = [x for x in parts if x not in list_methods()] if len(parts) > 1 else parts
    if name.startswith(PREFIX) and unknown:
        return from_elsewhere(unknown[0])
    if len(parts) > 1:
        said = f"{', '.join(map(repr, unknown))} is no method; {''.join(map(meant, unknown))}"
        return said if len(unknown) < len(parts) else ""
    likely = "" if parts[0] in STOCK else meant(parts[0]) or did_you_mean(parts[0], (CUSTOM,))
    return f"{likely}methods of hf_longattn: {', '.join(sorted((CUSTOM, *list_methods())))}" if likely else ""


def is_longattn_name(implementation: str | None) -> TypeGuard[str]:
    """Tell whether a name is that of a method, of several joined by "+", or of a longattn section."""
    if implementation is None:
        return False
    name = methods_in(implementation)
    return name == CUSTOM or set(name.split("+")) <= set(list_methods())


def ours_in(implementation: str | dict[str, Any] | None) -> str | None:
    """The first of our names in what is asked for, which may be a dict by sub-config."""
    if isinstance(implementation, dict):
        return next(filter(None, map(ours_in, implementation.values())), None)
    return implementation if is_longattn_name(implementation) else None


def short(implementation: str) -> str:
    return implementation.removeprefix(PREFIX)


def methods_in(implementation: str) -> str:
    """A short name without the parameters behind it."""
    return names_in(short(implementation))


def name_for(config_name: str) -> str:
    """The name to install for a config: that of its methods, or of its section where several parts have their own."""
    name = config_name if is_longattn_name(config_name) else CUSTOM
    register_combination(name)
    return name if _registered_by_another(name) is None else PREFIX + name


def parsed_config(config: Any) -> LongAttnConfig | None:
    """The method that a config names and describes; None: it names none. ValueError: the two disagree."""
    name = get_implementation(config)
    return LongAttnConfig.parse(short(name), raw_section(config)) if is_longattn_name(name) else None
