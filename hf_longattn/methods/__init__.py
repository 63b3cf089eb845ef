"""The methods: one file each, a frozen dataclass with its formula in plain PyTorch.

A new method is one file here, a subclass of its slot in `base`, and one line in `registry`.
"""

from typing import Any

from .registry import METHODS, method_class

_BY_CLASS = {path.partition(".")[2]: name for name, path in METHODS.items()}
__all__ = list(_BY_CLASS)


def __getattr__(name: str) -> Any:
    if name in _BY_CLASS:
        return method_class(_BY_CLASS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
