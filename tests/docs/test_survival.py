"""The page of what the package survives, and the rows behind it."""

from __future__ import annotations

import json
from pathlib import Path

import survival


def test_the_page_says_what_the_rows_said_and_nothing_was_wrong() -> None:
    found = json.loads(survival.SUMMARY.read_text(encoding="utf-8"))
    assert survival.write_page(found) == survival.PAGE.read_text(encoding="utf-8")
    assert list(found["parts"]) == [part for part in survival.PARTS if part in found["parts"]]
    assert not any(ends["wrong"] for kinds in found["parts"].values() for ends in kinds.values())


def test_cases_that_have_a_row_are_not_tried_again(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    report = survival.Report("kills", "eval", rows)
    report.add(0, "killed")
    report.add(2, "killed", "a traceback")
    assert survival.Report("kills", "eval", rows).open(4) == [1, 3]
    assert survival.Report("push", "eval", rows).open(2) == [0, 1]
    found = survival.summary(rows)
    assert found["parts"] == {"kills": {"eval": {"killed": 2, "wrong": 1}}}
    assert survival.table("kills", found).splitlines()[-1] == "| eval | 2 | 2 | 1 |"
