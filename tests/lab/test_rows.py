"""Every row of lab/results holds a command that runs today, or names the commit at which it ran."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import check_ours, check_script

from lab.papers.run import EXPERIMENTS

RESULTS = Path(__file__).parents[2] / "lab" / "results"
#: In front of a command that needs what was removed since.
THEN = re.compile(r"at [0-9a-f]{7,}: ")


def commands(value: Any) -> Iterator[str]:
    """Every command in what a file holds; a row may need several, each on a line."""
    if isinstance(value, dict):
        if isinstance(value.get("command"), str):
            yield from value["command"].splitlines()
        value = list(value.values())
    for inner in value if isinstance(value, list) else []:
        yield from commands(inner)


def read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


FILES = {path.relative_to(RESULTS).as_posix(): path for path in sorted(RESULTS.rglob("*.json*"))}


@pytest.mark.parametrize("name", FILES)
def test_commands_of_rows_run_today(name: str) -> None:
    found = {command for command in commands(read(FILES[name])) if not THEN.match(command)}
    for first, *words in map(shlex.split, found):
        if first == "hf-longattn":
            check_ours(words)
            continue
        assert first == "python", first
        source, *words = words
        check_script(source, words)
        if source == "lab/papers/run.py":
            experiment, only = EXPERIMENTS[words[0]], words[words.index("--only") + 1]
            assert any(re.search(only, variant) for variant in experiment.variants), (words[0], only)
