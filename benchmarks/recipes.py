"""The training recipes on a real model: what short runs give, with the base model beside them.

    python benchmarks/recipes.py --model models/SmolLM2-135M-Instruct --text emma.txt --held-out pride-and-prejudice.txt

Each run is `hf-longattn train` with the settings below; its metrics go to benchmarks/results/recipes-NAME.json. A run whose
file is there is not repeated. --collect NAME takes the metrics of a run made by hand; --table prints what the files hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_longattn.attention.kernels.precision import fast_dtype

RESULTS = Path(__file__).parent / "results"
#: bfloat16 where the CPU multiplies it fast; each result's settings say which.
DTYPE = f"dtype={fast_dtype()}"
SHORT = [DTYPE, "trainer.max_steps=100", "evaluation.final_lengths=[512,4096]"]
ALONE = ["evaluation.compare=false", "trainer.eval_steps=100"]
NEEDLE = [DTYPE, "length=256", "trainer.max_steps=90", "trainer.per_device_train_batch_size=1"]
NEEDLE += ["trainer.gradient_accumulation_steps=1", "trainer.eval_steps=45", "trainer.save_steps=30", "evaluation.samples=16"]
NEEDLE += ["evaluation.final_lengths=[256,512,1024]", "evaluation.compare=false"]
RUNS: dict[str, list[str]] = {
    "continue": ["continue_lora", *SHORT, "trainer.eval_steps=50"],
    "control": ["continue_lora", *SHORT, *ALONE, "method=null"],
    "distill": ["convert_distill", *SHORT, *ALONE],
    "continue-calibrated": ["continue_lora", *SHORT, *ALONE, "calibrate=2048"],
    "needle256": ["needle_lora", *NEEDLE],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--text", default="emma.txt", help="a plain text to train on")
    parser.add_argument("--held-out", default="pride-and-prejudice.txt", help="a plain text to measure on")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--collect", nargs=2, metavar=("NAME", "METRICS"), action="append", default=[])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    for name, path in args.collect:
        write(name, json.loads(Path(path).read_text()))
    if args.table or args.collect:
        print(table())
        return
    for name in args.only:
        if (RESULTS / f"recipes-{name}.json").exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            recipe, *changes = RUNS[name]
            changes += [f"model={args.model}", f"data={args.text}", f"heldout={args.held_out}", f"output={folder}/out"]
            subprocess.run([sys.executable, "-m", "hf_longattn.cli", "train", recipe, *changes], check=True)
            write(name, json.loads(Path(folder, "out/metrics.json").read_text()))
    print(table())


def write(name: str, metrics: dict[str, Any]) -> None:
    (RESULTS / f"recipes-{name}.json").write_text(json.dumps(metrics, indent=1) + "\n")


def table() -> str:
    """Loss (and needle accuracy) by length of every result."""
    rows = []
    for path in sorted(RESULTS.glob("recipes-*.json")):
        metrics = json.loads(path.read_text())
        for what, by_length in metrics["measured"].items():
            cells = []
            for length, m in by_length.items():
                cells.append(f"{length}: {m['loss']:.3f}" + (f", accuracy {m['accuracy']:.2f}" if "accuracy" in m else ""))
            rows.append(f"| {path.stem.removeprefix('recipes-')} | {what} | {metrics['steps']} | {'; '.join(cells)} |")
    return "\n".join(["| run | model | steps | loss at length |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    main()
