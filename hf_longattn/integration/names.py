"""The names under which transformers finds us.

Every method and every common combination has a short alias ("scale_invariant") and a canonical name
("hf_longattn.scale_invariant"), which is what a checkpoint stores: without this package, loading fails with a message
that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from ..config import CUSTOM
from ..methods.registry import LISTENERS, REMOVED, did_you_mean, method_names, removed

PREFIX = "hf_longattn."
#: Before the class names in a strict checkpoint's config, which every other engine dispatches on and then refuses.
TRIPWIRE = "LongAttn"
#: Combinations with a name of their own; any other goes by "longattn" and a longattn section.
COMBINATIONS: tuple[str, ...] = (
    "infoscale+cosscale",
    "logn+cosscale",
    "scale_invariant+adaptive_temperature",
    "adaptive_temperature+output_layer_norm",
    "adaptive_temperature+output_standardise",
)


def aliases() -> tuple[str, ...]:
    return (CUSTOM, *method_names(), *COMBINATIONS)


def register_names(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register the attention and the mask function under every name, now and later; both, or padding is lost in silence."""

    def known_as(alias: str) -> None:
        for name in (alias, PREFIX + alias):
            AttentionInterface.register(name, attention)
            AttentionMaskInterface.register(name, mask)

    for alias in aliases():
        known_as(alias)
    LISTENERS.append(known_as)


def hint(name: Any) -> str:
    """What to write in place of a name that transformers does not know, if it looks like one of ours."""
    parts = short(name).split("+") if isinstance(name, str) else []
    if gone := next((part for part in parts if part in REMOVED), None):
        return removed(gone)
    if len(parts) > 1 and set(parts) <= set(method_names()):
        known = name_for("+".join(parts))
        section = f' with longattn={{"preset": {"+".join(parts)!r}}}' if known == CUSTOM else ""
        return f"did you mean attn_implementation={known!r}{section}?"
    meant = did_you_mean(short(name).replace("-", "_"), aliases()) if parts else ""
    if isinstance(name, str) and name.startswith(PREFIX):
        meant += f"{short(name)} may be a method that lives elsewhere: hf_longattn.register(...) it before you load; "
    return f"{meant}methods of hf_longattn: {', '.join(sorted(aliases()))}" if meant else ""


def is_ours(implementation: str | None) -> bool:
    return implementation is not None and short(implementation) in aliases()


def short(implementation: str) -> str:
    return implementation.removeprefix(PREFIX)


def name_for(config_name: str) -> str:
    """The alias to install for a config: its own name where that is registered, else the generic one."""
    parts = set(config_name.split("+"))
    return next((a for a in aliases() if set(a.split("+")) == parts), CUSTOM)
