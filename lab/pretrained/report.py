"""The committed reports, by `hf-longattn eval`: models fetched, settings in settings/. Interrupted runs go on.

    make report TEXT=pride-and-prejudice.txt,northanger-abbey.txt,anarchist-faq.txt

Rows that docs/reports/ holds are not run again; take another --out to measure anew.
"""

import argparse
import json
from os.path import relpath
from pathlib import Path

from hf_longattn.cli import app
from hf_longattn.core.kernels.precision import auto_dtype
from recipes.models import GEMMA, SMOLLM2, obtain

ROOT = Path(__file__).parents[2]
SETTINGS = Path(__file__).parent / "settings"
#: Of each model: where it comes from, the page's title, and what `eval` is told.
REPORTS = {
    "smollm2": (
        SMOLLM2,
        "SmolLM2-135M at twice its trained length",
        ["--lengths", "8k,16k", "--tasks", "loss,copies", "--targets", "512", "--prefix", "streaming:window=4096"],
    ),
    "gemma": (
        GEMMA,
        "Gemma 3 270M within its trained length",
        ["--lengths", "1k,2k,4k", "--targets", "512", "--shortest-first"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="plain texts, with commas; Gemma's report reads the first")
    parser.add_argument("--model", choices=[*REPORTS, "all"], default="all")
    parser.add_argument("--adapter", action="append", default=[], help="NAME=DIRECTORY of a LoRA adapter of SmolLM2")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports")
    parser.add_argument("--dtype", help="default: that of the rows in --out, else what this CPU multiplies fast")
    parser.add_argument("--page-only", action="store_true", help="measure nothing; write the pages from the rows so far")
    args = parser.parse_args()
    for name, (source, title, protocol) in REPORTS.items():
        if args.model not in (name, "all"):
            continue
        model, settings, out = map(
            relpath, (obtain(source, ROOT / "models"), SETTINGS / f"report-{name}.yaml", args.out / name)
        )
        text = args.text if name == "smollm2" else args.text.split(",")[0]
        command = ["eval", model, "--settings", settings, "--text", text, "--out", out, *protocol]
        dtype = args.dtype or precision_of_rows(args.out / name) or auto_dtype()
        print(f"{name}: in {dtype}")
        command += ["--dtype", dtype, "--title", title, *["--page-only"] * args.page_only]
        if name == "smollm2":
            command += [part for adapter in args.adapter for part in ("--adapter", adapter)]
        app(command, standalone_mode=False)


def precision_of_rows(folder: Path) -> str | None:
    """What the rows of a report were measured in; None if there are none."""
    protocol = folder / "protocol.json"
    return json.loads(protocol.read_text(encoding="utf-8"))["dtype"] if protocol.is_file() else None


if __name__ == "__main__":
    main()
