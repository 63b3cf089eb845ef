"""Faults put into the package one at a time, and whether a test notices: python tests/kit/mutate.py run --reaches COST
--rows ROWS.

A mutant is one change of one expression or statement. It is tried by the tests that ran the function it is in, the
cheapest first, until one fails; tests/kit/cost.py wrote which those are. Trees are copies, so that nothing is changed
here and commands that tests start see the fault too; the libraries are imported once, and each mutant runs in a fork.
A mutant that outlasts its time is killed: it loops.

    python -m pytest -p cost --cost COST --reach --cost-sample 2    which tests reach what; minutes to an hour
    python tests/kit/mutate.py run --reaches COST --rows ROWS --count 150 [--only hf_longattn/methods]
    python tests/kit/mutate.py run --reaches COST --rows AFTER --again ROWS     those that were killed, by the tests of now
    python tests/kit/mutate.py show ROWS
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cost

ROOT = Path(__file__).parents[2]
#: Programs for a GPU or another engine, which tests here can at most read.
LEFT_OUT = ("core/kernels/triton_kernels.py", "core/kernels/triton_programs.py", "integration/engines/vllm/")
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    file: str  # below the root
    function: str  # module:qualified name, as cost.py writes it
    line: int
    what: str
    key: str  # the same as long as the function's text is
    make: Callable[[], str]  # the whole module with it; writing out a module takes longer than finding its mutants


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What may be put in a node's place; None for a statement that is left out."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            new.ops = [SWAPPED[type(op)]()]
            yield f"{type(op).__name__} -> {type(new.ops[0]).__name__}", new
        case ast.BinOp(op=op, left=left) if type(op) in SWAPPED and not (
            isinstance(left, ast.Constant) and isinstance(left.value, str)
        ):
            new.op = SWAPPED[type(op)]()
            yield f"{type(op).__name__} -> {type(new.op).__name__}", new
        case ast.BoolOp(op=op):
            new.op = SWAPPED[type(op)]()
            yield f"{type(op).__name__} -> {type(new.op).__name__}", new
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield f"{type(new.op).__name__} left out", new.operand
        case ast.Constant(value=bool(v)):
            yield f"{v} -> {not v}", ast.Constant(not v)
        case ast.Constant(value=int(v) | float(v)):
            yield f"{v} -> {v + 1}", ast.Constant(v + 1)
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield "if else turned round", new
        case ast.If(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
            yield "if turned round", new
        case ast.Raise():
            yield "raise left out", None
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement left out", None
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            new.value = ast.Constant(None)
            yield "return None", new


def body_nodes(function: cost.Function) -> Iterator[ast.AST]:
    """A function's own nodes, without annotations, docstring, defaults, messages and functions inside."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, (*cost.Function.__args__, ast.ClassDef, ast.JoinedStr)):
            return
        yield node
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            parts = [node.value] if node.value else []
        if isinstance(node, ast.Raise):
            parts = []  # the words of an error
        for child in parts:
            yield from walk(child)

    for statement in function.body:
        yield from walk(statement)


def mutants_of(file: Path) -> Iterator[Mutant]:
    relative = file.relative_to(ROOT).as_posix()
    module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for name, function in cost.functions(tree):
        if any(isinstance(d, ast.Name) and d.id == "overload" for d in function.decorator_list):
            continue
        parents = {child: parent for parent in ast.walk(function) for child in ast.iter_child_nodes(parent)}
        text, seen = ast.unparse(function), 0
        for node in body_nodes(function):
            for what, new in changes(node):
                seen += 1
                key = hashlib.sha256(f"{relative} {name} {seen} {what} {text}".encode()).hexdigest()[:16]
                make = functools.partial(with_change, tree, parents[node], node, new or ast.Pass())
                yield Mutant(relative, f"{module}:{name}", node.lineno, what, key, make)


def with_change(tree: ast.Module, parent: ast.AST, old: ast.AST, new: ast.AST) -> str:
    """The source of a module with one node exchanged; the tree is then as it was."""
    put(parent, old, new)
    source = ast.unparse(ast.fix_missing_locations(tree))
    put(parent, new, old)
    return source


def put(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Exchange a child of a node."""
    for field, value in ast.iter_fields(parent):
        if value is old:
            return setattr(parent, field, new)
        for i, item in enumerate(value if isinstance(value, list) else []):
            if item is old:
                value[i] = new
                return None
    raise LookupError(ast.dump(parent)[:200])


def chosen(count: int, only: str, reached: set[str]) -> list[Mutant]:
    """As many of each module as its share of the package's lines, at least one; the same ones at every run."""
    files = [f for f in sorted((ROOT / cost.PACKAGE).rglob("*.py")) if not any(x in f.as_posix() for x in LEFT_OUT)]
    files = [f for f in files if f.relative_to(ROOT).as_posix().startswith(only)]
    lines = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    out = []
    for f in files:
        found = sorted((m for m in mutants_of(f) if m.function in reached), key=lambda m: m.key)
        out += found[: max(1, round(count * lines[f] / sum(lines.values())))]
    return out


def reaching(path: Path) -> dict[str, list[tuple[float, str]]]:
    """For each function of the package the tests that ran it, the cheapest first, one of each function before a second."""
    found: dict[str, dict[str, list[tuple[float, str]]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for function in row["reaches"]:
            found[function][row["test"].split("[")[0]].append((row["cpu"], row["test"]))
    ordered = {}
    for function, tests in found.items():
        ranked = [(n, cpu, test) for cases in tests.values() for n, (cpu, test) in enumerate(sorted(cases))]
        ordered[function] = [(cpu, test) for _, cpu, test in sorted(ranked)]
    return ordered


def collected(tree: Path) -> set[str]:
    """The tests of now, as some that were measured may be gone; and all of the tree is compiled, once for every mutant.

    Bytecode of the package is told by the hash of its source: a mutant may have the size and the second of another one.
    """
    options = ["--invalidation-mode", "checked-hash", "-q", str(tree / cost.PACKAGE)]
    subprocess.run([sys.executable, "-m", "compileall", *options], check=True)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(tree)}
    return set(subprocess.run(command, cwd=tree, env=alone, capture_output=True, text=True, check=False).stdout.splitlines())


def tests_for(mutant: Mutant, reaches: dict[str, list[tuple[float, str]]], budget: float, first: str) -> list[str]:
    """Node ids until their CPU seconds are spent; `first` is the test that killed it before."""
    out, spent = [first] if first else [], 0.0
    for cpu, test in reaches.get(mutant.function, []):
        if spent + cpu > budget and out:
            break
        if test not in out:
            out.append(test)
            spent += cpu
    return out


def attempt(tree: Path, tests: list[str], result: Path, seconds: int) -> None:
    """In a fork: run the tests until one fails, and write its name."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.chdir(tree)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)

    class Failure:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                result.write_text(report.nodeid, encoding="utf-8")

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                result.write_text(report.nodeid or "collection", encoding="utf-8")

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    try:
        code = pytest.main([*options, *tests], plugins=[Failure()])
        if code and not result.exists():
            result.write_text(f"pytest {int(code)}", encoding="utf-8")
    except BaseException as error:
        result.write_text(f"{type(error).__name__}", encoding="utf-8")
    os._exit(0)


def header() -> dict[str, Any]:
    """The first line of a file of rows."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "pytest")}
    made = {"command": " ".join(sys.argv), "commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d %H:%M")}
    return made | {"versions": {"python": platform.python_version()} | versions}


def tried(rows: Path) -> list[dict[str, Any]]:
    """The rows of a file, without its first line."""
    return [row for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines()) if "key" in row]


def run(arguments: argparse.Namespace) -> None:
    before = {}
    if arguments.again:
        before = {row["key"]: row["by"] for row in tried(arguments.again) if row["by"]}
    if not arguments.rows.exists():
        arguments.rows.write_text(json.dumps(header()) + "\n", encoding="utf-8")
    done = {row["key"] for row in tried(arguments.rows)}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache", "*.bin", "*.safetensors")
        shutil.copytree(ROOT, tree, ignore=ignored)
        there = collected(tree)
        reaches = {f: [x for x in tests if x[1] in there] for f, tests in reaching(arguments.reaches).items()}
        before = {key: test if test in there else "" for key, test in before.items()}
        if arguments.again:
            mutants = [m for f in sorted((ROOT / cost.PACKAGE).rglob("*.py")) for m in mutants_of(f) if m.key in before]
        else:
            mutants = chosen(arguments.count, arguments.only, {f for f, tests in reaches.items() if tests})
        mutants = sorted((m for m in mutants if m.key not in done), key=lambda m: m.key)
        print(f"{len(mutants)} mutants", flush=True)
        # What forks share: libraries, and nothing that knows the package.
        os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        sys.path[:] = [
            str(tree),
            str(tree / "tests" / "kit"),
            *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests/kit")),
        ]
        os.chdir(tree)
        import accelerate  # noqa: F401
        import hypothesis  # noqa: F401
        import peft  # noqa: F401
        import pytest  # noqa: F401
        import torch
        import torch._dynamo.testing
        import transformers.models.llama.modeling_llama
        import transformers.trainer  # noqa: F401

        assert not any(name.split(".")[0] == cost.PACKAGE for name in sys.modules), "the package would not be the mutant"
        torch.set_num_threads(1)
        for n, mutant in enumerate(mutants, 1):
            target, result = tree / mutant.file, Path(folder) / "result"
            tests = tests_for(mutant, reaches, arguments.budget, before.get(mutant.key, ""))
            original = target.read_text(encoding="utf-8")
            target.write_text(mutant.make(), encoding="utf-8")
            result.unlink(missing_ok=True)
            start = time.monotonic()
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                attempt(tree, tests, result, int(3 * arguments.budget) + 40)
            limit = start + 8 * arguments.budget + 900  # it waits for something; one that loops runs out of CPU seconds
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > limit:
                    os.killpg(child, signal.SIGKILL)
                    ended = os.waitpid(child, 0)
                    break
                time.sleep(0.05)
            if os.WIFSIGNALED(ended[1]) and not result.exists():
                result.write_text(f"it looped: signal {os.WTERMSIG(ended[1])}")
            target.write_text(original, encoding="utf-8")
            by = result.read_text(encoding="utf-8") if result.exists() else ""
            row = {"key": mutant.key, "file": mutant.file, "line": mutant.line, "function": mutant.function}
            row |= {"what": mutant.what, "by": by, "tests": len(tests), "seconds": round(time.monotonic() - start, 1)}
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{n}/{len(mutants)} {'killed  ' if by else 'SURVIVED'} {mutant.file}:{mutant.line} {mutant.what}  {by}",
                flush=True,
            )
    show(arguments)


def show(arguments: argparse.Namespace) -> None:
    rows = tried(arguments.rows)
    for row in rows:
        if not row["by"]:
            print(f"survived  {row['file']}:{row['line']}  {row['what']}  in {row['function'].split(':')[1]}")
    print(f"{sum(bool(r['by']) for r in rows)} of {len(rows)} mutants killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--reaches", type=Path, required=True, help="what cost.py wrote")
    one.add_argument(
        "--rows", type=Path, required=True, help="takes a line for each mutant; the same command again goes on with it"
    )
    one.add_argument("--count", type=int, default=150)
    one.add_argument("--only", default=cost.PACKAGE, help="how the paths of modules begin")
    one.add_argument("--again", type=Path, help="rows of an earlier run: those that were killed")
    one.add_argument("--budget", type=float, default=30.0, help="CPU seconds of tests for each")
    one.set_defaults(function=run)
    two = commands.add_parser("show")
    two.add_argument("rows", type=Path)
    two.set_defaults(function=show)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
