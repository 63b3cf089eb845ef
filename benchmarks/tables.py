"""Every table of README and docs/ that is filled from rows: `python -m benchmarks.tables` makes all of them anew.

A page holds `<!-- MARK: WHAT -->` ... `<!-- end -->`. Most marks are made where the rows are measured, whose `--tables` draws
their pictures too; here are those of committed reports, of `hf-longattn extend` and of `hf-longattn probe`.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks import (
    copies,
    dispersion_on_model,
    head_gains,
    headline,
    logit_gaps,
    longer_on_model,
    methods_on_model,
    reading_far,
    recipes,
    speed,
)
from hf_longattn.evaluation.report.markdown import Contents, fill_pages, filled, table
from hf_longattn.evaluation.report.page import shown
from hf_longattn.evaluation.statistics import mean_interval
from recipes.reproduce import run as reproductions
from recipes.reproduce import tables as reproduced

ROOT = Path(__file__).parents[1]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def report(name: str, section: str = "Loss by length", which: int = 0) -> str:
    """A table of a committed report."""
    return of_report(read(ROOT / "docs" / name / "report.json"), section, which)


def evaluated(what: str) -> str:
    """A table of what `hf-longattn eval` found, from its report and rows in one file: "NAME | SECTION | WHICH"."""
    name, section, which = (part.strip() for part in what.split("|"))
    return of_report(read(ROOT / "benchmarks" / "results" / f"eval-{name}.json"), section, int(which))


def of_report(result: dict[str, Any], section: str, which: int) -> str:
    found = next(s["tables"] for s in result["sections"] if s["title"] == section)[which]
    return table(found["columns"], [[shown(cell, found["digits"]) for cell in row] for row in found["rows"]])


def extended(name: str) -> str:
    """What `hf-longattn extend` found, from a copy of its extend.json."""
    result = read(ROOT / "benchmarks" / "results" / f"extend-{name}.json")
    if "rows" in result:
        result |= {"scores": {row["setting"]: row for row in result["rows"] if "read" in row}}
    edge = result["edge"] if "rows" in result else result["trained"]
    head = ["", f"prose to {edge}", "prose beyond", *(f"copy {distance} back" for distance, _ in result["copies"])]
    return table(
        head,
        [
            [setting, *(f"{s[k]:.3f}" for k in ("within", "beyond")), *(f"{x:.2f}" for x in s["copies"])]
            for setting, s in result["scores"].items()
        ],
    )


def probed(what: str) -> str:
    """Losses of `hf-longattn probe` by distance, from a copy of its probe.json: "NAME copy|text [SETTING ...]"."""
    name, kind, *only = what.split()
    rows = read(ROOT / "benchmarks" / "results" / f"probe-{name}.json")["rows"]
    distances = sorted({row["distance"] for row in rows})
    cells = {(row["setting"], row["distance"]): "{:.2f} ± {:.2f}".format(*mean_interval(row[kind])) for row in rows}
    settings = only or list(dict.fromkeys(row["setting"] for row in rows))
    return table(
        ["tokens back", *(f"{d:,}" for d in distances)],
        [[f"`{s}`", *(cells.get((s, d), "–") for d in distances)] for s in settings],
    )


def contents() -> Contents:
    """What stands below every mark."""
    own = {
        "report": report,
        "verdict": lambda name: report(name, "Verdict"),
        "verdict-fewer": lambda name: report(name, "Verdict", 1),
        "copies": lambda name: report(name, "Copies from far back", -1),
        "effective": lambda name: report(name, "Effective length"),
        "eval": evaluated,
        "extend": extended,
        "probe": probed,
    }
    measured = (
        copies,
        dispersion_on_model,
        head_gains,
        headline,
        logit_gaps,
        longer_on_model,
        methods_on_model,
        reading_far,
        recipes,
        speed,
    )
    for other in (reproduced.contents(reproduced.load(reproductions.RESULTS)), *(m.contents() for m in measured)):
        own |= other
    return own


if __name__ == "__main__":
    fill_pages(ROOT / "docs", contents())
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8"), contents()), encoding="utf-8")
