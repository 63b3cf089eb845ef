"""The real lm-evaluation-harness on a local task, with a model under a method."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("lm_eval", reason='NO HARNESS: pip install "hf_longattn[lm-eval]"')
ROOT = Path(__file__).parents[2]

TASK = """\
task: letters
dataset_path: json
dataset_kwargs:
  data_files: {file}
  cache_dir: {cache}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
metadata:
  version: 1
"""
DOCUMENTS = [
    {"text": "the quick brown fox jumps over the lazy" * 4, "choices": [" dog", " cat"], "label": 0},
    {"text": "pack my box with five dozen liquor" * 4, "choices": [" mugs", " jugs"], "label": 1},
    {"text": "how vexingly quick daft zebras" * 4, "choices": [" jump", " rest"], "label": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("harness")
    tiny.save(path / "model")
    (path / "data.json").write_text(json.dumps(DOCUMENTS))
    (path / "tasks").mkdir()
    (path / "tasks" / "letters.yaml").write_text(TASK.format(file=path / "data.json", cache=path / "cache"))
    return path


def choices_by_hand(model: Any) -> list[list[float]]:
    out = []
    for document in DOCUMENTS:
        row = []
        for choice in document["choices"]:
            ids = torch.tensor([[tiny.CHARACTERS.index(c) for c in str(document["text"]) + choice]])
            logs = model(ids).logits[0, :-1].detach().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            row.append(logs[-len(choice) :].sum().item())
        out.append(row)
    return out


@pytest.mark.slow
def test_the_harness_sees_the_method(folder: Path, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "hf_longattn.cli",
        "run",
        "--",
        Path(sys.executable).parent / "lm_eval",
        "run",
        "--model",
        "hf",
    ]
    line += ["--model_args", f"pretrained={folder / 'model'},attn_implementation=scale_invariant:tau=3", "--tasks", "letters"]
    line += ["--include_path", folder / "tasks", "--log_samples", "--output_path", tmp_path, "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*map(str, line)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    changed = {"attn_implementation": "scale_invariant", "longattn": {"tau": 3.0}}
    unmodified, expected = (
        choices_by_hand(AutoModelForCausalLM.from_pretrained(folder / "model", **kind).eval()) for kind in ({}, changed)
    )
    assert abs(unmodified[0][0] - expected[0][0]) > 0.01
    (samples,) = tmp_path.rglob("samples_letters*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda r: r["doc_id"])
    found = [[float(resp[0][0]) for resp in row["resps"]] for row in rows]
    assert found == [pytest.approx(e, abs=1e-3) for e in expected]
    (scores,) = tmp_path.rglob("results_*.json")
    right = [max((0, 1), key=lambda i: e[i]) == d["label"] for e, d in zip(expected, DOCUMENTS, strict=True)]
    assert json.loads(scores.read_text())["results"]["letters"]["acc,none"] == pytest.approx(sum(right) / 3)
