"""Doing something as soon as a package is imported, and nothing before; importing names when they are first used.

Methods must be registered with transformers, and our adapters with PEFT, before anyone uses either. Importing those for it
costs seconds, which nobody should pay who asks for `--help` or reads a config: registration waits until they are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(package: str, action: Callable[[], object]) -> None:
    """Call `action` right after `package` is imported: now if it is already, else as the last step of its import.

    What `action` raises, the import raises.
    """
    watching = next((f for f in sys.meta_path if isinstance(f, _Watch) and f.package == package), None)
    if sys.modules.get(package) is not None:
        action()
    elif watching is not None:
        watching.actions.append(action)
    else:
        sys.meta_path.insert(0, _Watch(package, action))


class _Watch(MetaPathFinder):
    """Finds what the other finders find, with one more step after the package's own code has run."""

    def __init__(self, package: str, action: Callable[[], object]) -> None:
        self.package, self.actions = package, [action]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.package:
            return None
        others = (f for f in sys.meta_path if f is not self)
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is None or (loader := spec.loader) is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this one: the loader is itself again
            execute(module)
            for action in self.actions:
                action()
            sys.meta_path.remove(self)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def names_of(package: str, home: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when they are first used.

    Args:
        home: the names by the module in the package that has them.
    """

    def getattr_(name: str) -> Any:
        for module, names in home.items():
            if name in names:
                return getattr(import_module(f".{module}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_
