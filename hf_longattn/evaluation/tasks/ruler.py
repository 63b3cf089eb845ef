"""RULER's thirteen kinds of question over the user's own text, or over RULER's data; GraphWalks and key-value lookup: what a
model writes, scored by string match.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...slots.registry import did_you_mean
from ..corpus import Corpus
from ..experiment import Cell, sha256_of
from ..readings import Readings, kept_up_to
from ..report import Section, Table
from ..rows import Row
from ..settings import UNMODIFIED, Setting
from ..statistics import mean_of
from .ruler_data import RulerData
from .ruler_kinds import KINDS, RULER, Question, Source
from .sample import largest
from .written import WrittenAnswers, by_question, differences, share

#: RULER's threshold, in percent: what Llama 2 7B has at 4,096 tokens.
THRESHOLD = 85.6


class Ruler(WrittenAnswers):
    """`samples` questions of every kind at every length."""

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        self.kinds = list(self.options.kinds or RULER) if name == "ruler" else [name]
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r}; {did_you_mean(kind, KINDS)}known kinds: {', '.join(KINDS)}")
        self.source = self.material(self.options.ruler_data if name == "ruler" else None)
        self.made_of = self.ids_of_texts(self.encode(self.source.identity))
        for kind in self.kinds:
            for length in {self.options.lengths[0], self.options.lengths[-1]}:
                try:
                    self.question(kind, length, 0)
                except ValueError as error:
                    raise ValueError(f"task {name}, {kind} at {length} tokens: {error}") from None

    def material(self, folder: str | None) -> Source:
        """What the questions are made of: RULER's own files in a folder, or the user's text."""

        def count(text: str) -> int:
            return len(self.encode(text))

        return Source("\n\n".join(self.options.texts.values()), count) if folder is None else RulerData(Path(folder), count)

    def cells(self, setting: Setting) -> Iterator[Cell]:
        depends = [self.options.seed, self.template, sha256_of(self.source.identity)]
        for length in self.options.lengths:
            for index in range(self.options.samples):
                for kind in self.kinds:
                    measure = partial(self.measure, kind, length, index)
                    yield self.cell(setting, length, f"{kind} {index}", measure, depends, ids=self.made_of)

    def question(self, kind: str, length: int, index: int) -> tuple[Question, list[int]]:
        """A question and its tokens: as many as leave room for the answer in `length`; the same for every setting.

        Raises:
            ValueError: there is no room, or the text gives too little.
        """

        def built(size: int) -> tuple[Question, list[int]]:
            made = KINDS[kind].make(random.Random(f"{self.options.seed}:{kind}:{index}"), size, length, self.source)
            return made, self.prompt(made.text, made.begins)

        new = KINDS[kind].new_tokens
        if (found := largest(built, lambda it: len(it[1]), KINDS[kind].least, length - new)) is None:
            raise ValueError(
                f"no room for a question and an answer of {new} tokens: give greater lengths, or other kinds (--kinds)"
            )
        return found

    def measure(self, kind: str, length: int, index: int, model: Any) -> Row:
        question, ids = self.question(kind, length, index)
        score, done = KINDS[kind].score, KINDS[kind].done
        # until what comes next cannot change the score
        written = self.written(model, ids, KINDS[kind].new_tokens, lambda text: done(text, question.answers))
        row = {"kind": kind, "tokens": len(ids), "score": score(written, question.answers)}
        row |= {"written": written, "expected": question.answers}
        return row | ({"data": RULERS} if isinstance(self.source, RulerData) else {})

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        lengths, settings = results.lengths_of(name), results.settings_of(name)
        scores = {(s, n): by_question(results, name, s, n) for s in settings for n in lengths}
        points = {at: 100 * mean for at, found in scores.items() if (mean := mean_of(found.values())) is not None}
        near = results.keep * points.get((UNMODIFIED, lengths[0]), 0.0)
        columns = ["setting", *(f"{n:,}" for n in lengths)]
        summary: list[list[str | float | None]] = []
        for s in settings:
            own = {n: points.get((s, n)) for n in lengths}
            above = max((n for n, score in own.items() if score is not None and score > THRESHOLD), default=0)
            summary.append([s, *(share(scores[s, n]) for n in lengths), above, kept_up_to(own, near) if near else None])
        heads = [f"above {THRESHOLD}", f"{results.keep:.0%} kept"]
        note = (
            f"In brackets a 95 % Wilson interval. Effective length: the longest that scores above {THRESHOLD} (RULER's rule: "
            f"Llama 2 7B at 4,096), and the longest up to which {results.keep:.0%} of the unmodified model's score at "
            f"{lengths[0]:,} is kept."
        )
        tables = [
            Table("Answers found, percent", [*columns, *heads], summary, note=note, brief=True),
            *differences(results, name),
        ]
        kinds = list(dict.fromkeys(r["kind"] for r in results.rows if r["task"] == name))
        for n in lengths if len(kinds) > 1 else ():
            by_kind = [[s, *(_of_kind(scores[s, n], kind) for kind in kinds)] for s in settings if scores[s, n]]
            tables.append(Table(f"By kind at {n:,} tokens, percent", ["setting", *kinds], by_kind, digits=0, shade=(0, 100)))
        counts = sorted({len(found) for found in scores.values() if found})
        protocol = (
            f"{' or '.join(map(str, counts))} questions per setting and length over {len(kinds)} kinds, the same for every "
            "setting; question and answer together fill the length; written greedily."
        )
        text, title = "The share of the right answers that stand in what the model writes.", TITLES[name]
        if any(r.get("data") == RULERS for r in results.rows if r["task"] == name):
            title = RULERS
        elif name == "ruler":
            text += " RULER's questions are made from your text: their level is not that of published scores."
        return [Section(title, text, tables, (), protocol, results.command(name))]


TITLES = {"ruler": "RULER's questions over your text", "graphwalks": "GraphWalks", "key_value": "Key-value lookup"}
#: The title over questions that are made of RULER's own files; rows of these say so.
RULERS = "RULER, its own data"


def _of_kind(found: dict[str, float], kind: str) -> float | None:
    mean = mean_of(score for which, score in found.items() if which.rpartition(" ")[0] == kind)
    return None if mean is None else 100 * mean
