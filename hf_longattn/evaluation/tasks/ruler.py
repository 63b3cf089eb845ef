"""RULER's thirteen kinds of question over the user's own text, or over RULER's data; GraphWalks and key-value lookup: what a
model writes, scored by string match.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...integration.layers import candidates_of
from ...slots.registry import did_you_mean
from ..corpus import Corpus
from ..encoder import Encoder
from ..experiment import Cell, of_text
from ..readings import Readings
from ..report import Section, Table
from ..rows import Row
from ..settings import UNMODIFIED, Setting
from ..statistics import mean_of, wilson
from ..verdict import signed
from .base import Task
from .ruler_data import RulerData
from .ruler_kinds import KINDS, RULER, Kind, Question, Source
from .sample import largest

#: RULER's threshold, in percent: what Llama 2 7B has at 4,096 tokens.
THRESHOLD = 85.6
#: Tokens of a question that a model with sliding windows reads at a time, so that no layer computes pairs outside its window.
CHUNK = 1024


class Ruler(Task):
    """`samples` questions of every kind at every length; the answers are written greedily, through a KV cache."""

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        self.kinds = list(self.options.kinds or RULER) if name == "ruler" else [name]
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r}; {did_you_mean(kind, KINDS)}known kinds: {', '.join(KINDS)}")
        if self.options.chat and not corpus.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: leave out chat")
        self.encode = Encoder(corpus.tokenizer)
        self.source = self.material(self.options.ruler_data if name == "ruler" else None)
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
        depends = [self.options.seed, self.options.chat, of_text(self.source.identity)]
        for length in self.options.lengths:
            for index in range(self.options.samples):
                for kind in self.kinds:
                    measure = partial(self.measure, kind, length, index)
                    yield self.cell(setting, length, f"{kind} {index}", measure, depends)

    def question(self, kind: str, length: int, index: int) -> tuple[Question, list[int]]:
        """A question and its tokens: as many as leave room for the answer in `length`; the same for every setting.

        Raises:
            ValueError: there is no room, or the text gives too little.
        """

        def built(size: int) -> tuple[Question, list[int]]:
            made = KINDS[kind].make(random.Random(f"{self.options.seed}:{kind}:{index}"), size, length, self.source)
            return made, self.tokens(made)

        new = KINDS[kind].new_tokens
        if (found := largest(built, lambda it: len(it[1]), KINDS[kind].least, length - new)) is None:
            raise ValueError(
                f"no room for a question and an answer of {new} tokens: give greater lengths, or other kinds (--kinds)"
            )
        return found

    def tokens(self, question: Question) -> list[int]:
        """Return the tokens to read; under `chat` the question is a user's turn, the answer's beginning the model's."""
        if not self.options.chat:
            return [*self.corpus.start, *self.encode(question.text + question.begins)]
        turn = [{"role": "user", "content": question.text}]
        asked: str = self.corpus.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return self.encode(asked + question.begins.lstrip())

    def measure(self, kind: str, length: int, index: int, model: Any) -> Row:
        question, ids = self.question(kind, length, index)
        written = self.written(model, torch.tensor([ids], device=model.device), KINDS[kind], question.answers)
        score = KINDS[kind].score(written, question.answers)
        row = {"kind": kind, "tokens": len(ids), "score": score, "written": written, "expected": question.answers}
        return row | ({"data": RULERS} if isinstance(self.source, RulerData) else {})

    def written(self, model: Any, input_ids: Tensor, kind: Kind, answers: Sequence[str]) -> str:
        """The answer, until it ends, or until what comes next cannot change its score."""

        def text(ids: Tensor) -> str:
            return self.corpus.tokenizer.decode(ids[0, input_ids.shape[1] :], skip_special_tokens=True)

        def done(ids: Tensor, scores: Any, **more: Any) -> Tensor:
            return torch.tensor([kind.done(text(ids), answers)], device=ids.device)

        greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "max_length": None}
        if any(layer.kind == "window" for layer in candidates_of(model)):
            greedy["prefill_chunk_size"] = CHUNK
        return text(
            model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=kind.new_tokens,
                stopping_criteria=[done],
                **greedy,
            )
        )

    @staticmethod
    def format_row(row: Row) -> str:
        return f"{100 * row['score']:.0f} %"

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        lengths = results.lengths_of(name)
        settings = [s for s in results.settings if any(True for _ in results.of(s, name))]
        scores = {(s, n): _scores(results, name, s, n) for s in settings for n in lengths}
        points = {at: 100 * mean for at, found in scores.items() if (mean := mean_of(found.values())) is not None}
        near = results.keep * points.get((UNMODIFIED, lengths[0]), 0.0)
        columns = ["setting", *(f"{n:,}" for n in lengths)]
        summary: list[list[str | float | None]] = []
        paired: list[list[str | float | None]] = []
        for s in settings:
            reached = [_above(points, s, lengths), _kept(points, s, lengths, near)]
            summary.append([s, *(_share(scores[s, n]) for n in lengths), *reached])
            less = [results.paired(name, s, n, lambda x, n=n: scores.get((x, n), {})) for n in lengths]  # type: ignore[misc]
            paired += [[s, *(d and signed((100 * d[0], 100 * d[1])) for d in less)]] * (s != UNMODIFIED)
        heads = [f"above {THRESHOLD}", f"{results.keep:.0%} kept"]
        note = (
            f"In brackets a 95 % Wilson interval. Effective length: the longest that scores above {THRESHOLD} (RULER's rule: "
            f"Llama 2 7B at 4,096), and the longest up to which {results.keep:.0%} of the unmodified model's score at "
            f"{lengths[0]:,} is kept."
        )
        tables = [Table("Answers found, percent", [*columns, *heads], summary, note=note, brief=True)]
        if paired:
            tables.append(Table("Less the unmodified model, points, paired by question", columns, paired))
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


def _scores(results: Readings, name: str, setting: str, length: int) -> dict[str, float]:
    """Scores over the questions that all settings were asked at a length: after an interruption some were asked fewer."""
    common = results.common(name, length)
    return {r["which"]: r["score"] for r in results.of(setting, name, length) if r["which"] in common}


def _share(found: dict[str, float]) -> str | None:
    if not found:
        return None
    low, high = wilson(sum(found.values()), len(found))
    return f"{100 * sum(found.values()) / len(found):.1f} ({100 * low:.0f}–{100 * high:.0f})"


def _of_kind(found: dict[str, float], kind: str) -> float | None:
    mean = mean_of(score for which, score in found.items() if which.rpartition(" ")[0] == kind)
    return None if mean is None else 100 * mean


def _above(points: dict[tuple[str, int], float], setting: str, lengths: Sequence[int]) -> int:
    """The longest length that scores above RULER's threshold; 0 if none does."""
    return max((n for n in lengths if points.get((setting, n), 0.0) > THRESHOLD), default=0)


def _kept(points: dict[tuple[str, int], float], setting: str, lengths: Sequence[int], near: float) -> int | None:
    """The longest length up to which none scores below `near`; None where that is 0."""
    if not near:
        return None
    kept = 0
    for n in lengths:
        if points.get((setting, n), -1.0) < near:
            break
        kept = n
    return kept
