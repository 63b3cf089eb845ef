"""The training recipes on a real model: what short runs give, with the base model beside them.

    python lab/pretrained/trained.py --model models/SmolLM2-135M-Instruct --text emma.txt --held-out pride-and-prejudice.txt

Each run is `hf-longattn train` with the changes of settings/trained.yaml; its metrics go to lab/results/recipes-NAME.json. A
run whose file is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from hf_longattn.core.kernels.precision import auto_dtype
from hf_longattn.evaluation.report import markdown
from lab.markdown import Contents
from lab.pretrained.runner import RESULTS, SETTINGS

RUNS: dict[str, dict[str, Any]] = yaml.safe_load((SETTINGS / "trained.yaml").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--text", default="emma.txt", help="a plain text to train on, or several: [A.txt,B.txt]")
    parser.add_argument("--held-out", default="pride-and-prejudice.txt", help="a plain text to measure on")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument(
        "--keep", type=Path, help="a folder for the adapters, each in one of its run's name; default: not kept"
    )
    args = parser.parse_args()
    for name in args.only:
        if file_of(name).exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            train(name, (args.keep or Path(folder)) / name, args.model, args.text, args.held_out, auto_dtype())


def train(name: str, output: Path, model: str, text: str, held_out: str, dtype: str, *more: str) -> None:
    """Make a run, its result in `output`, and keep its metrics.

    Args:
        dtype: of the weights; each result's settings say which.
        more: overrides, of a run whose metrics then stay in `output` alone.
    """
    run = RUNS[name]
    own = [f"model={run.get('model', model)}", f"data={text}", f"heldout={held_out}", f"output={output}", *more]
    command = [sys.executable, "-m", "hf_longattn.cli", "train", *run["train"], f"dtype={dtype}", *own]
    subprocess.run(command, check=True)
    if not more:
        metrics = json.loads((output / "metrics.json").read_text())
        file_of(name).write_text(json.dumps(metrics, indent=1) + "\n")


def file_of(name: str) -> Path:
    return RESULTS / f"recipes-{name}.json"


def metrics_of(name: str) -> dict[str, Any]:
    return json.loads(file_of(name).read_text(encoding="utf-8"))


def losses(names: str) -> str:
    """Loss at the lengths of the first run, of the base and of every run."""
    runs = {name: metrics_of(name) for name in names.split()}
    first = next(iter(runs.values()))["measured"]

    def cells(by_length: dict[str, Any]) -> list[str]:
        return [f"{by_length[n]['loss']:.3f}" for n in first["trained"]]

    body = [["base, unadapted", "–", *cells(first["base"]), "–"]]
    for name, m in runs.items():
        label = f"{RUNS[name]['label']} ([file](../../lab/results/{file_of(name).name}))"
        body.append([label, str(m["steps"]), *cells(m["measured"]["trained"]), f"{m['cpu_seconds'] / 60:.0f} min"])
    lengths = (f"at {int(n):,}" for n in first["trained"])
    return markdown(["run", "steps", *lengths, "CPU time, one thread with bfloat16 units"], body)


def needles(name: str) -> str:
    """Accuracy and loss of the answer by length; the first is the trained one."""
    trained = metrics_of(name)["measured"]["trained"]
    first, *others = (f"{int(n):,}" for n in trained)
    accuracy = ["accuracy", *(f"{m['accuracy']:.2f}" for m in trained.values())]
    loss = ["loss of the answer", *(f"{m['loss']:.3f}" for m in trained.values())]
    return markdown(["length", f"{first} (trained)", *others], [accuracy, loss])


def contents() -> Contents:
    """What stands below `<!-- runs: NAME ... -->` and `<!-- needle run: NAME -->`."""
    return {"runs": losses, "needle run": needles}


if __name__ == "__main__":
    main()
