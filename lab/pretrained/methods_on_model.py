"""Every method, untrained, in a pretrained model: loss by position in one forward pass over a text.

A row is one pass over the first --length tokens of --text, without a cache. Rows that the result file has are not run again.
"Calibrated" rows are measured by hf_longattn.calibrate on the last --calibration tokens of the text, which no pass reads.
Every row is written to results/methods-smollm2.json as it is done.
"""

import argparse
import itertools
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from hf_longattn.evaluation import token_losses
from hf_longattn.evaluation.report.markdown import Contents, table
from hf_longattn.evaluation.rows import Rows, versions_line
from lab.pretrained.longer_on_model import Choice, load_choice

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "lab" / "results" / "methods-smollm2.json"
PROTOCOL = (
    "Loss in nats per token: the mean of -log p(next token) over the positions of each bucket, in one forward pass over the "
    "first `length` tokens of a book; no cache, no training. Calibrated: on the last `calibration` tokens of the same book."
)
BUCKETS = {1536: (0, 256, 768, 1536), 4096: (0, 256, 1024, 4096), 16384: (0, 4096, 8192, 12288, 16384)}


@dataclass(frozen=True)
class Row(Choice):
    """A choice that is named by its parameters."""

    name: str = field(default="", kw_only=True)
    lengths: tuple[int, ...] = (4096,)

    def __post_init__(self) -> None:
        encoding, *numbers = (self.rope or "").split(":")
        parts = [f"{encoding}({', '.join(numbers)})"] if encoding else []
        if self.method:
            parts.append(f"{self.method}({', '.join(f'{k}={v!r}' for k, v in self.parameters.items())})")
        object.__setattr__(self, "name", (" + ".join(parts) or "unmodified") + (", calibrated" if self.calibrated else ""))
        super().__post_init__()


BOTH, ALL = (4096, 16384), (1536, 4096, 16384)
ROWS = [
    Row(lengths=ALL),
    Row("scale_invariant", lengths=(1536, 4096)),
    Row("scale_invariant", {"sink_tokens": 1}, lengths=(1536, 4096)),
    Row("scale_invariant", calibrated=True, lengths=(1536, 4096)),
    Row("scale_invariant", {"tau": 1000.0, "decay": 0.5}, calibrated=True, lengths=ALL),
    Row("scale_invariant", {"decay": 0.25}, calibrated=True, lengths=ALL),
    Row("infoscale", lengths=BOTH),
    Row("logn", lengths=BOTH),
    Row("softmax_plus", lengths=BOTH),
    Row("yarn_temperature", lengths=BOTH),
    Row("infoscale", {"clamp": False}),
    Row("logn", {"clamp": False}),
    Row("log_length"),
    Row("adaptive_temperature"),
    Row("adaptive_temperature", {"beyond": "saturate"}),
    Row("cosscale"),
    Row("infoscale+cosscale"),
    Row("alibi"),
    Row("alibi", rope="nope"),
    Row(rope="nope"),
    Row("attention_sink"),
    Row("attention_sink", {"logit": -6.0}),
    Row("output_standardise"),
    Row("output_standardise", calibrated=True),
    Row("output_standardise", {"per_head": True}, calibrated=True),
    Row("output_layer_norm"),
    Row("output_layer_norm", calibrated=True),
    Row("scale_invariant+adaptive_temperature"),
    Row("adaptive_temperature+output_standardise", calibrated=True),
    Row(rope="yarn:2.0", lengths=BOTH),
    Row("infoscale", {"stack": True}, rope="yarn:2.0", lengths=BOTH),
    Row(rope="ntk:2.0", lengths=BOTH),
    Row("infoscale", rope="ntk:2.0", lengths=BOTH),
    Row("logn", rope="ntk:2.0", lengths=BOTH),
    Row("scale_invariant", {"tau": 1000.0, "decay": 0.5}, rope="yarn:2.0", calibrated=True, lengths=BOTH),
    Row(rope="linear:2.0", lengths=BOTH),
    Row(rope="prope:0.81"),
    Row(rope="prope:0.5"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="as the demo obtains it")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="plain text; the file's name names the book")
    parser.add_argument("--length", type=int, choices=BUCKETS, default=4096)
    parser.add_argument("--calibration", type=int, default=1536)
    parser.add_argument("--rows", default="", help="only rows whose name matches this regular expression")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()

    transformers.set_seed(0)
    transformers.logging.disable_progress_bar()
    source = args.model / "SOURCE"
    about = {
        "seed": 0,
        "model": source.read_text().strip() if source.exists() else args.model.name,
        "versions": f"{versions_line('hf_longattn', 'transformers', 'torch')}, {torch.get_num_threads()} threads",
        "command": f"python lab/pretrained/methods_on_model.py --text {' '.join(t.name for t in args.text)}"
        + f" --length {args.length}"
        + (f" --dtype {args.dtype}" if args.dtype != "float32" else ""),
    }
    file = Rows(RESULT, protocol=PROTOCOL)
    for text in args.text:
        tokens = AutoTokenizer.from_pretrained(args.model)(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
        if tokens.shape[1] <= args.length + args.calibration:
            sys.exit(f"{text.name} has {tokens.shape[1]} tokens; more than {args.length + args.calibration} are needed")
        for row in ROWS:
            if args.length not in row.lengths or not re.search(args.rows, row.name):
                continue
            key = {"name": row.name, "book": text.stem, "length": args.length, "dtype": args.dtype}
            if file.find(**key):
                continue
            start = time.monotonic()
            model = load_choice(row, args.model, args.dtype, tokens[:, -args.calibration :])
            losses = token_losses(model, tokens[:, : args.length + 1])[0, 1:]
            result = {f"{a}–{b}": round(losses[a:b].mean().item(), 4) for a, b in itertools.pairwise(BUCKETS[args.length])}
            seconds = round(time.monotonic() - start, 1)
            calibration = {"calibration": args.calibration} if row.calibrated else {}
            file.put(key | {"loss": result} | about | calibration | {"seconds": seconds})
            print(f"{text.stem} {args.length} {row.name}: {result}, {seconds} s", flush=True)


def contents() -> Contents:
    """What stands below `<!-- table: book length ... | row | ... -->`."""
    rows = Rows(RESULT).all

    def content(what: str) -> str:
        first, *names = (part.strip() for part in what.split("|"))
        book, *lengths = first.split()
        return buckets(rows, book, [int(n) for n in lengths], names)

    return {"table": content}


def buckets(rows: list[dict[str, Any]], book: str, lengths: list[int], names: list[str]) -> str:
    head, body = [""], [[f"`{name}`"] for name in names]
    for length in lengths:
        spans = [f"{a}–{b}" for a, b in itertools.pairwise(BUCKETS[length])]
        head += [f"{length} tokens: {spans[0]}", *spans[1:]]
        for cells, name in zip(body, names, strict=True):
            loss = next((r["loss"] for r in rows if (r["name"], r["book"], r["length"]) == (name, book, length)), {})
            cells += [f"{loss[b]:.3f}" if b in loss else "" for b in spans]
    return table(head, body)


if __name__ == "__main__":
    main()
