"""The measuring script for a GPU, small, on a CPU and on a device that says cuda: parts give rows, none of them an error."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pretend
import pytest
import torch
from transformers import logging

from lab.speed import gpu, gpu_kit, gpu_rows

ROOT = Path(__file__).parents[2]
WHAT = {"exactness": "err", "short": "ok", "static": "err", "whole": "step_ms", "step": "ratio", "attention": "forward"}
#: A part's last methods are reached.
METHODS = {"step": ["infoscale", "alibi", "rerope"]}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.slow
@pytest.mark.parametrize("part", WHAT)
def test_a_part_measures(part: str) -> None:
    script = [sys.executable, ROOT / "lab/speed/gpu.py", part, "--device", "cpu"]
    script += ["--methods", *METHODS.get(part, ["rerope"])]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert not [row for row in rows if "error" in row]
    assert any(row["method"] == "rerope" and WHAT[part] in row for row in rows)


def _model(trained: int, dtype: torch.dtype, device: str, **config: Any) -> Any:
    """Made on the host, and tiny where it is as wide as Llama 3 8B."""
    config |= TINY if config["hidden_size"] == 4096 else {}
    return gpu_kit.model(trained, dtype, "cpu", **config).to(device)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["exactness", "whole", "step", "attention"])
def test_a_part_measures_on_a_gpu(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which clocks and counters alone are not there."""
    zeros = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache", "synchronize")
    absent = {name: lambda *_: 0 for name in (*zeros, "set_sync_debug_mode")} | {"get_device_name": lambda: "no GPU"}
    monkeypatch.setattr(sys, "argv", ["gpu.py", part, "--methods", "rerope", "--length", "200", "--head-dim", "64"])
    monkeypatch.setattr(gpu, "model", _model)
    monkeypatch.setattr(gpu_kit, "on_device", lambda call: [call()][1:])
    verbosity = logging.get_verbosity()
    with pretend.device(), patch.multiple(torch.cuda, **absent), warnings.catch_warnings():
        gpu.main()
    logging.set_verbosity(verbosity)
    log = tmp_path / "log"
    log.write_text(capsys.readouterr().out)
    assert gpu_rows.machine_of([log])["gpu"] == "no GPU"
    rows = gpu_rows.rows_of(log)
    assert not [row for row in rows if "error" in row]
    assert any(WHAT[part] in row for row in rows if row["method"] == "rerope")
    assert max(row.get("err", 0.0) for row in rows) < 0.1


@pytest.mark.parametrize("method", ["unmodified", "infoscale"])
def test_a_padded_text_trains_on_a_gpu(method: str) -> None:
    with pretend.device():
        assert gpu.runs(gpu_kit.under(_model(64, torch.bfloat16, "cuda", **TINY), method, 64), 33, pad=True)
