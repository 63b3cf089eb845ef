"""Tables that calls share (gain and bias by distance, angles by position), kept within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .tracing import keepable, shareable

Tables = tuple[Tensor, ...]


class TableCache:
    """The tables used last, at most `max_bytes` of them; they are freed with the cache.

    A model's owner keeps one and hands it to every call. Tables larger than all of it are built anew each time, and so are
    those of many layers that do not fit together: give it room for what one forward pass needs. Copies start empty.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self._kept: dict[Hashable, Tables] = {}  # in the order of their last use
        self._captured: dict[Hashable, Tables] = {}  # which CUDA graphs read for as long as they live

    def get(self, name: Hashable, build: Callable[[], Tables]) -> Tables:
        """The tables kept under a name; else those that build() makes, kept from now on."""
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

    def beside(self, x: Tensor, name: Hashable, build: Callable[[], Tables]) -> Tables:
        """`get`, if results computed beside x may be kept (see `keepable`); else build().

        While a CUDA graph is captured nothing new is kept, but tables that are kept already serve the graph.
        """

        def build_for_all() -> Tables:
            with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
                return build()

        if keepable(x):
            return self.get(name, build_for_all)
        if not shareable(x) or name not in self._kept:
            return build()
        self._captured[name] = self._kept[name]
        return self._captured[name]

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, list(self._kept.values())))

    def __reduce__(self) -> tuple[Any, ...]:
        return TableCache, (self.max_bytes,)


def _nbytes(tables: Tables) -> int:
    every = [y for x in tables for y in (x, *_MADE_OF.get(x, {}).values())]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in every}.values())


_MADE_OF: MutableMapping[Tensor, dict[Hashable, Tensor]] = WeakTensorKeyDictionary()


def made_of(table: Tensor, name: Hashable, build: Callable[[], Tensor]) -> Tensor:
    """A tensor derived from a table by build(), kept under a name: freed with the table, and counted among its cache's bytes.

    While a CUDA graph is captured nothing new is kept: outside of the graph it would hold no values.
    """
    if (made := _MADE_OF.get(table, {}).get(name)) is None:
        made = build()
        if keepable(table):
            _MADE_OF.setdefault(table, {})[name] = made
    return made


#: For calls outside of a model.
SHARED = TableCache()
