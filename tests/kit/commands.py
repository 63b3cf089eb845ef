"""Whether a command that stands somewhere is one: its program is there, and takes its options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from hf_longattn.cli import app
from hf_longattn.evaluation.settings import parse_settings
from hf_longattn.training import load_recipe

ROOT = Path(__file__).parents[2]


def options_of(source: str) -> set[str]:
    """The options that a script adds and its other words, with those of the modules beside it that it imports."""
    path, found = ROOT / source, set()
    modules = re.findall(r"^(?:from|import) (?:[\w.]+\.)?(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    for file in (path, *(path.parent / f"{module}.py" for module in modules)):
        if file.is_file():
            found |= set(re.findall(r'add_argument\(\s*"([\w-]+)"', file.read_text(encoding="utf-8")))
    return found


def check_script(source: str, words: list[str]) -> None:
    assert (ROOT / source).is_file()
    taken = options_of(source)
    unknown = {w.partition("=")[0] for w in words if w.startswith("--")} - taken - {"--help"}
    assert not unknown, f"{source} has no {unknown}"
    if words and not words[0].startswith("-"):
        assert any(not name.startswith("-") for name in taken), f"{source} takes no word such as {words[0]}"


def ours(name: str) -> Any:
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


def check_ours(words: list[str]) -> None:
    """A whole command: options and values are read as the command reads them, then what they mean."""
    name, *rest = [w for w in words if w != "..."]
    given = ours(name).make_context(name, rest).params
    if name == "train":
        keys = {o.split("=")[0] for o in given["overrides"]}
        load_recipe(given["recipe"], [*given["overrides"], *(f"{k}=x" for k in ("model", "data") if k not in keys)])
    if name in ("eval", "inspect", "probe"):
        parse_settings(given["method"], given.get("rope"))
