"""Synthetic text tasks of any length that need no download, made from a seed alone.

After Mohtashami & Jaggi 2023 (passkey), Hsieh et al. 2024, RULER (multi_key, variable_tracking, common_words, frequent_words),
Veličković et al. 2024 (max_retrieval; "argmax retrieval" of Li et al. 2025 is the same task) and Li et al. 2025
(dictionary_lookup). The wording, the made-up words and the sizes are ours, so that levels compare between methods here and
not with published ones.

Every task is a list of lines that is made as long as fits, a question, and answers that are scored token by token, in the
order that the question names.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .sample import Encoder, Sample

_SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass
class Draft:
    """A text in pieces: its lines, the question, and the answers behind it, each with the line that (first) holds it."""

    lines: list[str]
    question: str
    answers: list[tuple[str, int]] = field(default_factory=list)


#: (rng, number of lines) -> Draft.
Maker = Callable[[random.Random, int], Draft]


class LineTask:
    """A task made of lines.

    Args:
        tokenizer: a transformers tokenizer.
        make: writes a draft of about as many lines as it is told.
        least: the fewest lines that make sense.
        seed: samples of different seeds are independent.
    """

    def __init__(self, tokenizer: Any, make: Maker, least: int, seed: int = 0, separator: str = ",") -> None:
        self.encode, self.make, self.least, self.seed, self.separator = Encoder(tokenizer), make, least, seed, separator

    def check(self, length: int) -> None:
        if (needed := len(self._build(0, self.least).input_ids)) > length:
            raise ValueError(f"{length} tokens have no room for this task: about {needed} are needed")

    def sample(self, index: int, length: int) -> Sample:
        """Sample `index` with as many lines as fit into `length` tokens, answers included."""
        few = self.least
        sample = self._build(index, few)
        if len(sample.input_ids) > length:
            raise ValueError(f"{length} tokens have no room for sample {index}: it needs {len(sample.input_ids)}")
        guess = max(few + 1, few * length // len(sample.input_ids))
        while len((tried := self._build(index, guess)).input_ids) <= length:
            few, sample, guess = guess, tried, guess + max(1, guess * (length - len(tried.input_ids)) // length)
        many = guess
        while many - few > 1:
            middle = (few + many) // 2
            if len((tried := self._build(index, middle)).input_ids) <= length:
                few, sample = middle, tried
            else:
                many = middle
        return sample

    def _build(self, index: int, lines: int) -> Sample:
        draft = self.make(random.Random(f"{self.seed}:{index}"), lines)
        ids = list(self.encode.start)
        starts: list[int] = []
        for line in draft.lines:
            starts.append(len(ids))
            ids += self.encode(line)
        body = max(len(ids), 1)
        ids += self.encode(draft.question)
        prompt_length, spans, depths = len(ids), [], []
        for number, (answer, holder) in enumerate(draft.answers):
            if number:
                ids += self.encode(self.separator)
            first = len(ids)
            ids += self.encode(answer)
            spans.append((first, len(ids)))
            depths.append(starts[holder] / body)
        return Sample(torch.tensor(ids), tuple(spans), tuple(depths), prompt_length)


def words(rng: random.Random, count: int) -> list[str]:
    """Different made-up words of three syllables."""
    out: dict[str, None] = {}
    while len(out) < count:
        out["".join(rng.choice(_SYLLABLES) for _ in range(3))] = None
    return list(out)


def _place(rng: random.Random, noise: Sequence[str], needles: Sequence[str]) -> tuple[list[str], list[int]]:
    """Noise with needles between, in their order; also where they are."""
    places = sorted(rng.randint(0, len(noise)) for _ in needles)
    lines: list[str] = []
    where: list[int] = []
    used = 0
    for needle, place in zip(needles, places, strict=True):
        lines += noise[used:place]
        where.append(len(lines))
        lines.append(needle)
        used = place
    return lines + list(noise[used:]), where


def passkey(rng: random.Random, count: int) -> Draft:
    """One number in repeated filler."""
    key = rng.randrange(10_000, 100_000)
    lines, where = _place(rng, [NOISE] * count, [f" The pass key is {key}. Remember it. {key} is the pass key."])
    return Draft(lines, "\nWhat is the pass key? The pass key is", [(f" {key}", where[0])])


def multi_key(rng: random.Random, count: int) -> Draft:
    """Nothing but lines of one form, each with a key and a number; one is asked for."""
    keys, target = words(rng, count), rng.randrange(count)
    numbers = [rng.randrange(1_000_000, 10_000_000) for _ in keys]
    lines = [f"The special magic number for {key} is {number}.\n" for key, number in zip(keys, numbers, strict=True)]
    question = f"What is the special magic number for {keys[target]}? The special magic number for {keys[target]} is"
    return Draft(lines, question, [(f" {numbers[target]}", target)])


def variable_tracking(rng: random.Random, count: int, hops: int = 4) -> Draft:
    """Two chains of assignments in filler; all variables that hold the value of one of them are asked for."""
    names = [w.upper()[:5] for w in words(rng, 8 * (hops + 1))]
    names = list(dict.fromkeys(names))[: 2 * (hops + 1)]
    chains = [names[: hops + 1], names[hops + 1 :]]
    values = rng.sample(range(10_000, 100_000), 2)
    assignments = []
    for chain, value in zip(chains, values, strict=True):
        first = [(f"\nVAR {chain[0]} = {value}\n", chain[0])]
        assignments.append(first + [(f"\nVAR {b} = VAR {a}\n", b) for a, b in itertools.pairwise(chain)])
    turns = [0] * (hops + 1) + [1] * (hops + 1)
    rng.shuffle(turns)
    queues = [iter(a) for a in assignments]
    mixed = [next(queues[t]) for t in turns]
    lines, where = _place(rng, [NOISE] * count, [text for text, _ in mixed])
    at = {name: where[i] for i, (_, name) in enumerate(mixed)}
    question = f"\nQuestion: which variables hold the value {values[0]}, in the order of their assignment? Answer:"
    return Draft(lines, question, [(f" {name}", at[name]) for name in chains[0]])


def common_words(rng: random.Random, count: int, common: int = 10, often: int = 10) -> Draft:
    """A numbered list of words in which ten come ten times and all others once; the ten are asked for."""
    pool = words(rng, common + max(count - common * often, 0))
    listed = pool[:common] * often + pool[common:]
    rng.shuffle(listed)
    lines = [f"{i}. {word}\n" for i, word in enumerate(listed, 1)]
    order = list(dict.fromkeys(w for w in listed if w in set(pool[:common])))
    question = f"Question: which {common} words come most often in the list, in the order of their first appearance? Answer:"
    return Draft(lines, question, [(f" {word}", listed.index(word)) for word in order])


def frequent_words(rng: random.Random, count: int, alpha: float = 2.0, vocabulary: int = 500) -> Draft:
    """Words drawn with probabilities proportional to rank^-alpha; the three most frequent are asked for."""
    pool = words(rng, vocabulary)
    weights = [(rank + 1) ** -alpha for rank in range(vocabulary)]
    while True:
        drawn = rng.choices(pool, weights, k=count)
        ranked = Counter(drawn).most_common(4)
        if len({n for _, n in ranked}) == 4:  # else the three, or their order, would be a matter of taste
            break
    lines = [f" {word}" for word in drawn]
    question = "\nQuestion: which three words of the coded text come most often, the most frequent first? Answer:"
    return Draft(["Coded text:", *lines], question, [(f" {word}", drawn.index(word) + 1) for word, _ in ranked[:3]])


def max_retrieval(rng: random.Random, count: int, classes: int = 10) -> Draft:
    """Items with a priority and a class; the class of the highest priority is asked for."""
    priorities = rng.sample(range(10_000, 10_000 + max(90_000, 10 * count)), count)
    labels = [rng.randrange(classes) for _ in range(count)]
    lines = [f"Priority {p}, class {c}.\n" for p, c in zip(priorities, labels, strict=True)]
    best = priorities.index(max(priorities))
    question = "Which class does the item of the highest priority have? The item of the highest priority has class"
    return Draft(lines, question, [(f" {labels[best]}", best)])


def dictionary_lookup(rng: random.Random, count: int, values: int = 64) -> Draft:
    """A dictionary of different keys with one of 64 values each; one key is looked up."""
    keys, target = words(rng, count), rng.randrange(count)
    held = [rng.randrange(values) for _ in keys]
    lines = [f"{key}: {value}\n" for key, value in zip(keys, held, strict=True)]
    return Draft(lines, f"\nThe entry again.\n{keys[target]}:", [(f" {held[target]}", target)])


#: Every task of lines, with the fewest lines that make sense.
LINE_TASKS: dict[str, tuple[Maker, int]] = {
    "passkey": (passkey, 1),
    "multi_key": (multi_key, 2),
    "variable_tracking": (variable_tracking, 1),
    "common_words": (common_words, 110),
    "frequent_words": (frequent_words, 30),
    "max_retrieval": (max_retrieval, 2),
    "dictionary_lookup": (dictionary_lookup, 2),
}
