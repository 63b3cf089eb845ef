"""The Triton kernels compile for an H200 and fit its shared memory, without one: see compile_kernels.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump").exists(), reason="no CUDA tools"
    ),
]
SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize(
    ("dtype", "head_dims", "calls"),
    [
        ("bfloat16", [64, 128], ["map"]),
        ("bfloat16", [80, 256], ["map, row bias"]),
        ("bfloat16", [64, 128], ["pages, remap", "pages, map"]),
        ("bfloat16", [128], ["plain", "entropy", "map, entropy"]),
        ("float16", [96], ["map"]),
        ("float32", [64], ["map", "pages, remap"]),
    ],
)
def test_kernels_compile(dtype: str, head_dims: list[int], calls: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "kit" / "compile_kernels.py"
    command = [sys.executable, script, "--dtypes", dtype, "--head-dims", *map(str, head_dims), "--calls", *calls]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(done.stdout)
    kernels = [2 if call.startswith("pages") else 4 for call in calls]  # forward, two kernels backward, decoding
    assert len(rows) == len(head_dims) * sum(kernels)
    for row in rows:
        assert "error" not in row, row
        assert row["shared"] <= SHARED_LIMIT, row
