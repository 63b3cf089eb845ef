"""docs/how-to/add-a-method.md, done as it says in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "add-a-method.md"


def steps() -> dict[str, str]:
    """The page's blocks of code by their first lines, which say where each goes."""
    blocks = re.findall(r"^( *)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    texts = [textwrap.dedent(code) for _, code in blocks]
    return {where.removeprefix("# "): code for where, _, code in (text.partition("\n") for text in texts)}


@pytest.mark.slow
def test_the_steps_in_a_copy_of_the_tree(tmp_path: Path) -> None:
    for folder in ("hf_longattn", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for where, code in steps().items():
        file, _, into = where.partition(", in ")
        path = tmp_path / file
        if into:
            text = path.read_text(encoding="utf-8")
            head = re.search(rf"^{into}\b.*\n", text, re.MULTILINE)
            assert head, where
            path.write_text(text[: head.end()] + textwrap.indent(code, "    ") + text[head.end() :], encoding="utf-8")
        elif path.parent.is_dir():
            path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + code, encoding="utf-8")
    own = os.environ | {"PYTHONPATH": str(tmp_path)}
    write = "tests/kit/signatures.py"
    assert f"python {write}" in PAGE.read_text(encoding="utf-8")
    subprocess.run([sys.executable, write], cwd=tmp_path, env=own, check=True)
    check = "integration/test_exactness.py::test_forward_is_the_closed_form[tiled-llama-root_logn]"
    checks = check, "test_imports.py::test_editors_know_the_parameters_of_every_method"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(tmp_path / "tests" / x) for x in checks)]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
