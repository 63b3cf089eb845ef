"""The HTML page: one file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from .section import Section, Table, Value


def html(head: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """The page as text. `head` has title, summary and facts."""
    try:
        import jinja2
    except ImportError:
        raise ImportError('the report needs jinja2: pip install "hf_longattn[cli]"') from None
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"shown": shown, "colour": colour, "inline": _inline, "paragraphs": _paragraphs}
    template = environment.from_string(files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(head=head, sections=sections)


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
