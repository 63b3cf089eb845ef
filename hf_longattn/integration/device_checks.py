"""Checks that a device makes while the host goes on: decoding waits for no value, and a mistake is named a call later."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

#: As many answers may be on their way.
OPEN = 256


class Claims:
    """Assumptions of a model's passes that the device has not confirmed yet."""

    def __init__(self) -> None:
        self._open: deque[tuple[Any, Tensor, str]] = deque()

    def claim(self, holds: Tensor, message: str) -> None:
        """Take for granted that `holds`, bool without a dimension, is true; ValueError at once where reading costs nothing."""
        if holds.device.type != "cuda":
            _refuse_false(holds, message)
            return
        answer = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
        with torch.cuda.device_of(holds):
            answer.copy_(holds, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._open.append((event, answer, message))
        if len(self._open) > OPEN:
            event.synchronize()

    def check(self) -> None:
        """Raise ValueError for a claim that the device found false; those that it has not come to yet stay open."""
        while self._open:
            try:
                event, answer, message = self._open.popleft()
            except IndexError:  # another thread took it
                return
            if not event.query():
                self._open.appendleft((event, answer, message))
                return
            _refuse_false(answer, message)

    def __reduce__(self) -> tuple[type[Claims], tuple[()]]:
        return Claims, ()  # copies of a model begin anew


def _refuse_false(holds: Tensor, message: str) -> None:
    if not bool(holds):
        raise ValueError(message)
