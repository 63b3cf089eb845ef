"""README's table and picture, from rows that exist, and its badges: `python -m benchmarks.headline` writes the files.

Which rows: ROWS, MODEL, LENGTH and TEXTS below, and nothing else. Losses are shown as perplexities.
"""

from __future__ import annotations

import math
import tomllib
from typing import Any

from benchmarks.longer_on_model import ROOT, STEP, groups_of, summary
from hf_longattn.evaluation.report import figures
from hf_longattn.evaluation.report.markdown import Contents, table
from hf_longattn.evaluation.rows import Rows

ROWS = ROOT / "benchmarks" / "results" / "copies.json"
MODEL, LENGTH, TEXTS = "SmolLM2-135M-Instruct", 16384, ("prideprejudice", "persuasion", "python-reference")
PICTURE, BADGES = ROOT / "docs" / "headline.png", ROOT / "docs" / "badges"
#: The setting as rows name it, as a reader knows it, as a caption has it.
SETTINGS = {"unmodified": "unmodified", "YaRN × 2": "YaRN × 2", "rerope(window 4096)": "`extend`"}
HEAD = ["", "text up to 8k tokens", "text from 8k to 16k", "a passage repeated from more than 8k back"]


def rows_of(setting: str) -> list[dict[str, Any]]:
    """One row a text, in the order of TEXTS."""
    plain = [r for r in Rows(ROWS) if "adapter" not in r]
    found = {r["text"]: r for r in plain if (r["name"], r["model"], r["length"]) == (setting, MODEL, LENGTH)}
    return [found[text] for text in TEXTS]


def perplexities(setting: str) -> list[float]:
    """On prose within and beyond the trained length, and on copies from farther back than that; the mean loss over texts."""
    losses = zip(*(summary(row) for row in rows_of(setting)), strict=True)
    within, beyond, *_, far = (math.exp(sum(column) / len(TEXTS)) for column in losses)
    return [within, beyond, far]


def shown(_: str) -> str:
    body = [[name, *(f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in perplexities(s))] for s, name in SETTINGS.items()]
    return table(HEAD, body)


def contents() -> Contents:
    """What stands below `<!-- headline: ... -->`."""
    return {"headline": shown}


def picture() -> bytes:
    """Left, perplexity on prose by position; right, on repeated passages beyond the trained length by distance."""
    figure, (left, right) = figures.pyplot().subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for (setting, name), own in zip(SETTINGS.items(), figures.styles(list(SETTINGS)), strict=True):
        rows = rows_of(setting)
        style = own | {"markersize": 4, "linewidth": 1.6, "label": name.strip("`")}
        prose = [math.exp(sum(column) / len(rows)) for column in zip(*(r["prose"] for r in rows), strict=True)]
        left.plot([STEP * (n + 0.5) for n in range(len(prose))], prose, **style)
        copies = [(d, math.exp(x)) for r in rows for (d, _), x in zip(*_beyond(r), strict=True)]
        right.plot(*zip(*sorted(copies), strict=True), **style | {"linestyle": "none", "markersize": 6})
    for panel in (left, right):
        panel.axvline(rows[0]["trained"], color="#999999", linewidth=1, linestyle=":")
        panel.set(yscale="log")
        panel.grid(visible=True, color="#eeeeee", which="both")
    left.set(title="Predicting a novel", xlabel="position (tokens); trained at 8,192", ylabel="perplexity")
    right.set(title="Repeating a passage of the text", xlabel="how far back it stands (tokens)", ylabel="perplexity")
    right.legend(fontsize=9)
    return figures.png(figure)


def _beyond(row: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """The copies that stand beyond the trained length, and their losses."""
    kept = [(c, x) for c, x in zip(row["copies"], row["copying"], strict=True) if c[1] >= row["trained"]]
    assert len(kept) == len(groups_of(row)[3]) + len(groups_of(row)[4])
    return [c for c, _ in kept], [x for _, x in kept]


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
    return {f"{name}.svg": _badge(name, value) for name, value in said.items()}


def _badge(name: str, value: str) -> str:
    left, right = (7 * len(word) + 14 for word in (name, value))
    text = '<text x="{}" y="14" fill="#fff" text-anchor="middle" font-family="sans-serif" font-size="11">{}</text>'
    shown = value.replace("<", "&lt;")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{name}: {shown}">'
        f'<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="#0072b2"/>'
        f"{text.format(left // 2, name)}{text.format(left + right // 2, shown)}</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_bytes(picture())
    BADGES.mkdir(exist_ok=True)
    for file, drawn in badges().items():
        (BADGES / file).write_text(drawn, encoding="utf-8")
