"""The notebooks of examples/: every cell runs, in order, with a tiny model in place of the one that they name."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from hf_longattn.slots import registry

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def run(code: str, names: dict[str, Any]) -> None:
    """A cell, whose last expression is shown as a notebook shows it."""
    tree = ast.parse(code)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec", dont_inherit=True), names)
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), "cell", "eval", dont_inherit=True), names)
        shows = [getattr(value, show)() for show in ("_repr_html_", "_repr_png_", "__repr__") if hasattr(value, show)]
        assert any(shows)  # a Figure has an HTML form and gives none


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    texts = {"a text": tiny.text(tmp_path / "text.txt", 4000).read_text(encoding="utf-8")}
    small: dict[str, Any] = {
        "MODEL": str(tiny.save(tmp_path / "model", trained=1024)),
        "TEXTS": texts,
        "LENGTHS": [1024, 2048],
    }
    small |= {"DISTANCES": [2048], "LENGTH": 64, "STEPS": 2}
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert "parameters" in cells[0]["metadata"]["tags"]
    for cell in cells:
        assert not cell["outputs"]
        run("".join(cell["source"]), names)
        if cell is cells[0]:
            names |= {name: small[name] for name in small.keys() & names.keys()}


def test_there_is_one_for_each_use() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare", "extend", "own_method", "train"]
