"""Probes of how far back a setting retrieves, by jumps in positions in place of long texts: seconds a distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..corpus import Corpus
from ..experiment import Cell, digest, sha256_of
from ..measures import probe as probing
from ..measures.copies import PASSAGE, SKIP
from ..readings import Readings
from ..report import Figure, Section, Table
from ..report.figures import NATS, curves, trained_mark
from ..rows import Row
from ..settings import UNMODIFIED, Setting
from ..statistics import mean_interval
from ..verdict import signed
from .base import Task

SAYS_NOT = (
    f"A probe reads {probing.TOKENS:,} tokens whose positions jump. It does not measure dilution by the many keys that a long "
    "text has in between: `hf-longattn eval` and `extend` read whole texts."
)
#: What is measured of a distance, and how that is titled.
PARTS = {"text": "Loss on text after the jump", "copy": "Loss on a passage read again"}


class ProbeTask(Task):
    """`passages` from every text at every distance; a row's length is its distance."""

    within: ClassVar[bool] = False

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        options, trained = self.options, corpus.train_length
        if options.distances is None and trained is None:
            raise ValueError("the model's config names no trained length: say which distances to probe")
        self.distances = options.distances or probing.distances_to(2 * (trained or 0))
        probing.distances_to(self.distances[0])
        corpus.checkpoint.check_lengths([self.distances[-1] + PASSAGE])
        if not corpus.encoded:
            raise ValueError("a probe takes passages from a text: give one")
        self.ids = torch.cat([probing.passages(corpus.whole(text), options.passages, options.seed) for text in corpus.encoded])

    @property
    def protocol(self) -> dict[str, Any]:
        counts = {"before": probing.BEFORE, "after": probing.AFTER, "copy": PASSAGE, "of which not counted": SKIP}
        return {"passages": self.options.passages, "tokens": counts}

    def cells(self, setting: Setting) -> list[Cell]:
        depends = [sha256_of(text) for text in self.options.texts.values()]
        which, read = f"{len(self.ids)} passages", digest(self.ids.tolist())
        return [self.cell(setting, d, which, partial(probed, self.ids, d), depends, ids=read) for d in self.distances]

    @classmethod
    def counted(cls, rows: Sequence[Row]) -> list[Row]:
        """Those of one choice of texts, since a passage counts once: of that under which most was read, else of the last."""
        choices = Counter(r["which"] for r in rows)
        chosen = max(reversed(choices), key=choices.__getitem__, default=None)
        return [r for r in rows if r["which"] == chosen]

    @staticmethod
    def format_row(row: Row) -> str:
        return f"text {sum(row['text']) / len(row['text']):.2f}, copy {sum(row['copy']) / len(row['copy']):.2f}"

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        distances, trained = results.lengths_of(name), results.train_length
        found = {(r["setting"], r["length"]): r for r in results.rows if r["task"] == name}
        settings = results.settings_of(name)
        without = ", ".join(s for s in results.settings if s not in settings)
        left_out = f"Not probed on these passages: {without}." if without else ""
        tables, figures = [], []
        for part, title in PARTS.items():
            measured = {at: mean_interval(row[part]) for at, row in found.items()}
            head, note = f"{title}, nats a token", SAYS_NOT if part == "copy" else left_out
            rows = [[s, *(shown(*measured[s, d]) if (s, d) in measured else None for d in distances)] for s in settings]
            columns = ["tokens back", *(f"{d:,}" for d in distances)]
            tables.append(Table(head, columns, rows, note=note, brief=True))
            others = [s for s in settings if s != UNMODIFIED]
            apart = {(s, d): results.probe_difference(s, part, d) for s in others for d in distances}
            if others:
                against = f"{title}: difference from the unmodified model, paired by passage"
                cells = [[s, *((x := apart[s, d]) and signed(x) for d in distances)] for s in others]
                tables.append(Table(against, columns, cells, brief=True))
            lines = {s: [(d, measured[s, d][0]) for d in distances if (s, d) in measured] for s in settings}
            errors = {s: [measured[s, d][1] for d in distances if (s, d) in measured] for s in settings}
            drawn = curves(lines, "tokens back", NATS, title, trained_mark(trained), errors=errors)
            figures.append(Figure(f"probe-{part}", drawn, f"{title}, by how far back, one line a setting"))
        text = (
            "The model reads a passage, then, after a jump in positions, other text and 128 tokens of the passage again. The "
            "loss on the other text shows whether the model works at that position, the loss on the copy whether it retrieves "
            "from that distance."
        )
        count = next(len(r["text"]) for r in results.rows if r["task"] == name)
        protocol = f"Means over {count} passages, ± 95 % intervals; trained at {trained}."
        return [Section("Probe", text, tables, figures, protocol, results.command(name))]


def shown(mean: float, half: float) -> str:
    return f"{mean:.2f}" if half != half else f"{mean:.2f} ± {half:.2f}"


def probed(input_ids: Tensor, distance: int, model: Any) -> Row:
    """The losses on each passage at a distance, to five digits."""
    result = probing.probe(model, input_ids, [distance])
    return {k: [round(x, 5) for x in v[:, 0].tolist()] for k, v in (("text", result.text), ("copy", result.copies))}
