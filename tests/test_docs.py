"""The pages of docs/ against the package and the result file."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_longattn.config import method_names

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("name", method_names())
def test_every_method_has_a_page_and_a_row_in_both_indices(name: str) -> None:
    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    page = re.search(rf"\[`{name}`\]\((\w+\.md)\)", index)
    assert page, f"docs/methods/README.md has no link for {name}"
    assert f"`{name}`" in (ROOT / "docs" / "methods" / page[1]).read_text(encoding="utf-8").splitlines()[0]
    rows = [x for x in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if x.startswith("|") and f"`{name}`" in x]
    assert any(f"docs/methods/{page[1]}" in row for row in rows), f"README.md has no row with a link for {name}"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["methods_on_model", "longer_on_model", "speed"])
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_tables_are_the_result_file(page: Path, name: str) -> None:
    module, text = script(name), page.read_text(encoding="utf-8")
    rows = module.load() if name == "methods_on_model" else module.load_all()
    assert module.with_tables(text, rows) == text, f"run: python benchmarks/{name}.py --tables"


def test_memory_grows_linearly_in_the_result_files() -> None:
    speed = script("speed")
    measured: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in speed.load_all():
        if row.get("peak_mib") and row["method"] == "scale_invariant" and row["backend"] in ("auto", "triton"):
            measured.setdefault((row["where"], row["mode"], row["backend"]), []).append(row)
    for name, rows in measured.items():
        if len(rows) > 2:
            assert speed.exponent(rows) < 1.15, name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_extend_is_its_file() -> None:
    page = (ROOT / "docs" / "longer.md").read_text(encoding="utf-8")
    name, table = re.search(r"<!-- extend: (\w+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL).groups()  # type: ignore[union-attr]
    scores = json.loads((ROOT / "benchmarks" / "results" / f"extend-{name}.json").read_text(encoding="utf-8"))["scores"]
    rows = [[n, *(f"{s[k]:.3f}" for k in ("within", "beyond")), *(f"{x:.2f}" for x in s["copies"])] for n, s in scores.items()]
    assert table.splitlines()[2:] == [f"| {' | '.join(row)} |" for row in rows]


def report_table(folder: Path) -> str:
    """The first table of a committed report, as Markdown."""
    data = json.loads((folder / "report.json").read_text(encoding="utf-8"))["sections"][0]["tables"][0]
    rows = [data["columns"], ["---"] * len(data["columns"])]
    rows += [[r[0], *("–" if c is None else f"{c:.3f}" for c in r[1:])] for r in data["rows"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_committed_reports_are_their_rows_and_what_the_page_says() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- report: (\S+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert shown
    for name, table in shown:
        folder = ROOT / "docs" / name
        assert table == report_table(folder)
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        for row in rows:
            if row["task"] == "loss":
                line = next(x for x in table.splitlines() if x.startswith(f"| {row['setting']} |"))
                column = table.splitlines()[0].split("|").index(f" {row['length']:,} ")
                assert float(line.split("|")[column]) == pytest.approx(row["loss"], abs=6e-4)  # one document each


def test_the_likelihoods_of_answers_on_the_page_are_those_of_the_report() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    name, table = re.search(r"<!-- answers: (\S+) -->\n(.*?)\n *<!-- end -->", page, re.DOTALL).groups()  # type: ignore[union-attr]
    sections = json.loads((ROOT / "docs" / name / "report.json").read_text(encoding="utf-8"))["sections"]
    found: dict[str, list[float]] = {}
    for title in ("Pass key", "Three needles"):
        tables = next(s["tables"] for s in sections if s["title"] == title)
        for setting, *values in next(t["rows"] for t in tables if t["title"].startswith("Log-likelihood")):
            found.setdefault(setting, []).extend(values)
    for line in table.splitlines()[2:]:
        settings, *shown = (cell.strip() for cell in line.strip(" |").split("|"))
        for setting in settings.split(", ") if settings not in found else [settings]:
            assert [x.replace("−", "-") for x in shown] == [f"{x:.2f}" for x in found.pop(setting)]
    assert not found
