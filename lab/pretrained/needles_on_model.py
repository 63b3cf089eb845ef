"""Needles that a pretrained model retrieves from a long text, by depth, within its trained length and beyond.

NEEDLES sentences and CHAINS of variables stand in one text. It is read once, by the same weights under `streaming` (every
token sees the first 4 and the last 4,096, at distances that the model knows), and its keys and values are kept; each setting
then answers over them. A setting that scales rope reads the text itself, under its own scaling, likewise. With --adapter the
adapted weights read and answer. A model with a chat template is also asked in its own format, and generates its answers.
Rows that the result file has are not run again.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_longattn.evaluation import answer_scores, prefix_of
from hf_longattn.evaluation.measures.losses import Prefix
from hf_longattn.evaluation.rows import Row
from hf_longattn.evaluation.statistics import mean_interval
from hf_longattn.evaluation.tasks import Encoder, Needle
from hf_longattn.evaluation.tasks.needle import CITIES, QUESTION
from hf_longattn.integration.caches import CACHE
from lab.markdown import Contents
from lab.pretrained import longer_on_model, runner
from lab.pretrained.reading_far import load, read_by_itself, reader
from lab.pretrained.runner import RESULTS, Choice, Program, Text, choices, described, lines, parts

PROTOCOL = (
    "The first `length` tokens of a text with needles (' The special magic CITY number is NUMBER.') at `depths`, read once "
    "under streaming (window 4096, 4 sinks) by the weights that answer (under its rope scaling by a setting that has one). "
    "sentence: that sentence again for every needle, in random order, in one text behind it; list: 'CITY=NUMBER;...', as "
    "needle_lora trains. Of each needle: whether all digits are the likeliest, given the true answers before, and the loss of "
    "the number in nats. chat: generated answers to a question for one needle each, and for all names of a chain of variables."
)
NEEDLES, CHAINS, HOPS = 48, 4, 3
ASKED = 8
NAMES = [a + b + c for a in "BDFGKLMN" for b in "AEIOU" for c in "PRSTVX"]


@dataclass(frozen=True)
class Haystack:
    """A text with needles: ids (1, length); depths, the share of the text before each needle; chains of variables."""

    ids: Tensor
    needles: tuple[Needle, ...]
    depths: tuple[float, ...]
    chains: tuple[tuple[int, list[str]], ...]


def haystack(text: Text, tokenizer: Any) -> Haystack:
    """Needles evenly over the text, variables at random places, a chat's opening in front if the model has a template."""
    rng, encode = random.Random(f"{text.name}:{text.length}"), Encoder(tokenizer)
    needles = tuple(Needle(city, rng.randrange(1_000_000, 10_000_000)) for city in rng.sample(CITIES, NEEDLES))
    names = rng.sample(NAMES, CHAINS * HOPS)
    chains = tuple((rng.randrange(10_000, 100_000), names[n * HOPS : (n + 1) * HOPS]) for n in range(CHAINS))
    opening = encode(chat(tokenizer)[0]) if tokenizer.chat_template else list(encode.start)
    written = [((n + 0.5) / NEEDLES, encode(needle.sentence)) for n, needle in enumerate(needles)]
    for number, chain in chains:
        values = [str(number), *(f"VAR {name}" for name in chain)]
        places = sorted(rng.random() for _ in chain)
        said = [encode(f" VAR {name} = {value}.") for name, value in zip(chain, values, strict=False)]
        written += zip(places, said, strict=True)
    room = text.length - len(opening) - sum(len(piece) for _, piece in written)
    ids, used = list(opening), 0
    for place, piece in sorted(written):
        ids += text.tokens[0, used : round(place * room)].tolist() + piece
        used = round(place * room)
    ids += text.tokens[0, used:room].tolist()
    return Haystack(torch.tensor([ids]), needles, tuple((n + 0.5) / NEEDLES for n in range(NEEDLES)), chains)


def chat(tokenizer: Any) -> tuple[str, str]:
    """What stands before and behind a user's message."""
    message = [{"role": "user", "content": "CONTENT"}]
    before, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split("CONTENT")
    return before, after


class Before:
    """The text as keys and values; of one reading for all settings that do not scale rope."""

    def __init__(self) -> None:
        self.read: dict[tuple[Path, int], Prefix] = {}

    def __call__(self, model: Any, text: Text, choice: Choice, args: argparse.Namespace, ids: Tensor) -> Prefix:
        if choice.setting.rope:
            return read_by_itself(model, ids)
        if (key := (text.path, text.length)) not in self.read:
            self.read.clear()
            self.read[key] = prefix_of(reader(text, args), ids)
        return self.read[key]


BEFORE = Before()


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    hay = haystack(text, tokenizer)
    before = BEFORE(model, text, choice, args, hay.ids)
    order = random.Random(0).sample(range(NEEDLES), NEEDLES)
    asked = [(f" The special magic {n.city} number is", f" {n.number}", ".") for n in hay.needles]
    listed = [(f"{n.city}=", str(n.number), ";") for n in hay.needles]
    found: Row = {
        "sentence": answered(model, hay, before, "\n\n", [asked[n] for n in order], order, tokenizer),
        "list": answered(model, hay, before, QUESTION, [listed[n] for n in order], order, tokenizer),
    }
    if tokenizer.chat_template:
        found["chat"] = chatted(model, hay, before, tokenizer)
    return found | {"depths": [round(d, 4) for d in hay.depths]} | described(choice, text.trained)


def answered(
    model: Any,
    hay: Haystack,
    before: Prefix,
    opening: str,
    pieces: Sequence[tuple[str, str, str]],
    order: Sequence[int],
    tokenizer: Any,
) -> dict[str, list[float]]:
    """Of each needle whether its number is found, and the loss of it, all asked for one after another."""
    encode = Encoder(tokenizer)
    ids, spans = encode(opening), []
    for question, answer, end in pieces:
        ids += encode(question)
        number = encode(answer)
        spans.append((hay.ids.shape[1] + len(ids), hay.ids.shape[1] + len(ids) + len(number)))
        ids += number + encode(end)
    scores = answer_scores(model, torch.cat([hay.ids, torch.tensor([ids])], 1), spans, prefix=before)
    by_needle = sorted(zip(order, scores, strict=True), key=lambda pair: pair[0])
    return {
        "found": [int(score.exact) for _, score in by_needle],
        "loss": [round(-score.log_likelihood, 3) for _, score in by_needle],
    }


def chatted(model: Any, hay: Haystack, before: Prefix, tokenizer: Any) -> dict[str, list[int]]:
    """Generated answers: whether the number of every sixth needle is in them, and how many names of each chain."""
    after, step = chat(tokenizer)[1], NEEDLES // ASKED
    numbers = []
    for needle in hay.needles[step // 2 :: step]:
        question = f"\n\nWhat is the special magic {needle.city} number? Answer with the number alone."
        numbers.append(int(str(needle.number) in generated(model, hay, before, question + after, tokenizer)))
    names = []
    for number, chain in hay.chains:
        question = f"\n\nWhich variables have the value {number}? Answer with their names alone."
        answer = generated(model, hay, before, question + after, tokenizer)
        names.append(sum(name in answer for name in chain))
    return {"numbers": numbers, "names": names}


def generated(model: Any, hay: Haystack, before: Prefix, question: str, tokenizer: Any) -> str:
    ids = torch.cat([hay.ids, torch.tensor([Encoder(tokenizer)(question)])], 1)
    out = model.generate(ids, **{CACHE: copy.deepcopy(before)}, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :]))


def settings(text: Text) -> list[Choice]:
    half, factor = text.trained // 2, text.length / text.trained
    found = choices("needles", half=half, factor=max(2.0, factor))
    return [c for c in found if factor > 1 or not c.setting.rope]


NEEDLES_ON_MODEL = Program(
    "needles_on_model",
    RESULTS / "needles-on-model.json",
    PROTOCOL,
    settings,
    measure,
    longer_on_model.key,
    lambda choice, text, args: load(choice, args.model, args.dtype, text.calibration, args.adapter),
    runner.adapter_option,
    lengths=(8192, 16384, 32768),
)


# tables ---------------------------------------------------------------------------------------------------------------


def contents() -> Contents:
    """What stands below `<!-- needles on model: model text length -->`; `<!-- found by list: ... | label -->`: how many of the
    needles, a number of a sentence; `<!-- needles less: model text | method | adapter | ... -->`: what adapters find by list
    under that method and under others, at each length."""
    rows = runner.rows_of(NEEDLES_ON_MODEL.result.name)

    def read(what: str) -> tuple[dict[str, Row], list[str]]:
        words, labels = parts(what)
        return {r["label"]: r for r in runner.having(rows, words, ("model", "text", "length"))}, labels

    def found(what: str) -> str:
        here, (label,) = read(what)
        return str(sum(here[label]["list"]["found"]))

    def asked(what: str) -> str:
        here, labels = read(what)
        rows = {label: here[label] for label in labels or here}
        head = ["", f"by sentence, of {NEEDLES}", f"by list, of {NEEDLES}", f"by depth, of {NEEDLES // 4} each"]
        chat = next((r["chat"] for r in rows.values() if "chat" in r), None)
        if chat:
            head += [f"chat, of {len(chat['numbers'])}", f"chains, of {HOPS * len(chat['names'])}"]
        return lines(head, {label: shown(row) for label, row in rows.items()})

    def less(what: str) -> str:
        words, (base, *adapters) = parts(what)
        runs: dict[tuple[str, int], dict[str, Row]] = {}
        here = [r for r in runner.having(rows, words, ("model", "text")) if r.get("adapter") in adapters]
        for row in sorted(here, key=lambda r: (adapters.index(r["adapter"]), r["length"])):
            runs.setdefault((row["adapter"], row["length"]), {})[row["name"]] = row
        others = sorted({name for by in runs.values() for name in by} - {base})
        body = {
            f"{adapter}, {length:,}": [str(sum(by[base]["list"]["found"])), *(beside(by[x], by[base]) for x in others)]
            for (adapter, length), by in runs.items()
        }
        return lines(["adapter, length", f"`{base}`", *(f"`{name}`" for name in others)], body)

    return {"needles on model": asked, "found by list": found, "needles less": less}


def beside(row: Row, other: Row) -> str:
    """Needles found by list, and the loss of a number less that of another row, needle by needle."""
    deltas = [a - b for a, b in zip(row["list"]["loss"], other["list"]["loss"], strict=True)]
    return "{} ({:+.2f} ± {:.2f})".format(sum(row["list"]["found"]), *mean_interval(deltas))


def shown(row: Row) -> list[str]:
    """Needles found under both questions; by depth under the better one; in chat, and names of chains."""
    better = max((row["list"], row["sentence"]), key=lambda x: sum(x["found"]))["found"]
    fourth = len(better) // 4
    depths = [better[n : n + fourth] for n in range(0, len(better), fourth)]
    counts = [row["sentence"]["found"], row["list"]["found"], *row.get("chat", {}).values()]
    cells = [str(sum(c)) for c in counts]
    return [*cells[:2], ", ".join(str(sum(c)) for c in depths), *cells[2:]]


if __name__ == "__main__":
    NEEDLES_ON_MODEL.main(__doc__)
