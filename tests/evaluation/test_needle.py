"""The needle task: every sample is what the paper describes, and the same whenever it is asked for."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import ByT5Tokenizer

from hf_longattn.evaluation.tasks import NeedleTask
from hf_longattn.evaluation.tasks.sample import IGNORE

HAY = "abcdefghij" * 200  # no capital, no digit: whatever has one is a needle or the answer


@pytest.fixture(scope="module")
def task() -> NeedleTask:
    return NeedleTask(ByT5Tokenizer(extra_ids=0), HAY)


def test_a_sample_holds_three_needles_and_the_answer_names_them(task: NeedleTask) -> None:
    for index in range(20):
        sample = task.sample(index, 512)
        assert sample.input_ids.shape == sample.labels.shape == (512,)
        text = task.tokenizer.decode(sample.input_ids, skip_special_tokens=True)
        found = re.findall(r" The special magic (\w+) number is (\d{7})\.", text)
        assert len({city for city, _ in found}) == 3
        expected = ";".join(f"{city}={number}" for city, number in found)
        answered = sample.labels != IGNORE
        assert task.tokenizer.decode(sample.labels[answered], skip_special_tokens=True) == expected
        assert text.endswith(expected)
        assert answered.tolist() == [False] * sample.prompt_length + [True] * (512 - sample.prompt_length)
        assert torch.equal(sample.labels[answered], sample.input_ids[answered])
        spans = [task.tokenizer.decode(sample.input_ids[a:b]) for a, b in sample.spans]
        assert spans == expected.split(";")
        bare = re.sub(r" The special magic \w+ number is \d{7}\.", "", text[: text.index("\n")])
        assert bare in HAY  # the haystack is one piece of the text


@pytest.mark.slow
def test_depths_are_where_the_needles_are(task: NeedleTask) -> None:
    sample = task.sample(0, 1000, depths=[0.0, 0.5, 1.0])
    text = task.tokenizer.decode(sample.input_ids, skip_special_tokens=True)
    assert text.startswith(" The special magic")
    assert "." + "\n" in text  # the last one stands right before the question
    assert sample.depths == pytest.approx((0, 0.5, 1), abs=2e-3)
    places = torch.tensor([task.sample(i, 600).depths for i in range(300)])
    assert places.mean().item() == pytest.approx(0.5, abs=0.03)  # uniform: standard error 0.01
    assert places.mean(0).tolist() == pytest.approx([0.25, 0.5, 0.75], abs=0.04)  # order statistics of three


def test_samples_depend_on_seed_and_index_alone(task: NeedleTask) -> None:
    again = NeedleTask(task.tokenizer, task.haystack)
    assert torch.equal(task.sample(3, 400).input_ids, again.sample(3, 400).input_ids)
    assert not torch.equal(task.sample(3, 400).input_ids, task.sample(4, 400).input_ids)
    assert not torch.equal(task.sample(3, 400).input_ids, NeedleTask(task.tokenizer, HAY, seed=1).sample(3, 400).input_ids)


def test_no_room_is_refused(task: NeedleTask) -> None:
    least = task.minimum_length
    assert all(task.sample(i, least).input_ids.shape == (least,) for i in range(50))
    with pytest.raises(ValueError, match=rf"no room for 3 needles.*{least} are needed"):
        task.sample(0, least - 1)
    with pytest.raises(ValueError, match="the haystack has 2000 tokens; texts of 2001"):
        task.sample(0, 2001)
    with pytest.raises(ValueError, match="3 numbers in"):
        task.sample(0, 400, depths=[0.5])
    with pytest.raises(ValueError, match="needles must lie in"):
        NeedleTask(task.tokenizer, HAY, needles=0)
