"""`make engines`: runs the tests of engines, and writes what they recorded into the table of docs/engines.md.

A test records each cell that it has shown, `record_property(engine, case)`, or what it was refused with, "case: message". A
cell is exact only if every case of that method was; where tests are skipped, for want of an engine, it says "not run". What
vLLM gave comes from docs/vllm.json, which `make vllm` writes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from cases import CASES

from hf_longattn.slots.registry import list_methods

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
SERVED = PAGE.with_name("vllm.json")
FILES = ("test_engines.py", "test_distributed.py", "test_run.py")
ENGINES = (
    "continuous batching",
    "tensor parallel",
    "FSDP2",
    "ZeRO-3 (DeepSpeed)",
    "Ulysses (DeepSpeed)",
    "split_sequence",
    "vLLM",
)
#: A line of the table: names of methods, and their cells.
LINE = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", re.MULTILINE)
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
#: In nats, of a log probability under vLLM beside transformers.
TOLERANCE = 2e-4
Cells = dict[tuple[str, str], tuple[str, str]]


def recorded(reports: list[Path]) -> Cells:
    """By engine and method: the test that showed it, and "exact" or the message."""
    cells: Cells = {}
    for test in (test for report in reports for test in ElementTree.parse(report).iter("testcase")):
        passed = not any(test.find(tag) is not None for tag in ("failure", "error", "skipped"))
        for entry in test.iter("property"):
            engine, (case, _, message) = entry.get("name", ""), (entry.get("value") or "").partition(": ")
            for method in [case] if case in list_methods() else [m.name for m in CASES[case].methods]:
                name = re.sub(r"\[.*", "", test.get("name", ""))
                outcome = message if passed and message else "exact" if passed else "FAILED"
                if cells.get((engine, method), ("", "exact"))[1] in ("exact", outcome):
                    cells[engine, method] = name, outcome
    return cells


def served() -> Cells:
    """What `make vllm` measured, by method."""
    cells: Cells = {}
    for row in json.loads(SERVED.read_text(encoding="utf-8"))["rows"]:
        if not row.get("meant") and row["case"] != "none" and "plain" not in row:  # to be refused, without a method, quantised
            right = "error" not in row and row["largest"] <= TOLERANCE
            case = row["case"]
            for method in [case] if case in list_methods() else [m.name for m in CASES[case].methods]:
                if cells.get(("vLLM", method), ("", "exact"))[1] == "exact":
                    cells["vLLM", method] = "make vllm", "exact" if right else "FAILED"
    return cells


def rows_of(page: str) -> dict[str, list[str]]:
    """By method, its cells in the table of a page."""
    found = LINE.finditer(page)
    return {name: m[2].split(" | ") for m in found for name in re.findall(r"`(\w+)`", m[1])}


def lines(rows: dict[str, list[str]]) -> list[str]:
    """Lines of the table: methods of which all cells are alike in one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows.items():
        alike.setdefault(tuple(cells), []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]


def with_served(page: str) -> str:
    """A page with the table, its last column anew."""
    cells, found = served(), list(LINE.finditer(page))
    rows = {name: [*row[:-1], cells.get(("vLLM", name), ("", "not run"))[1]] for name, row in rows_of(page).items()}
    return page[: found[0].start()] + "\n".join(lines(rows)) + page[found[-1].end() :]


def table(cells: Cells) -> str:
    """A row for the methods that are alike, one column an engine; below it the tests and the messages."""
    tests: dict[str, set[str]] = {}
    messages: list[str] = []
    rows = {}
    for method in list_methods():
        row = []
        for engine in ENGINES:
            test, outcome = cells.get((engine, method), ("", "not run"))
            if test:
                tests.setdefault(engine, set()).add(test)
            if outcome not in ("exact", "not run", "FAILED"):
                kind = re.sub(rf"\b{re.escape(method)}\b", "...", outcome)
                messages += [] if kind in messages else [kind]
                outcome = f"refused ({messages.index(kind) + 1})"
            row.append(outcome)
        if any(cell != "not run" for cell in row):
            rows[method] = row
    head = [f"| | {' | '.join(ENGINES)} |", "|---" * (len(ENGINES) + 1) + "|", *lines(rows), ""]
    head += ["Shown by:", "", *(f"- {e}: {', '.join(f'`{t}`' for t in sorted(tests[e]))}" for e in ENGINES if e in tests), ""]
    told = ["Messages:", "", *(f"{n}. {text}" for n, text in enumerate(messages, 1))] if messages else []
    return "\n".join([*head, *told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, nargs="+", help="junit reports of earlier runs, in place of a run")
    parser.add_argument("--served", action="store_true", help="only the column of vLLM, from docs/vllm.json")
    arguments = parser.parse_args()
    if arguments.served:
        PAGE.write_text(with_served(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        if arguments.report is None:
            files = [str(p) for name in FILES for p in Path(__file__).parents[1].rglob(name)]
            options = ["-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
            if (status := subprocess.run([sys.executable, "-m", "pytest", *options, *files]).returncode) != 0:
                raise SystemExit(status)
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(
            f"{before}{BEGIN}\n{table(recorded(arguments.report or [report]) | served())}\n{END}{rest.partition(END)[2]}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
