"""The gate of a model, at which its changes and its forward passes wait for each other: Threads in docs/explain/design.md."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref


@dataclass(eq=False)
class Gate:
    """The gate between a model's changes and its forward passes: passes begin, and changes are made, under one lock.

    Args:
        lock: held by a pass as it begins, and by a change to its end. Nests.
        begun: the `ForwardContext` of each pass that began, weakly: one that a thread left behind when it died is over.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    begun: list[ref[Any]] = field(default_factory=list)

    @property
    def running(self) -> list[Any]:
        """The passes that have not ended."""
        return [forward_pass for one in self.begun if (forward_pass := one()) is not None and forward_pass.runs]

    @property
    def runs_here(self) -> bool:
        """True: one of them is this thread's, which a change would wait for in vain."""
        return any(forward_pass.thread == threading.get_ident() for forward_pass in self.running)

    def let_in(self, forward_pass: Any) -> None:
        """Note a pass that begins, and forget those that are over."""
        self.begun[:] = map(ref, [*self.running, forward_pass])

    def wait(self) -> None:
        """Wait for the passes of other threads; none begins meanwhile, since this one holds the lock."""
        while self.running and not self.runs_here:
            time.sleep(1e-3)


#: By state, or by model where no method came yet.
_GATES: WeakKeyDictionary[Any, Gate] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_GATES.clear)  # there are no other threads, whatever they were doing


def gate_of(of: Any) -> Gate:
    """Return the gate of a state, or of a model without one."""
    gate = _GATES.get(of)
    return _GATES.setdefault(of, Gate()) if gate is None else gate


def share_gate(state: Any, model: Any) -> None:
    """Give a state that a change puts into a model the model's gate, at which the change stands."""
    _GATES.setdefault(state, gate_of(model))


@contextmanager
def at_gate(of: Callable[[], Any]) -> Iterator[Gate]:
    """Hold the gate of what `of` returns: asked again after the wait, since a change may have put another state there."""
    while True:
        gate = gate_of(of())
        with gate.lock:
            if gate_of(of()) is gate:
                yield gate
                return
