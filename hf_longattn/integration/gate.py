"""Changes of a model's attention beside its forward passes: a pass sees all of the old, or all of the new."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakSet

#: Every this many seconds who waits looks for passes that ended without a word.
PATIENCE = 0.5


class Gate:
    """Lets forward passes of any number of threads through, or one thread that changes what they read."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._passing: dict[int, list[FrameType]] = {}  # by thread: what runs its passes, the innermost last
        self._changing: int | None = None
        _GATES.add(self)

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        return Gate, ()  # nobody waits at a copy's

    def enter(self, frame: FrameType) -> None:
        """A forward pass begins in this thread, and ends with this frame at the latest: waits for a change in another thread.

        One inside another pass does not wait: the change waits for the outer one.
        """
        here = threading.get_ident()
        with self._condition:
            self._forget_interrupted()
            if here not in self._passing:
                self._condition.wait_for(self._mine)
            self._passing.setdefault(here, []).append(frame)

    def leave(self) -> None:
        here = threading.get_ident()
        with self._condition:
            if len(self._passing.get(here, ())) > 1:
                self._passing[here].pop()
            else:
                self._passing.pop(here, None)
            self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While open, no other thread passes or changes; waits for those that do. Nests.

        Raises:
            RuntimeError: this thread is inside a forward pass that another thread's change is waiting for.
        """
        here = threading.get_ident()
        with self._condition:
            self._forget_interrupted()
            if here in self._passing and not self._mine():
                raise RuntimeError(
                    "the model's attention cannot be changed inside a forward pass while another thread changes it"
                )
            self._condition.wait_for(self._mine)
            before, self._changing = self._changing, here
        try:
            with self._condition:
                while not self._condition.wait_for(lambda: self._passing.keys() <= {here}, PATIENCE):
                    self._forget_interrupted()
            yield
        finally:
            with self._condition:
                self._changing = before
                self._condition.notify_all()

    def _mine(self) -> bool:
        return self._changing in (None, threading.get_ident())

    def _forget_interrupted(self) -> None:
        """Torch calls the hook behind a pass that raised, but not behind one that was interrupted (KeyboardInterrupt)."""
        for thread, frames in list(self._passing.items()):
            frames[:] = [frame for frame in frames if _runs(frame)]
            if not frames:
                del self._passing[thread]


def _runs(frame: FrameType) -> bool:
    try:
        frame.clear()  # Python refuses it for a frame that runs
    except RuntimeError:
        return True
    return False


_GATES: WeakSet[Gate] = WeakSet()


def _open_all() -> None:
    """In a forked process there are no other threads, whatever they were doing."""
    for gate in list(_GATES):
        gate.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_all)
