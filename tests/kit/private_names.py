"""The private names of other packages that stand in this one, by file: `python tests/kit/private_names.py`.

They may stand in `DOORS` alone; tests/test_imports.py asserts it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hf_longattn"
#: The modules that may know what another package does not promise.
DOORS = (
    "integration/internals.py",  # Transformers, accelerate, DeepSpeed
    "integration/patches.py",
    "integration/engines/vllm/",  # vLLM
    "sharing/adapters.py",  # PEFT
    "core/tracing.py",  # torch
    "core/kernels/",
    "slots/learned.py",
)
#: Of named tuples, which have no names of their own to give.
PUBLIC = {"_replace", "_asdict", "_fields"}


def _private(name: str) -> bool:
    ours = name in PUBLIC or name.startswith("_longattn")
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None and not ours


def _defined(tree: ast.Module) -> set[str]:
    """The names that a module defines, its classes' attributes among them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or "")
        if isinstance(node, ast.ClassDef):
            stored = (x for x in ast.walk(node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store))
            found |= {x.attr for x in stored if isinstance(x.value, ast.Name) and x.value.id in ("self", "cls")}
    return found


def _affixes(tree: ast.Module) -> set[ast.AST]:
    """Strings that are looked for inside others, or are parts of them."""
    tests = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "replace")
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    found = {x for call in calls if call.func.attr in tests for x in call.args}  # type: ignore[attr-defined]
    return found | {x for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for x in node.values}


def foreign(package: Path = PACKAGE) -> Counter[tuple[str, str]]:
    """How often each private name of another package stands in each file."""
    trees = {path.relative_to(package).as_posix(): ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    own = set().union(*map(_defined, trees.values()))
    own |= {"_repr_png_"}  # what notebooks ask for
    found: Counter[tuple[str, str]] = Counter()
    for file, tree in sorted(trees.items()):
        affixes = _affixes(tree)
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in affixes:
                names = [node.value]
            found.update(
                (file, name) for name in names if _private(name) and name not in own and not name.startswith("_longattn")
            )
    return found


def outside() -> list[str]:
    """The names that stand outside of the doors, each with its file."""
    return [f"{file}: {name}" for file, name in sorted(foreign()) if not file.startswith(DOORS)]


if __name__ == "__main__":
    for (file, name), times in foreign().items():
        print(f"{file:44} {name:44} {times:3} {'' if file.startswith(DOORS) else 'OUTSIDE'}")
