"""Tables that calls share (gain and bias by distance, angles by position), kept within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

Tables = tuple[Tensor, ...]


class TableCache:
    """The tables used last, at most `max_bytes` of them; they are freed with the cache.

    A model's owner keeps one and hands it to every call. Tables larger than all of it are built anew each time, and so are
    those of many layers that do not fit together: give it room for what one forward pass needs. Copies start empty.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self._kept: dict[Hashable, Tables] = {}  # in the order of their last use

    def get(self, name: Hashable, build: Callable[[], Tables]) -> Tables:
        """build(), or what it gave under this name before."""
        if (tables := self._kept.pop(name, None)) is not None:
            self._kept[name] = tables
            return tables
        tables = build()
        size = _nbytes(tables)
        if size <= self.max_bytes:
            excess = self.nbytes + size - self.max_bytes
            for oldest in list(self._kept):
                if excess > 0:
                    excess -= _nbytes(self._kept.pop(oldest, ()))
            self._kept[name] = tables
        return tables

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, list(self._kept.values())))

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return TableCache, (self.max_bytes,)


def _nbytes(tables: Tables) -> int:
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tables}.values())


#: For calls outside of a model.
SHARED = TableCache()
