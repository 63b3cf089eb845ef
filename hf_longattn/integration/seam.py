"""Seams: where another library offers no hook, one of its functions is wrapped. Each is declared once, with its reason.

The lists: `seams.SEAMS` and `engines.paged.SEAMS` for transformers, `engines.vllm.resolution.SEAMS`, and
`hf_longattn.sharing.adapters.SEAMS` for PEFT. Nothing else is patched, and nothing by another way than `install`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from ..lazy_imports import when_imported


class Seam(NamedTuple):
    """One function of another library, and what stands in its place.

    Args:
        owner: the class, or "module:class" of one that is wrapped as soon as its module is imported; or the module of a
            function, which is wrapped wherever it has been imported by name.
        wrapper: takes the original, then what that takes, and calls it first or last; of a seam that is `whole`, it takes
            the original alone (None: there was none) and returns what stands in its place.
        why: what would go wrong without.
    """

    owner: type | ModuleType | str
    name: str
    wrapper: Callable[..., Any]
    why: str
    whole: bool = False

    def __str__(self) -> str:
        owner = self.owner.partition(":")[2] if isinstance(self.owner, str) else self.owner.__name__.rpartition(".")[2]
        return f"{owner}.{self.name}"


_INSTALLED: set[tuple[type | ModuleType | str, str]] = set()


def install(*seams: Seam) -> None:
    """Put wrappers in their places, once per process however often it is called."""
    for seam in seams:
        if (seam.owner, seam.name) in _INSTALLED:
            continue
        _INSTALLED.add((seam.owner, seam.name))
        if isinstance(seam.owner, str):
            when_imported(seam.owner.partition(":")[0], functools.partial(_install_late, seam))
        else:
            _install(seam.owner, seam)


def _install_late(seam: Seam) -> None:
    module, _, name = str(seam.owner).partition(":")
    _install(getattr(sys.modules[module], name), seam)


def _install(owner: type | ModuleType, seam: Seam) -> None:
    present = inspect.getattr_static(owner, seam.name, None)
    if seam.whole:
        setattr(owner, seam.name, seam.wrapper(present))
        return
    kind: Any = type(present) if isinstance(present, (classmethod, staticmethod)) else lambda function: function
    original = getattr(present, "__func__", present)

    @functools.wraps(original)  # type: ignore[arg-type]
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return seam.wrapper(original, *args, **kwargs)

    if isinstance(owner, type):  # where pickles find it, also where it was inherited
        wrapped.__module__, wrapped.__qualname__ = owner.__module__, f"{owner.__qualname__}.{seam.name}"
    everywhere = list(sys.modules.values()) if isinstance(owner, ModuleType) else ()
    for place in (owner, *(m for m in everywhere if m is not owner and getattr(m, "__dict__", {}).get(seam.name) is present)):
        setattr(place, seam.name, kind(wrapped))
