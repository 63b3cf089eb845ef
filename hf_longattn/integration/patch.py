"""Patches: where another library offers no hook, one of its functions is wrapped. Each is declared once, with its reason.

The lists: `patches.PATCHES` and `engines.paged.PATCHES` for transformers, the first for TRL too,
`engines.vllm.resolution.PATCHES`, and `hf_longattn.sharing.adapters.PATCHES` for PEFT. Nothing else is patched, and nothing
by another way than `install`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from ..lazy_imports import when_imported


class Patch(NamedTuple):
    """One function of another library, and what stands in its place.

    Args:
        owner: the class, or the module of a function, which is wrapped wherever it has been imported by name; or
            "module:class" or "module" of what is wrapped as soon as that module is imported.
        wrapper: takes the original, then what that takes, and calls it first or last; of a patch that is a `factory`, it takes
            the original alone (None: there was none) and returns what stands in its place.
        why: what would go wrong without.
        optional: other releases, which have no such function, need none in its place.

    Raises:
        ImportError: when it is installed, if the function is not there.
    """

    owner: type | ModuleType | str
    name: str
    wrapper: Callable[..., Any]
    why: str
    factory: bool = False
    optional: bool = False

    def __str__(self) -> str:
        owner = self.owner if isinstance(self.owner, str) else self.owner.__name__
        return f"{re.split('[.:]', owner)[-1]}.{self.name}"


_INSTALLED: set[tuple[type | ModuleType | str, str]] = set()


def install(*patches: Patch) -> None:
    """Put wrappers in their places, once per process however often it is called."""
    for patch in patches:
        if (patch.owner, patch.name) in _INSTALLED:
            continue
        if isinstance(patch.owner, str):
            when_imported(patch.owner.partition(":")[0], functools.partial(_install_late, patch))
        else:
            _install(patch.owner, patch)
        _INSTALLED.add((patch.owner, patch.name))


def _install_late(patch: Patch) -> None:
    module, _, name = str(patch.owner).partition(":")
    _install(getattr(sys.modules[module], name) if name else sys.modules[module], patch)


def _install(owner: type | ModuleType, patch: Patch) -> None:
    present = inspect.getattr_static(owner, patch.name, None)
    if patch.factory:
        setattr(owner, patch.name, patch.wrapper(present))
        return
    if present is None and patch.optional:
        return
    if present is None:
        package = (owner.__module__ if isinstance(owner, type) else owner.__name__).partition(".")[0]
        raise ImportError(
            f"{package} {sys.modules[package].__version__} has no {patch}, without whose wrapper {patch.why}: install a "
            f"release of {package} that this one of hf_longattn was tested with"
        )
    kind: Any = type(present) if isinstance(present, (classmethod, staticmethod)) else lambda function: function
    original = getattr(present, "__func__", present)

    @functools.wraps(original)  # type: ignore[arg-type]
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return patch.wrapper(original, *args, **kwargs)

    if isinstance(owner, type):  # where pickles find it, also where it was inherited
        wrapped.__module__, wrapped.__qualname__ = owner.__module__, f"{owner.__qualname__}.{patch.name}"
    everywhere = list(sys.modules.values()) if isinstance(owner, ModuleType) else ()
    for place in (owner, *(m for m in everywhere if m is not owner and getattr(m, "__dict__", {}).get(patch.name) is present)):
        setattr(place, patch.name, kind(wrapped))
