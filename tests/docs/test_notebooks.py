"""The notebooks of examples/: every cell runs, with a tiny model in place of theirs; what they store is of their code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from lab import notebooks

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))
READ = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in NOTEBOOKS}


def forms(outputs: list[dict[str, Any]]) -> list[list[str]]:
    """What a cell gives, by kind."""
    return [sorted(out.get("data", {out.get("name"): None})) for out in outputs]


def first_cells(outputs: list[dict[str, Any]]) -> list[str]:
    """The first cell of each row of HTML tables, in alphabetical order: the best stand first."""
    page = "".join("".join(out.get("data", {}).get("text/html", "")) for out in outputs)
    return sorted(re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<tr[^>]*>\s*(<t[hd].*?</t[hd]>)", page, re.DOTALL))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_every_cell_runs_and_gives_what_is_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None
) -> None:
    """With another model numbers differ; what is shown, and of which settings, does not."""
    monkeypatch.chdir(tmp_path)
    texts = {"python help": tiny.text(tmp_path / "text.txt", 6000).read_text(encoding="utf-8")}
    small: dict[str, Any] = {"MODEL": str(tiny.save(tmp_path / "model", trained=1024)), "TEXTS": texts}
    small |= {"LENGTHS": [1024, 2048], "DISTANCES": [1280, 2048, 4096], "TO": 2048, "LENGTH": 64, "STEPS": 2}
    cells = notebooks.code_cells(READ[name])
    assert "parameters" in cells[0]["metadata"]["tags"]
    for cell, now in zip(cells, notebooks.run(READ[name], small), strict=True):
        assert forms(cell["outputs"]) == forms(now), "".join(cell["source"])
        assert first_cells(cell["outputs"]) == first_cells(now), "".join(cell["source"])


@pytest.mark.parametrize("name", READ)
def test_what_is_stored_is_of_this_code(name: str) -> None:
    noted = READ[name]["metadata"]["hf_longattn"]
    assert noted["code"] == notebooks.code_hash(READ[name]), f"run: python -m lab.notebooks {name}"
    assert set(noted) == {"code", "model", "versions", "date"}
    assert [cell["execution_count"] for cell in notebooks.code_cells(READ[name])] == list(
        range(1, len(notebooks.code_cells(READ[name])) + 1)
    )


def test_there_is_one_for_each_use_and_each_has_a_badge() -> None:
    assert list(READ) == ["compare", "extend", "own_method", "train"]
    for page in ("README.md", "examples/README.md"):
        text = (notebooks.FOLDER.parent / page).read_text(encoding="utf-8")
        for name in READ:
            assert re.search(rf"badges/notebook-{name}\.svg\)\]\((examples/)?{name}\.ipynb\)", text), (page, name)
