"""Synthetic text tasks of any length that need no download, made from a seed alone.

After Mohtashami & Jaggi 2023 (passkey), Hsieh et al. 2024, RULER (multi_key), Veličković et al. 2024 (max_retrieval; "argmax
retrieval" of Li et al. 2025 is the same task) and Li et al. 2025 (dictionary_lookup). The wording, the made-up words and the
sizes are ours, so that levels compare between methods here and not with published ones.

Every task is a list of lines that is made as long as fits, a question, and an answer that is scored token by token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..encoder import Encoder
from .ruler_prompts import NOISE
from .sample import Sample, largest

_SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")


@dataclass
class Draft:
    """A text in pieces: its lines, the question, the answer behind it, and which line holds that."""

    lines: list[str]
    question: str
    answer: str
    holder: int


#: (rng, number of lines) -> Draft.
Maker = Callable[[random.Random, int], Draft]


class LineTask:
    """A task made of lines.

    Args:
        tokenizer: a transformers tokenizer.
        make: writes a draft of about as many lines as it is told.
        least: the fewest lines that make sense.
        seed: samples of different seeds are independent.
        bos: see `Encoder`.
    """

    def __init__(self, tokenizer: Any, make: Maker, least: int, seed: int, bos: str) -> None:
        self.encode, self.make, self.least, self.seed = Encoder(tokenizer, bos), make, least, seed

    def check(self, length: int) -> None:
        if (needed := len(self._build(0, self.least).input_ids)) > length:
            raise ValueError(f"{length} tokens have no room for this task: about {needed} are needed")

    def sample(self, index: int, length: int) -> Sample:
        """Sample `index` with as many lines as fit into `length` tokens, answers included."""
        sample = largest(partial(self._build, index), lambda s: len(s.input_ids), self.least, length)
        if sample is None:
            needed = len(self._build(index, self.least).input_ids)
            raise ValueError(f"{length} tokens have no room for sample {index}: it needs {needed}")
        return sample

    def _build(self, index: int, lines: int) -> Sample:
        draft = self.make(random.Random(f"{self.seed}:{index}"), lines)
        ids = list(self.encode.start)
        starts: list[int] = []
        for line in draft.lines:
            starts.append(len(ids))
            ids += self.encode(line)
        depth = starts[draft.holder] / max(len(ids), 1)
        ids += self.encode(draft.question)
        answer = self.encode(draft.answer)
        return Sample(torch.tensor(ids + answer, device="cpu"), ((len(ids), len(ids) + len(answer)),), (depth,), len(ids))


def words(rng: random.Random, count: int) -> list[str]:
    """Different made-up words of three syllables."""
    out: dict[str, None] = {}
    while len(out) < count:
        out["".join(rng.choice(_SYLLABLES) for _ in range(3))] = None
    return list(out)


def passkey(rng: random.Random, count: int) -> Draft:
    """One number in repeated filler."""
    key = rng.randrange(10_000, 100_000)
    at, lines = rng.randint(0, count), [f" {NOISE}"] * count
    lines.insert(at, f" The pass key is {key}. Remember it. {key} is the pass key.")
    return Draft(lines, "\nWhat is the pass key? The pass key is", f" {key}", at)


def multi_key(rng: random.Random, count: int) -> Draft:
    """Nothing but lines of one form, each with a key and a number; one is asked for."""
    keys, target = words(rng, count), rng.randrange(count)
    numbers = [rng.randrange(1_000_000, 10_000_000) for _ in keys]
    lines = [f"The special magic number for {key} is {number}.\n" for key, number in zip(keys, numbers, strict=True)]
    question = f"What is the special magic number for {keys[target]}? The special magic number for {keys[target]} is"
    return Draft(lines, question, f" {numbers[target]}", target)


def max_retrieval(rng: random.Random, count: int) -> Draft:
    """Items with a priority and one of ten classes each; the class of the highest priority is asked for."""
    priorities = rng.sample(range(10_000, 10_000 + max(90_000, 10 * count)), count)
    labels = [rng.randrange(10) for _ in range(count)]
    lines = [f"Priority {p}, class {c}.\n" for p, c in zip(priorities, labels, strict=True)]
    best = priorities.index(max(priorities))
    question = "Which class does the item of the highest priority have? The item of the highest priority has class"
    return Draft(lines, question, f" {labels[best]}", best)


def dictionary_lookup(rng: random.Random, count: int) -> Draft:
    """A dictionary of different keys with one of 64 values each; one key is looked up."""
    keys, target = words(rng, count), rng.randrange(count)
    held = [rng.randrange(64) for _ in keys]
    lines = [f"{key}: {value}\n" for key, value in zip(keys, held, strict=True)]
    return Draft(lines, f"\nThe entry again.\n{keys[target]}:", f" {held[target]}", target)


#: Every task of lines, with the fewest lines that make sense.
LINE_TASKS: dict[str, tuple[Maker, int]] = {
    "passkey": (passkey, 1),
    "multi_key": (multi_key, 2),
    "max_retrieval": (max_retrieval, 2),
    "dictionary_lookup": (dictionary_lookup, 2),
}
