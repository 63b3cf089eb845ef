"""What a report is made of: plain data, no plotting and no HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names. Numbers are shown with `digits` decimals, None and NaN as a dash.

    Args:
        shade: (low, high) to colour numeric cells between these two values, as a heat map that is also text; None for none.
        tones: of each cell 1 (better), -1 (worse) or 0, by rows, to colour what is good and what is not; empty for none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    digits: int = 3
    note: str = ""
    shade: tuple[float, float] | None = None
    tones: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if self.tones and [len(t) for t in self.tones] != [len(r) for r in self.rows]:
            raise ValueError(f"table {self.title!r}: tones are given for every cell or for none")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: a row of {len(row)} cells under {len(self.columns)} columns: {row}")

    def to_dict(self) -> dict[str, Any]:
        rows = [[None if isinstance(c, float) and c != c else c for c in row] for row in self.rows]  # JSON knows no NaN
        return {**vars(self), "columns": list(self.columns), "rows": rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Table:
        shade = data["shade"]
        return cls(**{**data, "shade": None if shade is None else (shade[0], shade[1])})


@dataclass(frozen=True)
class Figure:
    """A PNG. `name` becomes its file name; `alt` says in words what it shows; `caption` what to read in it."""

    name: str
    png: bytes
    alt: str
    caption: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"a figure's name is a file name of letters, digits, dots and dashes; got {self.name!r}")

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "png": base64.b64encode(self.png).decode()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Figure:
        return cls(**{**data, "png": base64.b64decode(data["png"])})


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs (separated by blank lines), tables and figures, with the protocol and command behind them."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    protocol: str = ""
    command: str = ""

    @property
    def slug(self) -> str:
        return re.sub(r"[\W_]+", "-", self.title.lower()).strip("-")

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "tables": [t.to_dict() for t in self.tables], "figures": [f.to_dict() for f in self.figures]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Section:
        tables, figures = map(Table.from_dict, data["tables"]), map(Figure.from_dict, data["figures"])
        return cls(**{**data, "tables": tuple(tables), "figures": tuple(figures)})
