"""Answers from a long text, many a reading: facts hidden in it, which is read once and asked for each of them.

A fact is a sentence with a key of its own (what, of which city) and a value of two words. Every setting reads the text itself,
through a cache, and each question is asked behind it, over those keys and values. Rows that the result file has are not
measured again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_longattn.evaluation import answer_scores, prefix_of
from hf_longattn.evaluation.rows import Row
from hf_longattn.evaluation.statistics import mean_interval, wilson
from hf_longattn.evaluation.tasks import Encoder
from hf_longattn.evaluation.tasks.needle import CITIES
from lab.markdown import Contents
from lab.pretrained import longer_on_model, runner
from lab.pretrained.runner import RESULTS, Choice, Program, Text, choices, described, lines, parts, with_adapter

PROTOCOL = (
    "The first `length` tokens of a text with facts (' The WHAT of CITY is VALUE.') at `depths`, read once by the setting "
    "itself, 2,048 tokens at a time; then of each fact by itself, behind the text and over its keys and values, a blank line, "
    "'The WHAT of CITY is' and the value. found: whether every token of the value is the likeliest, which is what greedy "
    "decoding writes; loss: of the value, in nats a token."
)
FACTS = 20
_WHAT = """
password;motto;code word;nickname;favourite dish;patron saint;oldest tavern;winning horse;secret ingredient;lucky charm;
tallest tower;hidden treasure;ancient curse;famous painting;lost manuscript;royal perfume;forbidden song;national flower;
sacred animal;missing ship
"""
WHAT = tuple(part.strip() for part in _WHAT.split(";"))
_FIRST = """
velvet silver golden copper crimson purple yellow orange frozen hollow gentle broken silent hungry wooden marble winter summer
"""
_SECOND = """
otter falcon dragon rabbit turtle spider lantern garden castle mirror violin pepper butter candle hammer window bridge basket
"""
VALUES = [f"{first} {second}" for first in _FIRST.split() for second in _SECOND.split()]


@dataclass(frozen=True)
class Asked:
    """A text with facts: ids (1, length); of each fact the question, its value, and the share of the text before it."""

    ids: Tensor
    questions: tuple[str, ...]
    values: tuple[str, ...]
    depths: tuple[float, ...]


def asked(text: Text, tokenizer: Any) -> Asked:
    """Facts at random places, one in each of FACTS equal parts of the text; drawn once per text and length."""
    rng, encode = random.Random(f"{text.name}:{text.length}"), Encoder(tokenizer)
    cities, values = rng.sample(CITIES, FACTS), rng.sample(VALUES, FACTS)
    questions = tuple(f"The {what} of {city} is" for what, city in zip(rng.sample(WHAT, FACTS), cities, strict=True))
    facts = [encode(f" {question} {value}.") for question, value in zip(questions, values, strict=True)]
    room = text.length - len(encode.start) - sum(map(len, facts))
    depths = tuple((n + rng.random()) / FACTS for n in range(FACTS))
    hay, ids, used = text.tokens[0, len(encode.start) :].tolist(), list(encode.start), 0
    for depth, fact in zip(depths, facts, strict=True):
        ids += hay[used : (place := int(depth * room))] + fact
        used = place
    return Asked(torch.tensor([ids + hay[used:room]]), questions, tuple(values), depths)


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    made, encode = asked(text, tokenizer), Encoder(tokenizer)
    ids = made.ids.to(model.device)
    before, scores = prefix_of(model, ids), []
    for question, value in zip(made.questions, made.values, strict=True):
        words, right = encode(f"\n\n{question}"), encode(f" {value}")
        first = ids.shape[1] + len(words)
        whole = torch.cat([ids, ids.new_tensor([words + right])], 1)
        scores += answer_scores(model, whole, [(first, first + len(right))], prefix=before)
    found = {"found": [int(s.exact) for s in scores], "loss": [round(-s.log_likelihood / s.tokens, 3) for s in scores]}
    return found | {"depths": [round(d, 4) for d in made.depths]} | described(choice, text.trained)


def settings(text: Text) -> list[Choice]:
    half, factor = text.trained // 2, text.length / text.trained
    found = choices("answers", half=half, factor=max(2.0, factor))
    return [c for c in found if factor > 1 or not c.setting.rope]


ANSWERS = Program(
    "answers",
    RESULTS / "answers.json",
    PROTOCOL,
    settings,
    measure,
    longer_on_model.key,
    lambda choice, text, args: runner.load(
        with_adapter(choice, args.adapter), args.model, args.dtype, text.calibration, args.device
    ),
    runner.adapter_option,
    lengths=(8192, 16384, 32768),
    spare=0,
    gpu=True,
)


# tables ---------------------------------------------------------------------------------------------------------------


def read_by_all(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """By setting and text, of texts that every setting has read."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["label"], {})[row["text"]] = row
    common = set.intersection(*map(set, found.values())) if found else set()
    return {name: {t: by_text[t] for t in sorted(common)} for name, by_text in found.items()}


def every(by_text: dict[str, Row], column: str) -> list[float]:
    return [x for row in by_text.values() for x in row[column]]


def count(by_text: dict[str, Row]) -> str:
    """The right answers, as "12 of 60"."""
    found = every(by_text, "found")
    return f"{int(sum(found))} of {len(found)}"


def by_half(by_text: dict[str, Row]) -> list[str]:
    """The right answers of the first half of the texts, and of the second."""
    return [str(sum(row["found"][n] for row in by_text.values() for n in half)) for half in HALVES]


def contents() -> Contents:
    """What stands below these marks.

    `<!-- answers: MODEL -->`: the right answers of every setting and length, with a 95 % Wilson interval, and the loss.
    `<!-- answers less: MODEL LENGTH | other -->`: every setting without an adapter less another, paired by question; of
    `| label | ...` behind it, these.
    `<!-- answers right: MODEL LENGTH | label -->`: a number of a sentence, as "12 of 60".
    `<!-- answers unread: MODEL LENGTH ... -->`: the lengths at which some text is not read under every setting.
    """
    rows = runner.rows_of(ANSWERS.result.name)

    def of(model: str, length: str | int) -> dict[str, dict[str, Row]]:
        return read_by_all(row for row in rows if (row["model"], row["length"]) == (model, int(length)))

    def table(model: str) -> str:
        lengths = sorted({r["length"] for r in rows if r["model"] == model})
        body = []
        for length in lengths:
            for name, by_text in of(model, length).items():
                if found := every(by_text, "found"):
                    low, high = wilson(sum(found), len(found))
                    share = f"{count(by_text)} ({low:.2f}–{high:.2f})"
                    loss = every(by_text, "loss")
                    body.append([f"{length:,}", f"`{name}`", share, *by_half(by_text), f"{sum(loss) / len(loss):.2f}"])
        head = ["tokens", "", "right", "of the first half", "of the second", "loss"]
        return runner.markdown(head, body) if body else "*Not run yet.*"

    def less(what: str) -> str:
        (model, length), (other, *only) = parts(what)
        here, body = of(model, length), {}
        if other not in here:
            return "*Not run yet.*"
        bare = [name for name, by_text in here.items() if not any("adapter" in row for row in by_text.values())]
        for name in only or [name for name in bare if name != other]:
            one, two = every(here[name], "found"), every(here[other], "found")
            alone = [sum(a > b for a, b in zip(x, y, strict=True)) for x, y in ((one, two), (two, one))]
            deltas = [a - b for a, b in zip(every(here[name], "loss"), every(here[other], "loss"), strict=True)]
            body[name] = [*map(str, alone), "{:+.2f} ± {:.2f}".format(*mean_interval(deltas))]
        return lines([f"less {other}", "right by it alone", "by the other alone", "Δ loss"], body)

    def right(what: str) -> str:
        (model, length), (label,) = parts(what)
        return count(of(model, length)[label])

    def unread(what: str) -> str:
        model, *lengths = what.split()
        texts = {row["text"] for row in rows}
        read = {n: of(model, n) for n in lengths}
        short = [f"{int(n):,}" for n in lengths if not read[n] or min(map(len, read[n].values())) < len(texts)]
        return " and ".join(short) if short else "no length"

    return {"answers": table, "answers less": less, "answers right": right, "answers unread": unread}


HALVES = (range(FACTS // 2), range(FACTS // 2, FACTS))

if __name__ == "__main__":
    ANSWERS.main(__doc__)
