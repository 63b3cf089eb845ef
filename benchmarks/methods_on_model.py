"""Every method, untrained, in a pretrained model: loss by position in one forward pass over a text.

A row is one pass over the first --length tokens of --text, without a cache. Rows that the result file has are not run again.
"Calibrated" rows are measured by hf_longattn.calibrate on the last --calibration tokens of the text, which no pass reads.
Every row is written to results/methods-smollm2.json as it is done; --tables writes them into the pages of docs/.
"""

import argparse
import itertools
import json
import platform
import re
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_longattn

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "methods-smollm2.json"
PROTOCOL = (
    "Loss in nats per token: the mean of -log p(next token) over the positions of each bucket, in one forward pass over the "
    "first `length` tokens of a book; no cache, no training. Calibrated: on the last `calibration` tokens of the same book."
)
BUCKETS = {1536: (0, 256, 768, 1536), 4096: (0, 256, 1024, 4096), 16384: (0, 4096, 8192, 12288, 16384)}
HEAD_ROWS = 512  # rows of logits that exist at a time


@dataclass(frozen=True)
class Row:
    """One setting: a change of position encoding, a method, or both."""

    method: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    rope: tuple[Any, ...] = ()  # a function of hf_longattn.rope and its arguments
    calibrated: bool = False
    lengths: tuple[int, ...] = (4096,)

    @property
    def name(self) -> str:
        parts = [f"{self.rope[0]}({', '.join(map(str, self.rope[1:]))})"] if self.rope else []
        if self.method:
            parts.append(f"{self.method}({', '.join(f'{k}={v!r}' for k, v in self.parameters.items())})")
        return (" + ".join(parts) or "unmodified") + (", calibrated" if self.calibrated else "")


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
    Row("alibi", rope=("nope",)),
    Row(rope=("nope",)),
    Row("output_standardise"),
    Row("output_standardise", calibrated=True),
    Row("output_standardise", {"per_head": True}, calibrated=True),
    Row("output_layer_norm"),
    Row("output_layer_norm", calibrated=True),
    Row("scale_invariant+adaptive_temperature"),
    Row("adaptive_temperature+output_standardise", calibrated=True),
    Row(rope=("yarn", 2.0), lengths=BOTH),
    Row("infoscale", {"stack": True}, rope=("yarn", 2.0), lengths=BOTH),
    Row(rope=("ntk", 2.0), lengths=BOTH),
    Row("infoscale", rope=("ntk", 2.0), lengths=BOTH),
    Row("logn", rope=("ntk", 2.0), lengths=BOTH),
    Row("scale_invariant", {"tau": 1000.0, "decay": 0.5}, rope=("yarn", 2.0), calibrated=True, lengths=BOTH),
    Row(rope=("linear", 2.0), lengths=BOTH),
    Row(rope=("prope", 0.81)),
    Row(rope=("prope", 0.5)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="as the demo obtains it")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="plain text; the file's name names the book")
    parser.add_argument("--length", type=int, choices=BUCKETS, default=4096)
    parser.add_argument("--calibration", type=int, default=1536)
    parser.add_argument("--rows", default="", help="only rows whose name matches this regular expression")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tables", action="store_true", help="no measurement: rewrite the tables in docs/ from the result file"
    )
    args = parser.parse_args()
    if args.tables:
        for page in sorted((ROOT / "docs").rglob("*.md")):
            page.write_text(with_tables(page.read_text(encoding="utf-8"), load()), encoding="utf-8")
        return

    transformers.set_seed(0)
    transformers.logging.disable_progress_bar()
    source = args.model / "SOURCE"
    about = {
        "seed": 0,
        "model": source.read_text().strip() if source.exists() else args.model.name,
        "versions": ", ".join(f"{p} {version(p)}" for p in ("hf_longattn", "transformers", "torch"))
        + f", Python {platform.python_version()}, {torch.get_num_threads()} threads",
        "command": f"python benchmarks/methods_on_model.py --text {' '.join(t.name for t in args.text)} --length {args.length}"
        + (f" --dtype {args.dtype}" if args.dtype != "float32" else ""),
    }
    for text in args.text:
        tokens = AutoTokenizer.from_pretrained(args.model)(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
        if tokens.shape[1] <= args.length + args.calibration:
            sys.exit(f"{text.name} has {tokens.shape[1]} tokens; more than {args.length + args.calibration} are needed")
        for row in ROWS:
            if args.length not in row.lengths or not re.search(args.rows, row.name):
                continue
            key = {"name": row.name, "book": text.stem, "length": args.length, "dtype": args.dtype}
            if any(key == {k: r[k] for k in key} for r in load()):
                continue
            start = time.monotonic()
            model = build(args.model, row, tokens[:, -args.calibration :], getattr(torch, args.dtype))
            losses = token_losses(model, tokens[:, : args.length + 1])
            found = {f"{a}–{b}": round(losses[a:b].mean().item(), 4) for a, b in itertools.pairwise(BUCKETS[args.length])}
            seconds = round(time.monotonic() - start, 1)
            calibration = {"calibration": args.calibration} if row.calibrated else {}
            save([*load(), key | {"loss": found} | about | calibration | {"seconds": seconds}])
            print(f"{text.stem} {args.length} {row.name}: {found}, {seconds} s", flush=True)


def build(folder: Path, row: Row, calibration: Tensor, dtype: torch.dtype) -> Any:
    config = AutoConfig.from_pretrained(folder)
    if row.rope:
        config = getattr(hf_longattn.rope, row.rope[0])(config, *row.rope[1:])
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()
    if row.calibrated:
        hf_longattn.apply(model, hf_longattn.calibrate(model, [calibration], row.method, **row.parameters))
    elif row.method:
        hf_longattn.apply(model, row.method, **row.parameters)
    return model


@torch.no_grad()
def token_losses(model: Any, tokens: Tensor) -> Tensor:
    """The loss at every position but the last, few logits at a time; for models with nothing but a head after their body."""
    hidden = model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state[0]
    head, losses = model.get_output_embeddings(), []
    for rows, targets in zip(hidden.split(HEAD_ROWS), tokens[0, 1:].split(HEAD_ROWS), strict=True):
        losses.append(cross_entropy(head(rows).float(), targets, reduction="none"))
    return torch.cat(losses)


def load() -> list[dict[str, Any]]:
    return json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []


def save(rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(f'{{"protocol": {json.dumps(PROTOCOL)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def with_tables(page: str, rows: list[dict[str, Any]]) -> str:
    """The page, each `<!-- table: book length ... | row | ... -->` to `<!-- end -->` filled in from the result file."""

    def filled(found: re.Match[str]) -> str:
        first, *names = (part.strip() for part in found[1].split("|"))
        book, *lengths = first.split()
        return f"<!-- table: {found[1]} -->\n{table(rows, book, [int(n) for n in lengths], names)}\n<!-- end -->"

    return re.sub(r"<!-- table: (.*?) -->\n.*?<!-- end -->", filled, page, flags=re.DOTALL)


def table(rows: list[dict[str, Any]], book: str, lengths: list[int], names: list[str]) -> str:
    head, body = [""], [[f"`{name}`"] for name in names]
    for length in lengths:
        buckets = [f"{a}–{b}" for a, b in itertools.pairwise(BUCKETS[length])]
        head += [f"{length} tokens: {buckets[0]}", *buckets[1:]]
        for cells, name in zip(body, names, strict=True):
            loss = next((r["loss"] for r in rows if (r["name"], r["book"], r["length"]) == (name, book, length)), {})
            cells += [f"{loss[b]:.3f}" if b in loss else "" for b in buckets]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body])


if __name__ == "__main__":
    main()
