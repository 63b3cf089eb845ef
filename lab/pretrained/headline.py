"""README's numbers: the settings of headline.yaml on its texts, which chose nothing, and those of headline_qwen.yaml on a
model of another family. copies.py makes the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.report.figures import tokens_shown
from hf_longattn.evaluation.rows import Row, RowFile
from lab.markdown import Contents
from lab.pretrained import paired
from lab.pretrained.longer_on_model import summary
from lab.pretrained.runner import RESULTS


@dataclass(frozen=True)
class Headline:
    """Rows by the protocol of a file beside this one: `protocol` is what it says, `result` where the rows are."""

    protocol: dict[str, Any]
    result: Path

    @property
    def settings(self) -> dict[str, str]:
        """A setting as rows name it, as a reader knows it."""
        names: dict[str, str] = self.protocol["settings"]
        return names

    def rows_of(self, setting: str = "", kind: str = "") -> list[Row]:
        """The rows of a setting and of a kind of text (empty: of all), in the protocol's order of texts."""
        texts = [name for name, text in self.protocol["texts"].items() if kind in ("", text["kind"])]
        found = [r for r in RowFile(self.result) if r["name"] == setting or not setting]
        return sorted((r for r in found if r["text"] in texts), key=lambda r: texts.index(r["text"]))

    def perplexities(self, kind: str) -> str:
        """On prose within and beyond the trained length, and on copies from farther back than it: of the mean loss over texts
        that every setting with a row has read.
        """
        rows = {setting: self.rows_of(setting, kind) for setting in self.settings}
        read = [{r["text"] for r in found} for found in rows.values() if found]
        body, common = [], set.intersection(*read) if read else set()
        for setting, name in self.settings.items():
            if not (here := [row for row in rows[setting] if row["text"] in common]):
                continue
            within, beyond, *_, far = zip(*(summary(row) for row in here), strict=True)
            values = [math.exp(sum(losses) / len(losses)) for losses in (within, beyond, far)]
            body.append([name, *(f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in values)])
        if not body:
            return "*Not run yet.*"
        trained, length = (tokens_shown(n) for n in (rows_trained(rows), self.protocol["length"]))
        head = [f"text up to {trained} tokens", f"text from {trained} to {length}"]
        return markdown(["", *head, f"a passage repeated from more than {trained} back"], body)


def rows_trained(rows: dict[str, list[Row]]) -> int:
    """The trained length that the rows name."""
    return next(int(row["trained"]) for found in rows.values() for row in found)


def headline(name: str, result: str) -> Headline:
    file = Path(__file__).with_name(f"{name}.yaml")
    return Headline(yaml.safe_load(file.read_text(encoding="utf-8")), RESULTS / result)


SMOLLM2, QWEN = headline("headline", "headline.json"), headline("headline_qwen", "headline-qwen.json")


def contents() -> Contents:
    """What stands below these marks. KIND is all, or a kind of text; `qwen` stands for `headline` of the second family.

    `<!-- headline: KIND -->`: perplexities.
    `headline less`, `headline better`, `headline worse`: KIND, see `paired.marks`.
    """
    marks: Contents = {}
    for name, numbers in (("headline", SMOLLM2), ("qwen", QWEN)):

        def of_kind(words: list[str], numbers: Headline = numbers) -> list[Row]:
            (kind,) = words
            return numbers.rows_of(kind="" if kind == "all" else kind)

        def perplexities(what: str, numbers: Headline = numbers) -> str:
            return numbers.perplexities("" if what == "all" else what)

        prose = "prose within / beyond, by text"
        marks = {**marks, **paired.marks(name, of_kind, paired.halves, prose), name: perplexities}
    return marks
