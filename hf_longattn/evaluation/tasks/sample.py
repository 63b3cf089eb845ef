"""Samples of text tasks: one text with its answers marked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

Built = TypeVar("Built")
#: What a label says where there is no loss.
IGNORE = -100


@dataclass(frozen=True)
class Sample:
    """One text for a causal language model.

    Args:
        input_ids: int64 (length,), answers included.
        spans: the [first, last) positions of each answer.
        depths: of each answer, the share of the text before what it asks for (0 first, 1 last).
        prompt_length: everything before is the prompt that a generation starts from.
    """

    input_ids: Tensor
    spans: tuple[tuple[int, int], ...]
    depths: tuple[float, ...]
    prompt_length: int

    @property
    def labels(self) -> Tensor:
        """For training: the ids, IGNORE in the prompt."""
        labels = self.input_ids.clone()
        labels[: self.prompt_length] = IGNORE
        return labels


class TextTask(Protocol):
    """Samples of any length; sample `index` is always the same."""

    def check(self, length: int) -> None:
        """Raise ValueError, with the length that is needed, if there is no room for the task in `length` tokens."""

    def sample(self, index: int, length: int) -> Sample: ...


def largest(build: Callable[[int], Built], tokens: Callable[[Built], int], least: int, limit: int) -> Built | None:
    """Build a sample of as many parts as `limit` tokens hold; None: they do not hold `least` parts."""
    few, best = least, build(least)
    if tokens(best) > limit:
        return None
    guess = max(few + 1, few * limit // tokens(best))
    while (used := tokens(tried := build(guess))) <= limit:
        few, best, guess = guess, tried, guess + max(1, guess * (limit - used) // limit)
    many = guess
    while many - few > 1:
        middle = (few + many) // 2
        if tokens(tried := build(middle)) <= limit:
            few, best = middle, tried
        else:
            many = middle
    return best
