"""Every table and picture of README and docs/ that is made from rows: `python -m lab.pages` makes all of them anew.

A page holds `<!-- MARK: WHAT -->` ... `<!-- end -->`. What stands there is made where the rows are measured (`contents`, and
`pictures` by their path in docs/); here are committed reports, `hf-longattn extend`, `hf-longattn probe`, and README's own.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from hf_longattn.evaluation.report import figures, markdown
from hf_longattn.evaluation.report.page import shown
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents, fill_pages, filled
from lab.papers import coverage
from lab.papers import tables as papers
from lab.pretrained import (
    answers,
    choice,
    copies,
    decoding,
    dispersion,
    headline,
    longer_on_model,
    many,
    methods_on_model,
    methods_trained,
    needles_on_model,
    quantised_cache,
    reading_far,
    regret,
    trained,
)
from lab.pretrained.runner import STEP
from lab.speed import gpu_tables, speed, vllm_speed

ROOT = Path(__file__).parents[1]
DOCS, RESULTS, BADGES = ROOT / "docs", ROOT / "lab" / "results", ROOT / "docs" / "badges"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


# reports and commands -------------------------------------------------------------------------------------------------


def report(name: str, section: str = "Loss by length", which: int = 0) -> str:
    """A table of a committed report."""
    return of_report(read(DOCS / name / "report.json"), section, which)


def evaluated(what: str) -> str:
    """A table of what `hf-longattn eval` found, from its report and rows in one file: "NAME | SECTION | WHICH"."""
    name, section, which = (part.strip() for part in what.split("|"))
    return of_report(read(RESULTS / f"eval-{name}.json"), section, int(which))


def of_report(result: dict[str, Any], section: str, which: int) -> str:
    found = next(s["tables"] for s in result["sections"] if s["title"] == section)[which]
    return markdown(found["columns"], [[shown(cell, found["digits"]) for cell in row] for row in found["rows"]])


def extended(name: str) -> str:
    """What `hf-longattn extend` found, from a copy of its extend.json."""
    result = read(RESULTS / f"extend-{name}.json")
    head = ["", f"prose to {result['edge']}", "prose beyond", *(f"copy {distance} back" for distance, _ in result["copies"])]
    body = [
        [row["setting"], *(f"{row[k]:.3f}" for k in ("within", "beyond")), *(f"{x:.2f}" for x in row["copies"])]
        for row in result["rows"]
        if "read" in row
    ]
    return markdown(head, body)


def probed(what: str) -> str:
    """Losses of `hf-longattn probe` by distance, from a copy of its probe.json: "NAME copy|text [SETTING ...]"."""
    name, kind, *only = what.split()
    rows = read(RESULTS / f"probe-{name}.json")["rows"]
    distances = sorted({row["distance"] for row in rows})
    cells = {(row["setting"], row["distance"]): "{:.2f} ± {:.2f}".format(*mean_interval(row[kind])) for row in rows}
    settings = only or list(dict.fromkeys(row["setting"] for row in rows))
    return markdown(
        ["tokens back", *(f"{d:,}" for d in distances)],
        [[f"`{s}`", *(cells.get((s, d), "–") for d in distances)] for s in settings],
    )


# README ---------------------------------------------------------------------------------------------------------------


def pictures() -> dict[str, bytes]:
    """Perplexity on prose by position, and on repeated passages beyond the trained length by distance: side by side where
    there is room, one below the other on a phone, and legible there.
    """
    drawn = {name: figures.pyplot().subplots(figsize=(3.4, 3.3), constrained_layout=True) for name in ("prose", "copies")}
    prose, copied = (panel for _, panel in drawn.values())
    for (setting, name), own in zip(
        headline.SMOLLM2.settings.items(), figures.styles(list(headline.SMOLLM2.settings)), strict=True
    ):
        rows = headline.SMOLLM2.rows_of(setting)
        style = own | {"markersize": 4, "linewidth": 1.6, "label": name.strip("`")}
        means = [math.exp(sum(column) / len(rows)) for column in zip(*(r["prose"] for r in rows), strict=True)]
        prose.plot([STEP * (n + 0.5) for n in range(len(means))], means, **style)
        read_again = [
            (d, p, math.exp(x), r["trained"]) for r in rows for (d, p), x in zip(r["copies"], r["copying"], strict=True)
        ]
        beyond = sorted((d, x) for d, p, x, trained in read_again if p >= trained)
        copied.plot(*zip(*beyond, strict=True), **style | {"linestyle": "none", "markersize": 3, "alpha": 0.7})
    length = headline.SMOLLM2.protocol["length"]
    ticks = range(0, length + 1, length // 4)
    for panel in (prose, copied):
        panel.axvline(rows[0]["trained"], color="#999999", linewidth=1, linestyle=":")
        panel.set(yscale="log", ylabel="perplexity")
        panel.set_xticks(ticks, map(figures.tokens_shown, ticks))
        panel.grid(visible=True, color="#eeeeee", which="both")
        panel.legend(fontsize=9, loc="upper left")
    prose.set(title="Predicting a text", xlabel="position (tokens); trained at 8k")
    copied.set(title="Repeating a passage", xlabel="how far back it was (tokens)")
    return {f"headline-{name}.png": figures.png(figure) for name, (figure, _) in drawn.items()}


def of_extend() -> dict[str, bytes]:
    """What `hf-longattn extend` read: prose within and beyond the trained length, and copies by their distance."""
    result = read(RESULTS / "extend-smollm2.json")
    figure, (above, below) = figures.pyplot().subplots(2, 1, figsize=(5.4, 7.4), constrained_layout=True)
    for row, own in zip(result["rows"], figures.styles([r["setting"] for r in result["rows"]]), strict=True):
        above.plot([0, 1], [row["within"], row["beyond"]], label=row["setting"], **own)
        copied = sorted((d, x) for (d, _), x in zip(result["copies"], row["copies"], strict=True))
        below.plot(*zip(*copied, strict=True), **own)
    above.set(title="Prose, by the trained length", ylabel=figures.NATS)
    above.set_xticks([0, 1], ["within", "beyond"])
    above.legend(fontsize=9)
    below.set(title="A passage repeated from far back", xlabel="how far back it was (tokens)", ylabel=figures.NATS)
    figures.in_powers_of_two(below, [2048, 4096, 8192])
    return {"extend.png": figures.png(figure)}


def of_probe() -> dict[str, bytes]:
    """Losses of `hf-longattn probe` on the passage that is read again, by its distance."""
    result = read(RESULTS / "probe-smollm2.json")
    lines: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, list[float]] = {}
    for row in sorted(result["rows"], key=lambda row: row["distance"]):
        mean, half = mean_interval(row["copy"])
        lines.setdefault(row["setting"], []).append((row["distance"], mean))
        errors.setdefault(row["setting"], []).append(half)
    mark, title = figures.trained_mark(result["protocol"]["trained"]), "A passage read again, by how far back"
    drawn = figures.curves(lines, "tokens back", figures.NATS, title, mark, errors=errors)
    return {"probe.png": figures.png(drawn)}


def badges() -> dict[str, str]:
    """File names and SVGs of what pyproject.toml says; no host is asked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = dict(d.split(">=") for d in project["dependencies"])
    said = {
        "python": project["requires-python"].removeprefix(">=") + "+",
        "transformers": needs["transformers"].replace(",<", " to <"),
        "torch": needs["torch"] + "+",
        "licence": project["license"],
    }
    notebooks = {f"notebook-{path.stem}": ("notebook", path.stem) for path in (ROOT / "examples").glob("*.ipynb")}
    return {f"{name}.svg": _badge(*words) for name, words in ({x: (x, v) for x, v in said.items()} | notebooks).items()}


def _badge(name: str, value: str) -> str:
    left, right = (7 * len(word) + 14 for word in (name, value))
    text = '<text x="{}" y="14" fill="#fff" text-anchor="middle" font-family="sans-serif" font-size="11">{}</text>'
    shown = value.replace("<", "&lt;")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{name}: {shown}">'
        f'<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="#0072b2"/>'
        f"{text.format(left // 2, name)}{text.format(left + right // 2, shown)}</svg>\n"
    )


# all of them ----------------------------------------------------------------------------------------------------------


def contents() -> Contents:
    """What stands below every mark."""
    own: dict[str, Any] = {
        "report": report,
        "attention": lambda name: report(name, "Attention"),
        "verdict": lambda name: report(name, "Verdict"),
        "copies": lambda name: report(name, "Copies from far back", -1),
        "eval": evaluated,
        "extend": extended,
        "probe": probed,
    }
    pretrained = (answers, choice, copies, decoding, dispersion, headline, longer_on_model, many, methods_on_model)
    pretrained += (methods_trained, needles_on_model, quantised_cache, reading_far, regret, trained)
    for measured in (papers, coverage, *pretrained, speed, gpu_tables, vllm_speed):
        own |= measured.contents()
    return own


def main() -> None:
    fill_pages(DOCS, contents())
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8"), contents()), encoding="utf-8")
    measured = papers.pictures() | longer_on_model.pictures() | speed.pictures()
    for path, drawn in (measured | pictures() | of_extend() | of_probe()).items():
        (DOCS / path).write_bytes(drawn)
    for file, badge in badges().items():
        (BADGES / file).write_text(badge, encoding="utf-8")


if __name__ == "__main__":
    main()
