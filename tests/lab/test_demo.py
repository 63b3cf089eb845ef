"""The demo's script runs end to end; with a random model, so its numbers mean nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_demo_quick(tmp_path):
    script = [
        sys.executable,
        ROOT / "recipes/demo/run.py",
        "--quick",
        "--out",
        tmp_path / "out",
        "--models",
        tmp_path / "models",
    ]
    subprocess.run(script, check=True, cwd=tmp_path, timeout=300)
    summary = (tmp_path / "out/summary.md").read_text()
    assert "Saved and reloaded" in summary
    assert (tmp_path / "out/plot.png").stat().st_size > 10_000
    recorded = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())["longattn"]
    assert recorded["logit_map"]["name"] == "scale_invariant"
