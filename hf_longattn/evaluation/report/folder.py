"""A report's folder: `sections/*.json` are its source; `index.html`, `report.json` and `figures/` are made from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..rows import write_whole
from .page import html
from .section import Section

HEAD = "report-head.json"


def add_section(folder: Path, section: Section, order: int = 50) -> Path:
    """Put a section into a report, replacing the one of the same title, and render the page anew; returns the page.

    Args:
        folder: a report's folder; it and the report are made if there are none.
        order: sections stand in this order, then by title. Losses and tasks take 10 to 40, diagnostics 50 and above.
    """
    _keep(folder, section, order)
    return render(folder)


def read_sections(folder: Path) -> list[Section]:
    """The sections of a report, in order."""
    files = sorted((folder / "sections").glob("*.json"))
    return [Section.from_dict(json.loads(f.read_text(encoding="utf-8"))) for f in files]


def write_report(
    folder: Path, title: str, summary: str, sections: Sequence[tuple[int, Section]], facts: Mapping[str, str]
) -> Path:
    """Write or rewrite a report: its head and these sections; those that other commands added stay. Returns the page.

    Args:
        summary: the one or two sentences that a reader in a hurry takes away.
        sections: (order, section), as in `add_section`.
        facts: what stands at the end of the page: model, versions, command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = {"title": title, "summary": summary, "facts": dict(facts)}
    write_whole(folder / HEAD, json.dumps(head, indent=1, ensure_ascii=False))
    for order, section in sections:
        _keep(folder, section, order)
    return render(folder)


def render(folder: Path) -> Path:
    """Make index.html, report.json and figures/ from what is in the folder; returns the page."""
    head: dict[str, Any] = {"title": "Report", "summary": "", "facts": {}}
    if (folder / HEAD).exists():
        head = json.loads((folder / HEAD).read_text(encoding="utf-8"))
    sections = read_sections(folder)
    data = {**head, "sections": [s.to_dict() for s in sections]}
    figures = [f for s in sections for f in s.figures]
    if len({f.name for f in figures}) < len(figures):
        raise ValueError(f"two figures share a name: {sorted(f.name for f in figures)}")
    (folder / "figures").mkdir(exist_ok=True)
    for stale in {p.stem for p in (folder / "figures").glob("*.png")} - {f.name for f in figures}:
        (folder / "figures" / f"{stale}.png").unlink()
    for figure in figures:
        (folder / "figures" / f"{figure.name}.png").write_bytes(figure.png)
    for section in data["sections"]:
        for f in section["figures"]:
            f["png"] = f"figures/{f['name']}.png"
    write_whole(folder / "report.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / "index.html", html(head, sections))
    return folder / "index.html"


def _keep(folder: Path, section: Section, order: int) -> None:
    where = folder / "sections"
    where.mkdir(parents=True, exist_ok=True)
    for old in where.glob(f"*-{section.slug}.json"):
        if old.name.partition("-")[2] == f"{section.slug}.json":
            old.unlink()
    write_whole(where / f"{order:02d}-{section.slug}.json", json.dumps(section.to_dict()))
