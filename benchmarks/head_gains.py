"""Trained head gains folded into a model: what prose pays and what copies gain, in one forward pass of each.

    hf-longattn train head_gains model=MODEL data=emma.txt output=runs/gains
    python benchmarks/head_gains.py --model MODEL --gains runs/gains --text pride-and-prejudice.txt

The text's first LENGTH tokens, into which passages are copied; benchmarks/tables.py shows the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn
from hf_longattn.measuring.evaluation import Copy, copy_losses, loss_by_position, token_losses, with_copies
from hf_longattn.measuring.report.markdown import Contents, table
from hf_longattn.measuring.rows import versions

RESULT = Path(__file__).parent / "results" / "head-gains-smollm2.json"
LENGTH = 3072
COPIES = [Copy(600, 900), Copy(1300, 1500), Copy(1900, 2100), Copy(700, 2500), Copy(2700, 2900)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gains", type=Path, required=True, help="the output of the recipe head_gains")
    parser.add_argument("--text", type=Path, required=True)
    args = parser.parse_args()
    tokens = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    ids, taken = with_copies(tokens[:, :LENGTH], COPIES)
    measured: dict[str, Any] = {}
    for name, source in (("unmodified", args.model), ("gains, folded", args.gains)):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        if source == args.gains:
            learned = [p.detach() for n, p in model.named_parameters() if ".longattn." in n]
            spread = torch.stack(learned)
            hf_longattn.fold(model)
        losses = token_losses(model, ids)
        measured[name] = {
            "prose": round(float(loss_by_position(losses, [1, LENGTH], taken)[0]), 4),
            "copies": [round(x, 4) for x in copy_losses(losses, COPIES)],
        }
    result = {
        "text": args.text.stem,
        "length": LENGTH,
        "copies": [[c.distance, c.position] for c in COPIES],
        "measured": measured,
        "gains": {"least": round(float(spread.min()), 3), "most": round(float(spread.max()), 3)},
        "command": f"python benchmarks/head_gains.py --model {args.model.name} --gains {args.gains.name} "
        f"--text {args.text.name}",
        "versions": versions(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def prices(_: str) -> str:
    """Loss on prose and on every copy, unmodified and folded."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    head = ["", "prose", *(f"copy {d:,} back" for d, _ in result["copies"])]
    body = [[n, f"{m['prose']:.3f}", *(f"{x:.2f}" for x in m["copies"])] for n, m in result["measured"].items()]
    return table(head, body)


def contents() -> Contents:
    """What stands below `<!-- head gains: smollm2 -->`."""
    return {"head gains": prices}


if __name__ == "__main__":
    main()
