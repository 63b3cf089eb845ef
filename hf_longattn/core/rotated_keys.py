"""Keys of a KV cache that are turned once for all later tokens, and their norms.

They are made of the keys that the cache holds, and serve while these do not change. Whoever keeps them sees a change by the
keys' memory and PyTorch's count of writes, without reading a key. Writes past that count, through `.data` or NumPy, go
unnoticed: only reading all keys again would find them, which is as much work as a token's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

import torch
from torch import Tensor

#: Keys by which a buffer grows.
ROOM = 256
#: So many keys beyond those that are asked for are turned with them: most decoded tokens then turn none.
AHEAD = 64
#: Keys that are turned at a time.
STEP = 2048
#: Fewer keys than these are turned as they are read.
WORTH = 1024


class RotatedKeys:
    """Rotated keys and norms of one layer's cache, by column, made where they are asked for.

    Whoever keeps them drops them when the cache's keys change, which is not looked at here.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Tensor, int, int]] = {}  # a buffer, the column that it begins with, and the next one

    def get(self, name: Hashable, columns: slice, until: int, make: Callable[[slice], Tensor]) -> Tensor:
        """Get the vectors kept under a name for some columns, (batch, kv_heads, columns, width); missing ones are made.

        Args:
            until: the end of the columns that hold keys.
            make: makes the vectors of some columns.
        """
        buffer, first, end = self._made.get(name, (None, 0, -1))
        if not first <= columns.start <= end:
            buffer, first, end = None, columns.start, columns.start
        if end < columns.stop:
            buffer = self._extended(buffer, first, end, stop := min(columns.stop + AHEAD, until), make)
            self._made[name] = buffer, first, stop
        assert buffer is not None
        return buffer[:, :, columns.start - first : columns.stop - first]

    @staticmethod
    def _extended(buffer: Tensor | None, first: int, end: int, stop: int, make: Callable[[slice], Tensor]) -> Tensor:
        with torch.no_grad():
            for start in range(end, stop, STEP):
                piece = slice(start, min(start + STEP, stop))
                made = make(piece)
                if buffer is None or buffer.shape[2] < stop - first:
                    with torch.inference_mode(False):  # a later pass may write into it outside of that mode
                        larger = made.new_empty(*made.shape[:2], stop - first + ROOM, made.shape[3])
                    if buffer is not None:
                        larger[:, :, : end - first] = buffer[:, :, : end - first]
                    buffer = larger
                buffer[:, :, piece.start - first : piece.stop - first] = made
        assert buffer is not None
        return buffer

    def crop(self, length: int) -> None:
        """Forget what was made of columns from `length` on: other keys are to take their place."""
        self._made = {name: (buffer, first, min(end, length)) for name, (buffer, first, end) in self._made.items()}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _, _ in self._made.values())


#: From what keys are turned by, and a cache's keys, to the `RotatedKeys` made of these; None: none are kept.
Keep: TypeAlias = Callable[[Hashable, Tensor], RotatedKeys | None]
