"""The measuring script for a GPU, small and on a CPU: each part gives rows, and none of them is an error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHAT = {"exactness": "err", "short": "ok", "static": "err", "whole": "step_ms", "step": "ratio", "attention": "forward"}


@pytest.mark.slow
@pytest.mark.parametrize("part", WHAT)
def test_a_part_measures(part: str) -> None:
    script = [sys.executable, ROOT / "lab/speed/gpu.py", part, "--device", "cpu", "--methods", "rerope"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert not [row for row in rows if "error" in row]
    assert any(row["method"] == "rerope" and WHAT[part] in row for row in rows)
