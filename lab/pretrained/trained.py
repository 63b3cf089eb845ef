"""The training recipes on a real model: what short runs give, with the base model beside them.

    python lab/pretrained/trained.py --model models/SmolLM2-135M-Instruct --text emma.txt --held-out pride-and-prejudice.txt

Each run is `hf-longattn train` with the settings below; its metrics go to lab/results/recipes-NAME.json. A run whose
file is there is not repeated. --collect NAME takes the metrics of a run made by hand. lab/pages.py shows them.
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
from hf_longattn.evaluation.report.markdown import Contents, table

RESULTS = Path(__file__).parents[1] / "results"
#: bfloat16 where the CPU multiplies it fast; each result's settings say which.
DTYPE = f"dtype={fast_dtype()}"
SHORT = [DTYPE, "trainer.max_steps=100", "trainer.learning_rate=1e-3", "evaluation.final_lengths=[512,4096]"]
SHORT += ["positions=plain", "method=scale_invariant"]
ALONE = ["evaluation.compare=false", "trainer.eval_steps=100"]
NEEDLE = [DTYPE, "method=null", "length=256", "trainer.max_steps=90", "trainer.per_device_train_batch_size=1"]
NEEDLE += ["trainer.gradient_accumulation_steps=1", "trainer.eval_steps=45", "trainer.save_steps=30", "evaluation.samples=16"]
NEEDLE += ["evaluation.final_lengths=[256,512,1024]", "evaluation.compare=false"]
#: Of five novels in --text, as continue_lora ships; the control reads the same windows as they are.
LONG = [DTYPE, "evaluation.final_lengths=[512,4096]", "trainer.eval_strategy=no", "trainer.save_steps=30"]
#: Of one novel in --text: a loss with LongCE's weights, and the plain one.
FEW = [DTYPE, "evaluation.final_lengths=[512,4096]", "evaluation.compare=false", "trainer.eval_strategy=no", "method=null"]
FEW += ["positions=plain", "trainer.max_steps=24", "trainer.logging_steps=8", "trainer.save_steps=24"]
RUNS: dict[str, list[str]] = {
    "continue-skipped": ["continue_lora", *LONG, "evaluation.compare=false"],
    "control-150": ["continue_lora", *LONG, "method=null", "positions=plain"],
    "cosscale": [
        "continue_lora",
        *LONG,
        "evaluation.compare=false",
        "method=rerope+cosscale+infoscale",
        "parameters.scale=32",
    ],
    "longce": ["continue_lora", *FEW, "long_ce.near=128"],
    "longce-control": ["continue_lora", *FEW],
    "continue": ["continue_lora", *SHORT, "trainer.eval_steps=50"],
    "control": ["continue_lora", *SHORT, *ALONE, "method=null"],
    "distill": ["convert_distill", *SHORT, *ALONE],
    "continue-calibrated": ["continue_lora", *SHORT, *ALONE, "calibrate=2048"],
    "needle256": ["needle_lora", *NEEDLE],
}
LABELS = {
    "continue": "`continue_lora`, scale-invariant, τ = 10",
    "continue-calibrated": "the same, [calibrated](calibration.md) on 2,048 tokens first: `calibrate=2048`",
    "distill": "`convert_distill`, the same, weight 0.5",
    "control": "the same with `method=null`: the control",
    "control-150": "`method=null positions=plain`: the control",
    "continue-skipped": "`continue_lora` as it ships: `rerope+infoscale`, skipped positions",
    "cosscale": "the same with `method=rerope+cosscale+infoscale parameters.scale=32`",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--text", default="emma.txt", help="a plain text to train on, or several: [A.txt,B.txt]")
    parser.add_argument("--held-out", default="pride-and-prejudice.txt", help="a plain text to measure on")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--collect", nargs=2, metavar=("NAME", "METRICS"), action="append", default=[])
    args = parser.parse_args()
    for name, path in args.collect:
        write(name, json.loads(Path(path).read_text()))
    if args.collect:
        return
    for name in args.only:
        if (RESULTS / f"recipes-{name}.json").exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            recipe, *changes = RUNS[name]
            changes += [f"model={args.model}", f"data={args.text}", f"heldout={args.held_out}", f"output={folder}/out"]
            subprocess.run([sys.executable, "-m", "hf_longattn.cli", "train", recipe, *changes], check=True)
            write(name, json.loads(Path(folder, "out/metrics.json").read_text()))


def write(name: str, metrics: dict[str, Any]) -> None:
    (RESULTS / f"recipes-{name}.json").write_text(json.dumps(metrics, indent=1) + "\n")


def metrics_of(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"recipes-{name}.json").read_text(encoding="utf-8"))


def link(name: str) -> str:
    return f"([file](../../lab/results/recipes-{name}.json))"


def losses(names: str) -> str:
    """Loss at the lengths of the first run, of the base and of every run."""
    runs = {name: metrics_of(name) for name in names.split()}
    first = next(iter(runs.values()))
    lengths = list(first["measured"]["trained"])

    def cells(by_length: dict[str, Any]) -> list[str]:
        return [f"{by_length[n]['loss']:.3f}" for n in lengths]

    body = [["base, unadapted", "–", *cells(first["measured"]["base"]), "–"]]
    for name, m in runs.items():
        message = [f"{LABELS[name]} {link(name)}", str(m["steps"]), *cells(m["measured"]["trained"])]
        body.append([*message, f"{m['cpu_seconds'] / 60:.0f} min"])
    head = ["run", "steps", *(f"at {int(n):,}" for n in lengths), "CPU time, one thread with bfloat16 units"]
    return table(head, body)


def needles(name: str) -> str:
    """Accuracy and loss of the answer by length; the first is the trained one."""
    trained = metrics_of(name)["measured"]["trained"]
    first, *others = (f"{int(n):,}" for n in trained)
    accuracy = ["accuracy", *(f"{m['accuracy']:.2f}" for m in trained.values())]
    return table(
        ["length", f"{first} (trained)", *others],
        [accuracy, ["loss of the answer", *(f"{m['loss']:.3f}" for m in trained.values())]],
    )


def contents() -> Contents:
    """What stands below `<!-- runs: NAME ... -->` and `<!-- needle run: NAME -->`."""
    return {"runs": losses, "needle run": needles}


if __name__ == "__main__":
    main()
