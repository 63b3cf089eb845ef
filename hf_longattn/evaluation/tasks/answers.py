"""Text tasks with an answer: how likely it is, and whether it is right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..corpus import Corpus
from ..experiment import Cell, digest, sha256_of
from ..measures.answers import AnswerScore, answer_scores
from ..readings import Readings
from ..report import Figure, Section, Table
from ..report.figures import heat_map, tokens_shown
from ..rows import Row
from ..settings import UNMODIFIED, Setting
from ..statistics import mean_of, wilson
from ..verdict import title_of
from .base import Task
from .registry import HAYSTACK_TASKS, make_task


def right(row: Row) -> str:
    """Count the right answers, in a line."""
    return f"{sum(a['exact'] for a in row['answers'])} of {len(row['answers'])} right"


class Answers(Task):
    """`samples` texts with a known answer at every length."""

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        options = corpus.options
        self.texts = make_task(name, corpus.tokenizer, corpus.haystack, options.depths, options.seed, options.bos)
        text = corpus.haystack if name in HAYSTACK_TASKS else None
        self.made_of = self.ids_of_texts([] if text is None else text.tolist())
        for length in corpus.options.lengths:
            try:
                self.texts.check(length)
            except ValueError as error:
                raise ValueError(f"task {name}: {error}") from None

    def cells(self, setting: Setting) -> Iterator[Cell]:
        places = self.options.depths if self.name == "needle" else 0
        depends = [places, _haystack(self.options.texts) if self.name in HAYSTACK_TASKS else ""]
        for length in self.options.lengths:
            for index in range(self.options.samples * max(places, 1)):
                yield self.cell(setting, length, str(index), partial(self.measure, length, index), depends, ids=self.made_of)

    def measure(self, length: int, index: int, model: Any) -> Row:
        sample = self.texts.sample(index, length)
        scores = answer_scores(model, sample.input_ids[None].to(model.device), sample.spans)
        return {"tokens": int(sample.input_ids.shape[0]), "answers": as_rows(sample.depths, scores)}

    format_row = staticmethod(right)

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        lengths = results.lengths_of(name)
        columns = ["setting", *(f"{n:,}" for n in lengths)]
        accuracy, intervals, likelihood = [], [], []
        for s in results.settings:
            cells = [[a for r in results.of(s, name, n) for a in r["answers"]] for n in lengths]
            accuracy.append([s, *(mean_of([float(a["exact"]) for a in c]) for c in cells)])
            intervals.append([s, *(_share([a["exact"] for a in c]) for c in cells)])
            likelihood.append([s, *(mean_of([a["log_likelihood"] / a["tokens"] for a in c]) for c in cells)])
        counts = sorted({len({r["which"] for r in results.of(s, name, n)}) for s in results.settings for n in lengths} - {0})
        some = any(a["exact"] for r in results.rows if r["task"] == name for a in r["answers"])
        note = "" if some else "No answer is right under any setting."
        of_likelihood = "Log-likelihood of the answer, nats per token (0 is certain)"
        tables = [Table(of_likelihood, columns, likelihood, note=note, brief=not some)]
        if some:
            tables = [
                Table("Accuracy", columns, accuracy, digits=2, shade=(0.0, 1.0), brief=True),
                Table("Accuracy with its 95 % Wilson interval", columns, intervals),
                *tables,
            ]
        text = (
            "An answer is right if every token of it is the most likely one, given the true tokens before it. The log-"
            "likelihood still moves where a small model is never right."
        )
        protocol = (
            f"Task {name} at each length, {' or '.join(map(str, counts))} texts per setting and length, "
            "the same texts for every setting; one forward pass over text and answer."
        )
        figures = _maps(results, name, lengths) if name in HAYSTACK_TASKS else ()
        return [Section(title_of(name), text, tables, figures, protocol, results.command(name))]


def _haystack(texts: Mapping[str, str]) -> str:
    return digest([sha256_of(text, 64) for text in texts.values()])


def as_rows(depths: Sequence[float], scores: Sequence[AnswerScore]) -> list[Row]:
    """Answers as a row has them."""
    return [
        {"depth": round(depth, 4), "log_likelihood": round(s.log_likelihood, 4), "tokens": s.tokens, "exact": s.exact}
        for depth, s in zip(depths, scores, strict=True)
    ]


def effective(results: Readings) -> list[Section]:
    """Up to which length each setting keeps its score near, if some answers were asked for at several lengths."""
    measured = {task: results.lengths_of(task) for task in results.tasks}
    if len({n for lengths in measured.values() for n in lengths}) < 2:
        return []
    rows: list[list[Any]] = []
    for s in results.settings:
        found = [results.effective_length(s, task) for task in results.tasks]
        known = [n for n in found if n is not None]
        rows.append([s, *found, *([min(known) if len(known) == len(found) else None] if len(found) > 1 else [])])
    near = ", ".join(
        f"{title_of(task)} {x:.3f} at {lengths[0]:,}"
        for task, lengths in measured.items()
        if (x := results.score(UNMODIFIED, task, lengths[0])) is not None
    )
    text = (
        f"The longest measured length up to which a setting keeps {results.keep:.0%} of the unmodified model's score at the "
        f"shortest length. The score is the probability of an answer's token (geometric mean over the answers): {near}. "
        "0: not even at the shortest. The longest length that was measured means that or more."
    )
    columns = ["setting", *(title_of(task) for task in measured), *(["all of them"] if len(measured) > 1 else [])]
    lengths = "; ".join(f"{title_of(t)}: {', '.join(f'{n:,}' for n in ns)}" for t, ns in measured.items())
    table = Table("Effective length, tokens", columns, rows, note=f"Measured at {lengths}.")
    return [Section("Effective length", text, [table], (), "As under each task.", results.command(*results.tasks))]


def _maps(results: Readings, name: str, lengths: Sequence[int]) -> list[Figure]:
    """Tables of accuracy and log-likelihood by length and depth, for each setting."""
    answers = [a for r in results.rows if r["task"] == name for a in r["answers"]]
    bands = [f"{20 * i}–{20 * i + 20} %" for i in range(5)] if name == "needles" else None
    depths = sorted({round(a["depth"], 2) for a in answers})
    labels = bands or [f"{100 * d:.0f} %" for d in depths]

    def row_of(depth: float) -> int:
        return min(int(depth * 5), 4) if bands else depths.index(round(depth, 2))

    worst = min((a["log_likelihood"] / a["tokens"] for a in answers), default=-1.0)
    scale = math.floor(worst) if worst < 0 else -1.0
    right = any(a["exact"] for a in answers)
    figures = []
    for i, s in enumerate(results.settings_of(name)):
        for kind, value, limits, unit in (
            ("accuracy", lambda a: float(a["exact"]), (0.0, 1.0), "share of answers right"),
            ("log-likelihood", lambda a: a["log_likelihood"] / a["tokens"], (float(scale), 0.0), "nats per answer token"),
        ):
            if kind == "accuracy" and not right:
                continue  # a map of zeros says no more than the table
            cells: list[list[list[float]]] = [[[] for _ in lengths] for _ in labels]
            for r in results.of(s, name):
                for a in r["answers"]:
                    cells[row_of(a["depth"])][lengths.index(r["length"])].append(value(a))
            means, columns = [[mean_of(cell) for cell in row] for row in cells], [tokens_shown(n) for n in lengths]
            axes = "length (tokens)", "depth of the needle"
            drawn = heat_map(means, labels, columns, *axes, f"{s}: {kind}", limits, unit)
            alt = f"Heat map of {kind} by length and depth of the needle under {s}"
            figures.append(Figure(f"{name}-{i:02d}-{kind}", drawn, alt, f"{s}: {kind}; all maps of a kind share one scale."))
    return figures


def _share(hits: Sequence[bool]) -> str | None:
    if not hits:
        return None
    low, high = wilson(sum(hits), len(hits))
    return f"{sum(hits)}/{len(hits)} ({low:.2f}–{high:.2f})"
