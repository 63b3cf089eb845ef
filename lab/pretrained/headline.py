"""README's numbers: the settings of headline.yaml on its texts, which chose nothing. copies.py makes the rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row, RowFile
from lab.markdown import Contents
from lab.pretrained import paired
from lab.pretrained.longer_on_model import summary
from lab.pretrained.runner import RESULTS

PROTOCOL: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RESULT = RESULTS / "headline.json"
#: A setting as rows name it, as a reader knows it.
SETTINGS: dict[str, str] = PROTOCOL["settings"]


def rows_of(setting: str = "", kind: str = "") -> list[Row]:
    """The rows of a setting and of a kind of text (empty: of all), in the protocol's order of texts."""
    texts = [name for name, text in PROTOCOL["texts"].items() if kind in ("", text["kind"])]
    found = [r for r in RowFile(RESULT) if r["name"] == setting or not setting]
    return sorted((r for r in found if r["text"] in texts), key=lambda r: texts.index(r["text"]))


def perplexities(kind: str) -> str:
    """On prose within and beyond the trained length, and on copies from farther back than it: of the mean loss over texts."""
    body = []
    for setting, name in SETTINGS.items():
        within, beyond, *_, far = zip(*(summary(row) for row in rows_of(setting, kind)), strict=True)
        values = [math.exp(sum(losses) / len(losses)) for losses in (within, beyond, far)]
        body.append([name, *(f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in values)])
    return markdown(["", "text up to 8k tokens", "text from 8k to 16k", "a passage repeated from more than 8k back"], body)


def contents() -> Contents:
    """What stands below these marks. KIND is all, or a kind of text.

    `<!-- headline: KIND -->`: perplexities.
    `headline less`, `headline better`, `headline worse`: KIND, see `paired.marks`.
    """

    def of_kind(words: list[str]) -> list[Row]:
        (kind,) = words
        return rows_of(kind="" if kind == "all" else kind)

    marks = paired.marks("headline", of_kind, paired.halves, "prose within / beyond, by text")
    return {**marks, "headline": lambda what: perplexities("" if what == "all" else what)}
