"""Sections of a report, and its page: one HTML file that needs nothing else, a JSON file, and figures as PNG."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..rows import write_whole

Value = str | float | int | None
PAGE, DATA, FIGURES = "index.html", "report.json", "figures"


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names. Numbers are shown with `digits` decimals, None and NaN as a dash.

    Args:
        shade: (low, high) to colour numeric cells between these two values, as a heat map that is also text; None for none.
        tones: of each cell 1 (better), -1 (worse) or 0, by rows, to colour what is good and what is not; empty for none.
        legend: what the colours of `tones` mean, for where they are shown.
        brief: whether it also stands where there is room for few: on the console, in a notebook.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    digits: int = 3
    note: str = ""
    shade: tuple[float, float] | None = None
    tones: Sequence[Sequence[int]] = ()
    legend: str = ""
    brief: bool = False

    def __post_init__(self) -> None:
        if self.tones and [len(t) for t in self.tones] != [len(r) for r in self.rows]:
            raise ValueError(f"table {self.title!r}: tones are given for every cell or for none")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: a row of {len(row)} cells under {len(self.columns)} columns: {row}")

    def shown(self) -> list[list[str]]:
        """The cells as text."""
        return [[shown(cell, self.digits) for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """Without title and note."""
        return markdown(self.columns, self.shown())

    def to_dict(self) -> dict[str, Any]:
        rows = [[None if isinstance(c, float) and c != c else c for c in row] for row in self.rows]  # JSON knows no NaN
        return {**vars(self), "columns": list(self.columns), "rows": rows}


def by_length(
    title: str, settings: Iterable[str], lengths: Sequence[int], cell: Callable[[str, int], Value], **how: Any
) -> Table:
    """A table with a row for each setting and a column for each length.

    Args:
        cell: from a setting and a length to what stands there.
        how: of `Table`.
    """
    columns = ["setting", *(f"{n:,}" for n in lengths)]
    return Table(title, columns, [[s, *(cell(s, n) for n in lengths)] for s in settings], **how)


@dataclass(frozen=True)
class Figure:
    """A picture for a page.

    Args:
        name: of its file.
        drawn: a matplotlib figure.
        alt: what it shows, in words.
        caption: what to read in it.
    """

    name: str
    drawn: Any
    alt: str
    caption: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"a figure's name is a file name of letters, digits, dots and dashes; got {self.name!r}")

    @property
    def file(self) -> str:
        return f"{FIGURES}/{self.name}.png"

    @cached_property
    def png(self) -> bytes:
        """The picture as a file."""
        return png(self.drawn)


def png(drawn: Any) -> bytes:
    """A matplotlib figure as a PNG with a palette: a third of the bytes, and looks the same. pyplot closes one of its own."""
    from PIL import Image

    whole, out = io.BytesIO(), io.BytesIO()
    drawn.savefig(whole, format="png", dpi=120)
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close(drawn)
    Image.open(whole).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return out.getvalue()


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
        figures = [{"name": f.name, "png": f.file, "alt": f.alt, "caption": f.caption} for f in self.figures]
        return {**vars(self), "tables": [t.to_dict() for t in self.tables], "figures": figures}


def write_report(folder: Path, title: str, summary: str, sections: Sequence[Section], facts: Mapping[str, str]) -> Path:
    """Write a report: index.html, report.json and figures/, in place of what was there of them; returns the page.

    Args:
        summary: the one or two sentences that a reader in a hurry takes away.
        facts: what stands at the end of the page: model, versions, command.
    """
    names = sorted(f.name for s in sections for f in s.figures)
    if len(set(names)) < len(names):
        raise ValueError(f"two figures share a name: {names}")
    figures = {f.file: f.png for s in sections for f in s.figures}
    for stale in {f"{FIGURES}/{p.name}" for p in (folder / FIGURES).glob("*.png")} - figures.keys():
        (folder / stale).unlink()
    for file, png in figures.items():
        write_whole(folder / file, png)
    data = {"title": title, "summary": summary, "facts": dict(facts), "sections": [s.to_dict() for s in sections]}
    write_whole(folder / DATA, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / PAGE, html(title, summary, sections, facts))
    return folder / PAGE


def html(title: str, summary: str, sections: Sequence[Section], facts: Mapping[str, str]) -> str:
    """The page as text."""
    return str(_template("page").render(title=title, summary=summary, sections=sections, facts=facts))


def table_html(table: Table) -> str:
    """One table, for a notebook."""
    return str(_template("table").module.table(table))


def _template(name: str) -> Any:
    try:
        import jinja2
    except ImportError:
        raise ImportError('the report needs jinja2: pip install "hf_longattn[cli]"') from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"shown": shown, "colour": colour, "inline": _inline, "paragraphs": _paragraphs}
    return environment.get_template(f"{name}.html.jinja")


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells, whatever is in them."""
    rows = ([" ".join(cell.replace("|", r"\|").split("\n")) for cell in row] for row in (head, ["---"] * len(head), *body))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown(cell: Value, digits: int) -> str:
    """A cell as text: decimals for floats, thousands separators for integers, a dash for nothing."""
    if cell is None or (isinstance(cell, float) and cell != cell):
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.{digits}f}".replace("-", "−")
    return f"{cell:,}".replace("-", "−") if isinstance(cell, int) else cell


def colour(cell: Value, table: Table) -> str:
    """The style of a cell: for shaded tables a mix of white and blue by value, dark text while the ground is light."""
    if table.shade is None or isinstance(cell, str) or cell is None or cell != cell:
        return ""
    low, high = table.shade
    share = min(max((float(cell) - low) / (high - low), 0.0), 1.0) if high > low else 0.0
    red, green, blue = (round(255 + (full - 255) * share) for full in (0, 90, 156))
    return f"background:rgb({red},{green},{blue});color:{'#fff' if share > 0.8 else '#000'}"


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _paragraphs(text: str) -> list[str]:
    return [p.strip() for p in text.split("\n\n") if p.strip()]
