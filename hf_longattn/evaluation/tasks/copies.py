"""Loss on passages that the last tokens of a document repeat from far back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..corpus import Corpus, Document
from ..measures.answers import answer_scores
from ..measures.copies import PASSAGE, SHARES, SKIP, TAIL, far_copies, with_copies
from ..readings import COPIES, Readings
from ..report import Section, Table
from ..report.figures import NATS, curves, pair
from ..rows import Row
from ..settings import Setting
from ..statistics import mean_of
from ..verdict import title_of
from .answers import as_rows, right
from .documents import OnDocuments
from .loss import AS_ABOVE


class Copies(OnDocuments):
    """The document with passages repeated from far back in its last tokens; each copy is an answer."""

    depends: ClassVar[Sequence[Any]] = SHARES

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        far_copies(corpus.options.lengths[0])
        if corpus.options.prefix is not None and corpus.options.targets < TAIL:
            raise ValueError(
                f"copies take the last {TAIL} tokens: with a prefix give as many targets, not {corpus.options.targets}"
            )

    def measure(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        copies = far_copies(length)
        ids, _ = with_copies(self.corpus.context(document, length), copies)
        spans = [(c.position + SKIP, c.position + PASSAGE) for c in copies]
        scores = answer_scores(model, ids.to(model.device), spans, self.corpus.prefixes.of(setting, document, length, model))
        answers = as_rows([1 - share for share in SHARES], scores)
        return {"tokens": length, "answers": answers, "distances": [c.distance for c in copies]}

    format_row = staticmethod(right)

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        tables = []
        lines: dict[str, list[tuple[float, float]]] = {}
        for n in results.lengths_of(name):
            distances: list[int] = next(r["distances"] for r in results.rows if r["task"] == name and r["length"] == n)
            order = sorted(range(len(distances)), key=lambda i: distances[i])
            rows: list[list[str | float | None]] = []
            for s in results.settings:
                found = [r["answers"] for r in results.of(s, name, n) if r["which"] in results.common(name, n)]
                losses = [mean_of([-f[i]["log_likelihood"] / f[i]["tokens"] for f in found]) for i in order]
                rows.append([s, *losses, mean_of([x for x in losses if x is not None])])
                lines[s] = [(distances[i], x) for i, x in zip(order, losses, strict=True) if x is not None]
            columns = ["setting", *(f"{distances[i]:,} back" for i in order), "all"]
            tables.append(Table(f"Loss on copies at {n:,} tokens, nats", columns, rows, digits=2, brief=True))
        title = tables[-1].title.removesuffix(", nats")
        figures = pair(
            lambda limits: curves(lines, "how far back (tokens)", NATS, title, limits=limits),
            [y for points in lines.values() for _, y in points],
            "copies-by-distance",
            "Mean loss on copies against how far back their first reading is, one line a setting",
        )
        text = (
            f"The last tokens of a text repeat passages of {PASSAGE} tokens from far back. A model that reaches the first "
            f"reading predicts the second nearly free; the first {SKIP} tokens of each do not count."
        )
        return [Section(title_of(COPIES), text, tables, figures, AS_ABOVE, results.command(COPIES))]
