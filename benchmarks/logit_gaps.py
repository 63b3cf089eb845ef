"""How the gap between a row's largest logit and their mean grows with its keys: what `calibrate` sets LogN by.

    python benchmarks/logit_gaps.py --model MODEL --text emma.txt pride-and-prejudice.txt

One pass over the first --length tokens of each text. Over all heads: median and quartiles of growth and level, gap(n) = level
(ln n)^growth; LogN's exponent is 1 - growth of the median head, and below 0 refused. benchmarks/tables.py shows them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longattn import calibration
from hf_longattn.evaluation.report.markdown import Contents, table
from hf_longattn.evaluation.rows import Rows, versions_line

RESULT = Path(__file__).parent / "results" / "logit-gaps-smollm2.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=int, nargs="+", default=[1536, 4096])
    args = parser.parse_args()
    rows = Rows(RESULT)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for text in args.text:
        tokens = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
        for length in args.length:
            key = {"model": args.model.name, "text": text.stem, "length": length, "dtype": "float32"}
            if rows.find(**key):
                continue
            gaps = calibration.logit_gaps(model, [tokens[:, :length]])
            names = " ".join(t.name for t in args.text)
            about = {"command": f"python benchmarks/logit_gaps.py --model {args.model.name} --text {names}"}
            about |= {"versions": versions_line("hf_longattn", "transformers", "torch")}
            layers = [round(float(x), 3) for x in gaps.growth.nanmedian(1).values]
            rows.put(
                key | {"growth": quartiles(gaps.growth), "level": quartiles(gaps.level), "growth by layer": layers} | about
            )
            print(rows.all[-1], flush=True)


def quartiles(x: Tensor) -> list[float]:
    return [round(float(x.flatten().nanquantile(q)), 4) for q in (0.25, 0.5, 0.75)]


def contents() -> Contents:
    """What stands below `<!-- logit gaps: smollm2 -->`."""
    head = ["text", "tokens", "growth, median head (quartiles)", "exponent that asks for", "by layer, least and most"]

    def cells(row: dict[str, Any]) -> list[str]:
        (low, growth, high), layers = row["growth"], row["growth by layer"]
        spread = f"{growth:.2f} ({low:.2f} to {high:.2f})"
        return [row["text"], f"{row['length']:,}", spread, f"{1 - growth:.2f}", f"{min(layers):.2f} to {max(layers):.2f}"]

    return {"logit gaps": lambda _: table(head, [cells(row) for row in Rows(RESULT)])}


if __name__ == "__main__":
    main()
