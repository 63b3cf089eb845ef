"""`make margins`: how near its tolerance every comparison of tensors comes, under each instruction set of this CPU.

Kernels of a CPU add up in another order under another instruction set, and so round differently. What uses more than a third
of its tolerance here may fail on the next CPU: its line of a test is printed, with what it used under each of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
FILES = (
    "core",
    "methods",
    "integration/test_exactness.py",
    "integration/test_silent_errors.py",
    "integration/test_positions.py",
)
FILES += ("integration/test_pictures.py", "integration/test_rotated_key_cache.py", "integration/test_options.py")
NEAR = 1 / 3
#: What PyTorch's own kernels, MKL and oneDNN use at most; a CPU that has less uses less.
INSTRUCTIONS = {
    name: {"ATEN_CPU_CAPABILITY": name, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    for name, mkl, onednn in (
        ("default", "SSE4_2", "SSE41"),
        ("avx2", "AVX2", "AVX2"),
        ("avx512", "AVX512", "AVX512_CORE"),
    )
}
#: By line of a test: the largest share of a tolerance, and the test in which it was used.
Margins = dict[str, tuple[float, str]]


def share(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    """How much of what is allowed the largest error uses."""
    a, b = torch.broadcast_tensors(actual.detach().double(), expected.detach().double())
    differ = (a != b) & a.isfinite() & b.isfinite()
    return float(((a - b).abs() / (atol + rtol * b.abs()))[differ].max()) if differ.any() else 0.0


class Recorder:
    """A plugin of pytest that notes the margin of every `torch.testing.assert_close` with a tolerance."""

    def __init__(self, path: Path) -> None:
        self.path, self.test, self.compare = path, "", torch.testing.assert_close
        self.margins: Margins = {}
        torch.testing.assert_close = self.note

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.nodeid

    def note(self, actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, **rest: Any) -> None:
        if (atol or rtol) and isinstance(actual, Tensor):
            frame = next((f for f in reversed(traceback.extract_stack()) if Path(f.filename).name.startswith("test_")), None)
            line = f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}" if frame else "elsewhere"
            used = share(actual, torch.as_tensor(expected), rtol or 0.0, atol or 0.0)
            self.margins[line] = max(self.margins.get(line, (0.0, "")), (used, self.test))
        self.compare(actual, expected, rtol=rtol, atol=atol, **rest)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.margins), encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--into"]:
        return pytest.main(["-q", *arguments[2:]], plugins=[Recorder(Path(arguments[1]))])
    chosen = arguments or ["-m", "not crossed", *(f"tests/{name}" for name in FILES)]
    failed, found = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, limits in INSTRUCTIONS.items():
            print(f"{name}:", flush=True)
            path = Path(folder, name)
            command = [sys.executable, __file__, "--into", str(path), *chosen]
            failed |= subprocess.run(command, cwd=ROOT, env=os.environ | limits, check=False).returncode
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    lines = {
        line: {name: margins.get(line, (0.0, "")) for name, margins in found.items()} for line in set().union(*found.values())
    }
    for line, by_name in sorted(lines.items(), key=lambda x: max(x[1].values()), reverse=True):
        if max(by_name.values())[0] > NEAR:
            print(line, *(f"{name} {used:.2f}" for name, (used, _) in by_name.items()), max(by_name.values())[1])
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
