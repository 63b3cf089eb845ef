"""How near its tolerance every comparison of tensors comes, under each instruction set of this CPU: `make margins`.

    python tests/kit/margins.py tests/core tests/methods -m "not slow"

prints the largest error / tolerance of each line that compares, from a third on: those a CPU not tried here might cross.
Kernels of a CPU add up in another order under another instruction set, and so round differently.
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

ROOT = Path(__file__).parents[2]
SHOWN = 1 / 3
#: What PyTorch's own kernels, MKL and oneDNN may use at most; a CPU that lacks it uses less.
INSTRUCTIONS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}


def margin(actual: Any, expected: Any, rtol: float, atol: float) -> float:
    """The largest error as a share of what is allowed; 0 where nothing differs."""
    a, b = (torch.as_tensor(x).detach().double() for x in (actual, expected))
    error = (a - b).abs()
    error = error[(a != b) & ~(a.isnan() & b.isnan())]
    allowed = (atol + rtol * b.abs().expand(a.shape))[(a != b) & ~(a.isnan() & b.isnan())]
    return float((error / allowed).max()) if len(error) else 0.0


class Recorder:
    """A plugin of pytest: the largest margin of every line that calls `torch.testing.assert_close` with tolerances."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.largest: dict[str, tuple[float, str]] = {}
        self.test = ""
        self.original = torch.testing.assert_close

    def pytest_sessionstart(self) -> None:
        torch.testing.assert_close = self.compare

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.nodeid

    def compare(
        self, actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, **rest: Any
    ) -> None:
        if atol is not None and rtol is not None and atol + rtol > 0:
            calls = [f for f in traceback.extract_stack()[:-1] if "/tests/" in f.filename and f.name not in ("close", "check")]
            line = f"{Path(calls[-1].filename).relative_to(ROOT)}:{calls[-1].lineno}"
            found = margin(actual, expected, rtol, atol)
            self.largest[line] = max(self.largest.get(line, (0.0, "")), (found, self.test))
        self.original(actual, expected, rtol=rtol, atol=atol, **rest)

    def pytest_runtest_logfinish(self) -> None:
        self.path.write_text(json.dumps(self.largest))


def run(arguments: list[str], path: Path) -> int:
    """The tests in this process."""
    return pytest.main(["-q", *arguments], plugins=[Recorder(path)])


def main(arguments: list[str]) -> int:
    found: dict[str, dict[str, tuple[float, str]]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, limits in INSTRUCTIONS.items():
            path = Path(folder) / name
            command = [sys.executable, __file__, "--into", str(path), *arguments]
            failed |= subprocess.run(command, cwd=ROOT, env=os.environ | limits, check=False).returncode
            found[name] = json.loads(path.read_text())
    lines = {
        line: {name: each.get(line, (0.0, "")) for name, each in found.items()} for each in found.values() for line in each
    }
    for line, by_name in sorted(lines.items(), key=lambda x: max(x[1].values()), reverse=True):
        largest, test = max(by_name.values())
        if largest > SHOWN:
            print(line, " ".join(f"{name} {value:.2f}" for name, (value, _) in by_name.items()), test)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--into"]:
        sys.exit(run(sys.argv[3:], Path(sys.argv[2])))
    sys.exit(main(sys.argv[1:]))
