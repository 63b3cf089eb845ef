"""What happens to a program while it trains or reads, by hooks that PyTorch offers everyone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook


def interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def at_step(number: int, happens: Callable[[], Any] = interrupt) -> Iterator[None]:
    """While open, this happens in a training's step of that number, from 0 on: after its gradients, before weights change."""
    steps, of = itertools.count(), []

    def before(optimizer: Any, *_: Any) -> None:
        of.append(optimizer)
        if optimizer is of[0] and next(steps) == number:  # one optimiser may be made of others, which come after it
            happens()

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def at_pass(kind: type, when: Callable[[], bool] = lambda: True, happens: Callable[[], Any] = interrupt) -> Iterator[None]:
    """While open, this happens whenever a model of a class is to read a text, and `when` says so."""

    def before(module: Any, _: Any) -> None:
        if isinstance(module, kind) and when():
            happens()

    handle = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
