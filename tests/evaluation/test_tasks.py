"""The text tasks, solved again from their texts, and the set tasks, from their tensors."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

from hf_longattn.evaluation.tasks import TASK_NAMES, make_task
from hf_longattn.evaluation.tasks.text import LINE_TASKS
from lab.papers.samples import dictionary_lookup, max_retrieval

HAYSTACK = "it is a truth universally acknowledged. " * 300


def solve_passkey(text: str) -> list[str]:
    (key, again) = re.search(r"The pass key is (\d+)\. Remember it\. (\d+) is", text).groups()  # type: ignore[union-attr]
    assert key == again
    return [f" {key}"]


def solve_multi_key(text: str) -> list[str]:
    held = dict(re.findall(r"number for (\w+) is (\d+)\.", text))
    asked = re.search(r"number for (\w+)[?]", text)[1]  # type: ignore[index]
    return [f" {held[asked]}"]


def solve_max_retrieval(text: str) -> list[str]:
    items = re.findall(r"Priority (\d+), class (\d)\.", text)
    assert len({p for p, _ in items}) == len(items)
    return [f" {max(items, key=lambda item: int(item[0]))[1]}"]


def solve_dictionary_lookup(text: str) -> list[str]:
    entries, asked = text.split("\nThe entry again.\n")
    held = dict(re.findall(r"(\w+): (\d+)", entries))
    return [f" {held[asked.rstrip(':')]}"]


SOLVERS: dict[str, Callable[[str], list[str]]] = {n[6:]: f for n, f in list(globals().items()) if n.startswith("solve_")}


def decoded(ids: Any) -> str:
    return "".join(tiny.CHARACTERS[i] for i in ids)


def test_every_line_task_has_a_solver() -> None:
    assert set(SOLVERS) == set(LINE_TASKS)


@pytest.mark.parametrize("name", LINE_TASKS)
@pytest.mark.parametrize("bos", [False, True])
def test_answers_are_right_and_texts_fill_their_length(name: str, bos: bool) -> None:
    task = make_task(name, tiny.tokenizer(bos))
    for index, length in enumerate((2500, 6000, 2500, 6000)):
        sample = task.sample(index, length)
        ids = sample.input_ids.tolist()
        assert length - 150 <= len(ids) <= length
        assert (ids[0] == 0) == bos
        text = decoded(ids[bos : sample.spans[0][0]])
        assert [decoded(ids[a:b]) for a, b in sample.spans] == SOLVERS[name](text)
        assert all(0 <= d <= 1 for d in sample.depths)
        assert len(sample.depths) == len(sample.spans)
        assert ids == task.sample(index, length).input_ids.tolist()


@pytest.mark.parametrize("name", TASK_NAMES)
@pytest.mark.parametrize(("adds", "asked", "first"), [(True, "never", False), (False, "always", True)])
def test_a_text_begins_as_it_is_asked_to(name: str, adds: bool, asked: str, first: bool) -> None:
    sample = make_task(name, tiny.tokenizer(adds), HAYSTACK, bos=asked).sample(0, 600)
    assert (int(sample.input_ids[0]) == 0) == first
    assert 0 not in sample.input_ids[1:]


@pytest.mark.parametrize("name", LINE_TASKS)
def test_depth_is_where_the_answer_stands(name: str) -> None:
    task = make_task(name, tiny.tokenizer())
    for index in range(5):
        sample = task.sample(index, 4000)
        text, answer = decoded(sample.input_ids.tolist()), decoded(sample.input_ids[slice(*sample.spans[0])].tolist())
        at = int(sample.depths[0] * sample.spans[0][0])
        assert answer in text[max(at - 80, 0) : at + 120]


def test_samples_and_seeds_differ() -> None:
    first, second = (make_task("multi_key", tiny.tokenizer(), seed=s) for s in (0, 1))
    texts = {decoded(t.sample(i, 1000).input_ids.tolist()) for t in (first, second) for i in (0, 1)}
    assert len(texts) == 4


def test_the_needle_grid_covers_its_depths() -> None:
    task = make_task("needle", tiny.tokenizer(), HAYSTACK, depths=3)
    samples = [task.sample(i, length) for length in (503, 1000, 1999) for i in range(6)]
    assert [s.depths[0] for s in samples] == [0, 0.5, 1] * 6  # the same at every length
    for sample in samples:
        text = decoded(sample.input_ids.tolist())
        city, number = re.search(r"The special magic (\w+) number is (\d{7})\.", text).groups()  # type: ignore[union-attr]
        assert decoded(sample.input_ids[slice(*sample.spans[0])].tolist()) == f"{city}={number}"


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'multi_key'"):
        make_task("multikey", tiny.tokenizer())
    with pytest.raises(ValueError, match="hides needles in a text"):
        make_task("needle", tiny.tokenizer())
    with pytest.raises(ValueError, match="at least 2"):
        make_task("needle", tiny.tokenizer(), HAYSTACK, depths=1)
    for name in TASK_NAMES:
        with pytest.raises(ValueError, match="no room for"):
            make_task(name, tiny.tokenizer(), HAYSTACK).check(20)
    assert make_task("argmax_retrieval", tiny.tokenizer()).make is LINE_TASKS["max_retrieval"][0]  # type: ignore[attr-defined]


def test_max_retrieval_is_the_class_of_the_largest() -> None:
    features, query, answers = max_retrieval(9, 20, torch.Generator().manual_seed(3))
    assert features.shape == (20, 9, 11)
    assert query.shape == (20, 1)
    for row, answer in zip(features.tolist(), answers.tolist(), strict=True):
        best = max(row, key=lambda item: item[0])
        assert best[1:].index(1.0) == answer
        assert all(sum(item[1:]) == 1.0 and 0 <= item[0] < 1 for item in row)
    assert len(set(answers.tolist())) > 3


def test_dictionary_lookup_is_the_value_of_the_key() -> None:
    keys, values, query, answers = dictionary_lookup(12, 20, torch.Generator().manual_seed(3), keys=30)
    for k, v, q, a in zip(keys.tolist(), values.tolist(), query.tolist(), answers.tolist(), strict=True):
        assert len(set(k)) == 12
        assert dict(zip(k, v, strict=True))[q] == a
    assert max(values.flatten().tolist()) > 40
    with pytest.raises(ValueError, match="there are 30"):
        dictionary_lookup(31, 1, torch.Generator(), keys=30)


def test_words_are_many_and_different() -> None:
    from hf_longattn.evaluation.tasks.text import words

    assert len(set(words(random.Random(0), 3000))) == 3000
