"""The committed reports, by `hf-longattn eval`: models fetched, losses first, then tasks. Interrupted runs go on.

    make report TEXT=pride-and-prejudice.txt

Rows that docs/reports/ holds are not run again; take another --out to measure anew.
"""

import argparse
import json
from os.path import relpath
from pathlib import Path

from hf_longattn.attention.kernels.precision import fast_dtype
from hf_longattn.cli import app
from recipes.models import GEMMA, SMOLLM2, obtain

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
#: Of each model: where it comes from, the page's title, the tokens scored, and the lengths of losses and of tasks.
REPORTS = {
    "smollm2": (SMOLLM2, "SmolLM2-135M beyond its trained length", "1024", "2k,4k,8k,16k", "2k,4k"),
    "gemma": (GEMMA, "Gemma 3 270M within its trained length", "512", "1k,2k,4k", ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a book; the committed report has Pride and Prejudice")
    parser.add_argument("--model", choices=[*REPORTS, "all"], default="all")
    parser.add_argument("--adapter", type=Path, help="SmolLM2 adapted to scale-invariant attention, as a LoRA adapter")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports")
    parser.add_argument("--dtype", help="default: that of the rows in --out, else what this CPU multiplies fast")
    parser.add_argument("--page-only", action="store_true", help="measure nothing; write the pages from the rows so far")
    parser.add_argument("--no-tasks", action="store_true", help="losses alone")
    args = parser.parse_args()
    for name, (source, title, targets, lengths, task_lengths) in REPORTS.items():
        if args.model not in (name, "all"):
            continue
        model, settings, out = map(relpath, (obtain(source, ROOT / "models"), HERE / f"{name}.yaml", args.out / name))
        base = ["eval", model, "--settings", settings, "--text", str(args.text), "--out", out]
        dtype = args.dtype or precision_of_rows(args.out / name) or fast_dtype()
        print(f"{name}: in {dtype}")
        base += ["--dtype", dtype, "--title", title, "--shortest-first"]
        base += ["--page-only"] * args.page_only
        if args.adapter and name == "smollm2":
            base += ["--adapter", f"scale-invariant, adapted={args.adapter}"]
        app([*base, "--lengths", lengths, "--targets", targets], standalone_mode=False)
        if task_lengths and not args.no_tasks:
            app([*base, "--lengths", task_lengths, "--tasks", "needles,passkey", "--samples", "2"], standalone_mode=False)


def precision_of_rows(folder: Path) -> str | None:
    """What the rows of a report were measured in; None if there are none."""
    protocol = folder / "protocol.json"
    return json.loads(protocol.read_text(encoding="utf-8"))["dtype"] if protocol.is_file() else None


if __name__ == "__main__":
    main()
