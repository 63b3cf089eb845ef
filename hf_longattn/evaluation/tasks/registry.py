"""Every text task by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from ...slots.registry import did_you_mean
from .needle import NeedleTask
from .sample import Sample, TextTask
from .text import LINE_TASKS, LineTask

ALIASES = {"argmax_retrieval": "max_retrieval"}
#: Tasks that hide something in the user's own text.
HAYSTACK_TASKS = ("needle", "needles")
TASK_NAMES = (*HAYSTACK_TASKS, *LINE_TASKS)


class NeedleGrid:
    """One needle a text, at `depths` places from first to last: sample i has depth i modulo their number."""

    def __init__(self, tokenizer: Any, haystack: str | Tensor, depths: int, seed: int, bos: str) -> None:
        if depths < 2:
            raise ValueError(f"a grid of depths needs at least 2, got {depths}")
        self.task, self.depths = NeedleTask(tokenizer, haystack, needles=1, seed=seed, bos=bos), depths

    def check(self, length: int) -> None:
        self.task.check(length)

    def sample(self, index: int, length: int) -> Sample:
        depth = index % self.depths / (self.depths - 1)
        # the place in the grid, whatever token that is: the same at every length
        return dataclasses.replace(self.task.sample(index, length, depths=[depth]), depths=(depth,))


def make_task(
    name: str, tokenizer: Any, haystack: str | Tensor | None = None, depths: int = 5, seed: int = 0, bos: str = "auto"
) -> TextTask:
    """A text task by name.

    Args:
        haystack: the text for `needle` and `needles`, which need one.
        depths: places of `needle`.
        bos: see `Encoder`.

    Raises:
        ValueError: there is no such task; the message says which is near.
    """
    if (name := ALIASES.get(name, name)) not in TASK_NAMES:
        raise ValueError(f"unknown task {name!r}; {did_you_mean(name, TASK_NAMES)}known tasks: {', '.join(TASK_NAMES)}")
    if name in HAYSTACK_TASKS:
        if haystack is None:
            raise ValueError(f"{name} hides needles in a text: give one")
        if name == "needle":
            return NeedleGrid(tokenizer, haystack, depths, seed, bos)
        return NeedleTask(tokenizer, haystack, seed=seed, bos=bos)
    make, least = LINE_TASKS[name]
    return LineTask(tokenizer, make, least, seed, bos)
