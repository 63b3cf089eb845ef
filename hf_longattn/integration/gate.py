"""Changes of a model's attention beside its forward passes: a pass sees all of the old, or all of the new."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets forward passes of any number of threads through, or one thread that changes what they read."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._passing: set[int] = set()
        self._changing: int | None = None

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        return Gate, ()  # nobody waits at a copy's

    def enter(self) -> None:
        """A forward pass begins in this thread: waits for a change in another one to end."""
        with self._condition:
            self._condition.wait_for(self._mine)
            self._passing.add(threading.get_ident())

    def leave(self) -> None:
        with self._condition:
            self._passing.discard(threading.get_ident())
            self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While open, no other thread passes or changes; waits for those that do. Nests.

        Raises:
            RuntimeError: this thread is inside a forward pass that another thread's change is waiting for.
        """
        here = threading.get_ident()
        with self._condition:
            if here in self._passing and not self._mine():
                raise RuntimeError(
                    "the model's attention cannot be changed inside a forward pass while another thread changes it"
                )
            self._condition.wait_for(self._mine)
            before, self._changing = self._changing, here
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._passing <= {here})
            yield
        finally:
            with self._condition:
                self._changing = before
                self._condition.notify_all()

    def _mine(self) -> bool:
        return self._changing in (None, threading.get_ident())
