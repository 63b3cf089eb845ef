"""Every table, figure and statement of the four papers, and what was run of it: coverage.yaml and the rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import RowFile
from lab.markdown import Contents
from lab.papers.experiment import LISTED

ROOT = Path(__file__).parents[2]
RESULTS, THEORY = ROOT / "lab" / "results" / "reproductions", ROOT / "docs" / "theory" / "theory.json"
PAPERS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def seeds_of(experiment: str, variants: str) -> str:
    """Of the variants that match, how many seeds have rows; empty without rows."""
    found: dict[str, int] = {}
    path = RESULTS / f"{experiment}.jsonl"
    for row in RowFile(path) if path.exists() else []:
        if re.search(variants, row["variant"]):
            found[row["variant"]] = found.get(row["variant"], 0) + 1
    if not found:
        return ""
    least, most = min(found.values()), max(found.values())
    return f"{least} to {most} seeds" if least < most else "1 seed" if most == 1 else f"{most} seeds"


def checked(claims: str) -> str:
    """How many statements of theory.json match, all of which hold."""
    told = json.loads(THEORY.read_text(encoding="utf-8"))["claims"]
    found = [c["holds"] for c in told if re.search(claims, c["claim"])]
    if not found or not all(found):
        raise ValueError(f"theory.json holds no statement, or a false one, that matches {claims!r}")
    return f"{len(found)} numbers" if len(found) > 1 else "1 number"


def run(item: dict[str, Any]) -> str:
    """What was run, with links; else what it would cost."""
    done, missing = [], []
    for experiment, variants in item.get("rows", {}).items():
        if seeds := seeds_of(experiment, variants):
            done.append(f"[{experiment}](../../lab/results/reproductions/{experiment}.jsonl), {seeds}")
        else:
            missing.append(f"`{experiment}`: {LISTED[experiment]['minutes']:g} CPU minutes a run")
    if "claims" in item:
        done.append(f"[theory](attention.md#the-papers-theory), {checked(item['claims'])}")
    if "other" in item:
        done.append(item["other"])
    if cost := item.get("cost"):
        missing.append(cost)
    return "; ".join([*done, *(f"**not run**: {what}" for what in missing)])


def coverage(_: str) -> str:
    """One table, a paper after the other."""
    body = []
    for paper in PAPERS:
        body.append([f"**{paper['paper']}**", "", ""])
        for item in paper["items"]:
            where = f" ([page]({item['page']}))" if "page" in item else ""
            body.append([f"{item['item']}: {item['about']}", run(item), item.get("found", "–") + where])
    return markdown(["the paper's", "run here", "agrees?"], body)


def contents() -> Contents:
    return {"papers": coverage}
