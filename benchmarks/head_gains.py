"""Trained head gains folded into a model, whole and by half: needles, and what prose and copies pay.

    hf-longattn train head_gains model=MODEL data=emma.txt output=runs/gains
    hf-longattn train head_gains model=MODEL data=emma.txt output=runs/slower trainer.learning_rate=5e-3
    python benchmarks/head_gains.py --model MODEL --gains runs/gains runs/slower --text pride-and-prejudice.txt

Prose and copies: the text's first LENGTH tokens, into which passages are copied. Needles: the recipe's held-out ones, at its
length. Rows that the result file has are not run again; benchmarks/tables.py shows it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn
from hf_longattn.evaluation import Copy, copy_losses, loss_by_position, token_losses, with_copies
from hf_longattn.evaluation.report.markdown import Contents, table
from hf_longattn.evaluation.rows import versions
from hf_longattn.training import load_recipe, prepare
from hf_longattn.training.held_out import held_out_sums, metrics

RESULT = Path(__file__).parent / "results" / "head-gains-smollm2.json"
LENGTH = 3072
#: How far the gains are moved from 1 towards what was learned; 0: the model without them.
SHARES = {"gains, folded": 1.0, "half of the gains, folded": 0.5}
#: The recipe's own.
RATE = 2e-2
COPIES = [Copy(600, 900), Copy(1300, 1500), Copy(1900, 2100), Copy(700, 2500), Copy(2700, 2900)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gains", type=Path, nargs="+", required=True, help="outputs of the recipe head_gains")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--change", nargs="*", default=[], help="overrides of the run's recipe, as data=FILE on another machine"
    )
    args = parser.parse_args()
    tokens = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    ids, taken = with_copies(tokens[:, :LENGTH], COPIES)
    result: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"measured": {}}
    result |= {
        "text": args.text.stem,
        "length": LENGTH,
        "copies": [[c.distance, c.position] for c in COPIES],
        "command": f"python benchmarks/head_gains.py --model {args.model.name} "
        f"--gains {' '.join(g.name for g in args.gains)} "
        f"--text {args.text.name}",
        "versions": versions(),
    }
    rows = [("unmodified", args.gains[0], 0.0)]
    for gains in args.gains:
        rate = load_recipe(str(gains / "recipe.yaml"), []).trainer["learning_rate"]
        at = "" if rate == RATE else f", learned at a rate of {rate:g}"
        rows += [(name + at, gains, share) for name, share in SHARES.items()]
    for name, gains, share in rows:
        if name in result["measured"]:
            continue
        recipe = load_recipe(str(gains / "recipe.yaml"), [f"model={args.model}", f"output={gains / 'again'}", *args.change])
        model = AutoModelForCausalLM.from_pretrained(gains if share else args.model, dtype=torch.float32).eval()
        learned = [p for n, p in model.named_parameters() if ".longattn." in n]
        with torch.no_grad():
            for p in learned:
                p.copy_(1 + share * (p - 1))
        spread = {"gains": [round(float(f(torch.cat(learned).detach())), 2) for f in (torch.min, torch.max)]} if share else {}
        if share:
            hf_longattn.fold(model)
        losses = token_losses(model, ids)
        found = metrics(held_out_sums(model, recipe, prepare(recipe).data, [recipe.length]), needles=True)[recipe.length]
        result["measured"][name] = {
            "needles": found["accuracy"],
            "answer": round(found["loss"], 4),
            "prose": round(float(loss_by_position(losses, [1, LENGTH], taken)[0]), 4),
            "copies": [round(x, 4) for x in copy_losses(losses, COPIES)],
        } | spread
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def prices(_: str) -> str:
    """Needles, and loss on prose and on every copy."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    head = ["", "needles found", "loss of the answer", "prose", *(f"copy {d:,} back" for d, _ in result["copies"])]
    body = []
    for name, m in result["measured"].items():
        numbers = [f"{m['needles']:.2f}", f"{m['answer']:.3f}", f"{m['prose']:.3f}", *(f"{x:.2f}" for x in m["copies"])]
        body.append([name, *numbers])
    return table(head, body)


def contents() -> Contents:
    """What stands below `<!-- head gains: smollm2 -->`."""
    return {"head gains": prices}


if __name__ == "__main__":
    main()
