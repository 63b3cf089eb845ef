"""What tests cost and reach: `pytest -p cost --cost FILE` writes a line for each, `python tests/kit/cost.py FILE` sums
them up.

The cost is CPU seconds of the process and of those it waited for; the clock would say what else the machine did.
`--reach` notes the functions of the package that run in this process while a test does, which tests/kit/mutate.py
reads; it makes calls slower, and graphs that torch traces others. `--cost-sample N` runs at most N cases of each test
function, evenly spread. The sum counts the first of them once, since it prepares what the others share, and the rest
for those left out."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = "hf_longattn"
FUNCTIONS: list[str] = []  # by number
REACHED: set[int] = set()  # a plain set of numbers: torch.compile takes `REACHED.add(7)` into its graph's side effects
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Every function of a module with its qualified name."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    yield from walk(tree, "")


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module so that each of its functions says when it runs."""

    def get_code(self, fullname: str) -> Any:  # from the source, past the cache of bytecode
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        tree = ast.parse(data)
        for name, function in list(functions(tree)):
            first = function.body[0]
            at = int(
                isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
            )
            where = function.body[min(at, len(function.body) - 1)]
            probe = ast.parse(f"__reached__.add({len(FUNCTIONS)})").body[0]
            function.body.insert(at, ast.fix_missing_locations(ast.copy_location(probe, where)))
            FUNCTIONS.append(f"{self.name}:{name}")
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__reached__"] = REACHED
        super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


if "--reach" in sys.argv:  # before conftest.py, which imports the package
    assert PACKAGE not in sys.modules
    sys.meta_path.insert(0, Finder())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", type=Path, help="a file that takes a line of JSON for each test")
    parser.addoption("--reach", action="store_true", help="with what each test reaches")
    parser.addoption("--cost-sample", type=int, default=0, help="at most so many cases of each test function")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    most, kept = config.getoption("--cost-sample"), set()
    for cases in functions.values():
        n = min(most or len(cases), len(cases))
        for i in range(n):
            chosen = cases[i * (len(cases) - 1) // max(n - 1, 1)]
            chosen.stash[WEIGHT] = (len(cases) - 1) / (n - 1) if i else 1.0 if n > 1 else float(len(cases))
            kept.add(chosen)
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = [x for x in items if x in kept]


def spent() -> float:
    """CPU seconds of this process and of those it waited for."""
    return sum(x.ru_utime + x.ru_stime for x in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


WEIGHT = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = spent()
    REACHED.clear()
    try:
        return (yield)
    finally:
        if path := item.config.getoption("--cost"):
            marks = sorted({m.name for m in item.iter_markers()} & {"slow", "crossed"})
            row = {"test": item.nodeid, "cpu": spent() - before, "weight": item.stash[WEIGHT], "marks": marks}
            row["reaches"] = sorted(FUNCTIONS[i] for i in REACHED)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def main(path: Path, top: int = 40) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for what, name in (
        ("folder", lambda t: "/".join(t.split("::")[0].split("/")[:2])),
        ("file", lambda t: t.split("::")[0]),
        ("test", lambda t: t.split("[")[0]),
    ):
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for row in rows:
            inner = not row["marks"]
            for i, x in enumerate((row["cpu"], row["cpu"] * inner, 1.0)):
                sums[name(row["test"])][i] += x * row["weight"]
        print(f"\n{'CPU s':>8} {'check':>8} {'tests':>6}  {what}")
        for key, (cpu, inner, count) in sorted(sums.items(), key=lambda x: -x[1][0])[:top]:
            print(f"{cpu:8.1f} {inner:8.1f} {count:6.0f}  {key}")
        print(*(f"{sum(x[i] for x in sums.values()):8.1f}" for i in range(2)), "       all")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
