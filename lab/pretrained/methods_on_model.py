"""Every method, untrained, in a pretrained model: loss by position in one forward pass over a text.

A row is one pass over the first --length tokens of --text, without a cache. Rows that the result file has are not run again.
"Calibrated" rows are measured by hf_longattn.calibrate on the last tokens of the text, which no pass reads.
Every row is written to results/methods-smollm2.json as it is done.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from hf_longattn.evaluation import token_losses
from hf_longattn.evaluation.rows import Row, RowFile
from lab.markdown import Contents
from lab.pretrained.runner import CALIBRATION, RESULTS, Choice, Program, Text, choices, lines, parts

RESULT = RESULTS / "methods-smollm2.json"
PROTOCOL = (
    "Loss in nats per token: the mean of -log p(next token) over the positions of each bucket, in one forward pass over the "
    "first `length` tokens of a book; no cache, no training. Calibrated: on the last `calibration` tokens of the same book."
)
BUCKETS = {1536: (0, 256, 768, 1536), 4096: (0, 256, 1024, 4096), 16384: (0, 4096, 8192, 12288, 16384)}


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    losses = token_losses(model, text.tokens[:, : text.length + 1])[0, 1:]
    found = {f"{a}–{b}": round(losses[a:b].mean().item(), 4) for a, b in itertools.pairwise(BUCKETS[text.length])}
    return {"loss": found, "model": args.model.name, "seed": 0}


def key(text: Text, args: argparse.Namespace) -> dict[str, Any]:
    return {"book": text.name, "length": text.length, "dtype": args.dtype}


METHODS = Program(
    "methods_on_model",
    RESULT,
    PROTOCOL,
    lambda text: choices("methods"),
    measure,
    key,
    lengths=(4096,),
    dtype="float32",
    spare=CALIBRATION + 1,
)


def contents() -> Contents:
    """What stands below `<!-- table: book length ... | row | ... -->`."""
    rows = RowFile(RESULT).all

    def content(what: str) -> str:
        (book, *lengths), names = parts(what)
        head, body = [""], {name: list[str]() for name in names}
        for length in map(int, lengths):
            spans = [f"{a}–{b}" for a, b in itertools.pairwise(BUCKETS[length])]
            head += [f"{length} tokens: {spans[0]}", *spans[1:]]
            for name, cells in body.items():
                loss = next((r["loss"] for r in rows if (r["name"], r["book"], r["length"]) == (name, book, length)), {})
                cells += [f"{loss[b]:.3f}" if b in loss else "" for b in spans]
        return lines(head, body)

    return {"table": content}


if __name__ == "__main__":
    METHODS.main(__doc__)
