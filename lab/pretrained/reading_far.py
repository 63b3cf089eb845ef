"""What the last tokens of a long text read from far back, under every way of making a pretrained model longer.

A whole pass over 65,536 tokens takes an hour and more of one core, and twenty ways are to be compared. So the text before is
read once, by the unmodified weights under `streaming` (every token sees the first 4 and the last 4,096, at distances that
the model knows), and its keys and values are kept. Each way then reads the last SEGMENT tokens over the same keys; a way that
scales rope reads the text before under its own scaling, likewise. The segment alternates prose and repetitions of passages
from far back.
With --adapter the text before is read by the adapted weights, under `streaming` alone.
What a way does to the keys of the text before is left out; --whole measures it where that can be paid: a row is then one
pass over everything under the way itself, with the same segment at the end.

Rows that the result file has are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.attention.kernels.precision import fast_dtype
from hf_longattn.evaluation import PASSAGE, Copy, copy_losses, prefix_of, token_losses, with_copies
from hf_longattn.evaluation.measures.losses import Prefix, shortened
from hf_longattn.evaluation.report.markdown import Contents, table
from hf_longattn.evaluation.rows import Rows, versions_line
from hf_longattn.evaluation.statistics import mean_interval
from lab.pretrained.longer_on_model import ROOT, Choice, by_head, load_choice, remap, rope_numbers, with_map

RESULT = ROOT / "lab" / "results" / "reading-smollm2.json"
PROTOCOL = (
    "The text before the last `segment` tokens of the first `length` is read once under streaming (window 4096, 4 sinks) by "
    "the unmodified weights, or with `adapter` by the adapted ones (under a rope scaling of its own by a way that has one); "
    "each way reads the segment over those keys (whole: a way reads the text before itself). In the segment, passages of 128 "
    "tokens that repeat those `distance` tokens before (copies: [distance, position]) take turns with 128 tokens of prose. "
    "prose, copying: mean loss in nats of each piece of prose and of each copy, its first 16 tokens left out. Calibrated: on "
    "the last `calibration` tokens of the text, which nothing else reads."
)
SEGMENT, CALIBRATION = 2048, 1536
#: Where the repeated passages stand, as shares of the text before the segment; in this order, near and far mixed.
SHARES = (0.05, 0.5, 0.9, 0.02, 0.25, 0.97, 0.12, 0.75)
PREFILL = LongAttnConfig.preset("streaming", window=4096)


def stretched(length: int, trained: int) -> list[Choice]:
    """The ways whose parameters grow with the length, so that it stays below what the model was trained at."""
    half = trained // 2
    factor = length // half
    bases = [
        remap("rerope", window=half),
        remap("self_extend", window=trained // 8, group=factor),
        remap("leaky_rerope", window=half, stretch=factor),
    ]
    return [
        *bases,
        *(remap(b.method, t, **b.parameters) for b in bases for t in ("infoscale", "logn") if b.method),
        *(with_map(b, offset=b.parameters["window"]) for b in bases),
        remap("streaming", window=4096),
        remap("lm_infinite", window=trained),
        Choice("unmodified"),
        *(Choice(f"YaRN × {n}", rope=f"yarn:{float(n)}") for n in (factor // 2, factor)),
        by_head(factor),
        remap("dual_chunk"),
        *(remap("rerope", t, window=half) for t in ("yarn_temperature", "log_length")),
    ]


def copies_at(length: int, segment: int = SEGMENT) -> list[Copy]:
    """Passages that the segment repeats, each behind as many tokens of prose."""
    before = length - segment
    positions = range(before + PASSAGE, length, 2 * PASSAGE)
    return [Copy(p - int(before * share), p) for p, share in zip(positions, SHARES, strict=False)]


def load(choice: Choice, model: Path, dtype: str, calibration: Tensor, adapter: Path | None) -> Any:
    """The model under a choice, with an adapter's weights if there is one: the method that it records gives way."""
    if adapter is None:
        return load_choice(choice, model, dtype, calibration)
    adapted = load_choice(Choice(adapter.name, rope=choice.rope, adapter=str(adapter)), model, dtype, calibration)
    with contextlib.suppress(ValueError):  # of an adapter that was trained without a method
        hf_longattn.remove(adapted)
    return adapted if choice.config is None else hf_longattn.apply(adapted, choice.config)


def measured(losses: Tensor, copies: Sequence[Copy]) -> dict[str, list[float]]:
    """Mean loss of each piece of prose before a copy, and of each copy."""
    prose = [losses[:, c.position - PASSAGE : c.position].nanmean() for c in copies]
    return {
        "prose": [round(float(x), 4) for x in prose],
        "copying": [round(x, 4) for x in copy_losses(losses, copies)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="as the demo obtains it")
    parser.add_argument("--adapter", type=Path, help="a PEFT adapter to put into the model first")
    parser.add_argument("--text", type=Path, help="plain text; the file's name names it in the result")
    parser.add_argument("--length", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--only", default="", help="only ways whose name matches this regular expression")
    parser.add_argument("--whole", action="store_true", help="each way reads the text before the segment itself")
    parser.add_argument("--keys", type=Path, help="keep the keys of the text before here, for the next call (23 KiB a token)")
    parser.add_argument("--dtype", default=fast_dtype(), help="default: what this CPU multiplies fast, %(default)s")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()

    transformers.set_seed(0)
    transformers.logging.disable_progress_bar()
    tokens = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    longest = max(args.length)
    if tokens.shape[1] < longest + CALIBRATION:
        sys.exit(f"{args.text.name} has {tokens.shape[1]} tokens; {longest + CALIBRATION} are needed")
    adapter: dict[str, Any] = {"adapter": args.adapter.name} if args.adapter else {}
    if args.keys and args.adapter:  # keys are those of the weights that read
        args.keys = args.keys.with_stem(f"{args.keys.stem}-{args.adapter.name}")
    trained = AutoConfig.from_pretrained(args.model).get_text_config().max_position_embeddings
    chosen = {n: [c for c in stretched(n, trained) if re.search(args.only, c.name)] for n in args.length}
    before_all: Prefix | None = None
    if not args.whole and not all(c.rope for choices in chosen.values() for c in choices):
        if args.keys and args.keys.exists():
            before_all = torch.load(args.keys, weights_only=False)
        if before_all is None or before_all.get_seq_length() < longest - SEGMENT:
            start = time.process_time()
            reader = load(Choice("prefill", PREFILL.to_dict()), args.model, args.dtype, tokens, args.adapter)
            before_all = prefix_of(reader, tokens[:, : longest - SEGMENT])
            del reader
            print(f"the text before: {time.process_time() - start:.0f} s", flush=True)
            if args.keys:
                torch.save(before_all, args.keys)
    source = args.model / "SOURCE"
    about = {
        "source": source.read_text().strip() if source.exists() else args.model.name,
        "versions": f"{versions_line('hf_longattn', 'transformers', 'torch')}, {torch.get_num_threads()} threads",
    }
    file = Rows(args.result, protocol=PROTOCOL)
    for length in args.length:
        copies = copies_at(length)
        ids, _ = with_copies(tokens[:, :length], copies)
        for choice in chosen[length]:
            key = {"name": choice.name, "text": args.text.stem, "length": length, "whole": args.whole}
            key |= {"model": args.model.name, "dtype": args.dtype} | adapter
            if file.find(**{"adapter": None} | key):
                continue
            start, wall = time.process_time(), time.monotonic()
            model = load(choice, args.model, args.dtype, tokens[:, -CALIBRATION:], args.adapter)
            if args.whole:
                before = prefix_of(model, ids[:, :-SEGMENT])
            elif choice.rope:  # keys of its own, read by itself over distances that it knows
                before = prefix_of(hf_longattn.apply(model, PREFILL, stack=True), ids[:, :-SEGMENT])
                hf_longattn.remove(model)
            else:
                assert before_all is not None
                before = shortened(before_all, length - SEGMENT)
            found = measured(token_losses(model, ids, last=SEGMENT - 1, prefix=before), copies)
            row = key | found | {"copies": [[c.distance, c.position] for c in copies], "segment": SEGMENT}
            row |= {"trained": trained}
            row |= {"config": choice.config and choice.config.to_dict(), "rope": rope_numbers(choice)}
            row |= {"calibration": CALIBRATION} if choice.calibrated else {}
            command = f"python lab/pretrained/reading_far.py --text {args.text.name} --length {length} --dtype {args.dtype}"
            command += f" --adapter {args.adapter.name}" if args.adapter else ""
            command += f" --model {args.model.name}" if args.model != parser.get_default("model") else ""
            row |= about | {"command": f"{command} --only '^{re.escape(choice.name)}$'" + (" --whole" if args.whole else "")}
            row |= {"cpu_seconds": round(time.process_time() - start, 1), "seconds": round(time.monotonic() - wall, 1)}
            file.put(row)
            print(
                length, choice.name, *adapter.values(), found["prose"], found["copying"], f"{row['cpu_seconds']} s", flush=True
            )
            del model, before


FAR = "copies from farther back"


def kept(row: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Losses on each piece of prose, on copies from distances that the model knows, and on those from farther back."""
    copies = list(zip((d for d, _ in row["copies"]), row["copying"], strict=True))
    return row["prose"], [x for d, x in copies if d <= row["trained"]], [x for d, x in copies if d > row["trained"]]


def contents() -> Contents:
    """What stands below `<!-- reading: [model] text length [whole] -->`, with `| label | ...` behind it these rows alone, and
    below `<!-- reading-less: [model] text length -->`, with `| label | label | ...` the further ones less the first."""
    rows = [r for file in sorted(RESULT.parent.glob("reading-*.json")) for r in Rows(file)]

    def asked(what: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
        first, *labels = (part.strip() for part in what.split("|"))
        *model, text, length = first.removesuffix(" whole").split()
        asked = model[0] if model else "SmolLM2-135M-Instruct", text, int(length), first.endswith(" whole")
        there = [r for r in rows if (r["model"], r["text"], r["length"], r["whole"]) == asked]
        here = {r["name"] + (f", {r['adapter']}" if "adapter" in r else ""): r for r in there}
        return here, labels or [label for label, r in here.items() if "adapter" not in r]

    return {
        "reading": lambda what: shown(*asked(what)),
        "reading-less": lambda what: table(["", "Δ prose", "Δ all copies", f"Δ {FAR}"], less(*asked(what), "|" in what)),
    }


def shown(rows: dict[str, dict[str, Any]], labels: Sequence[str]) -> str:
    trained = next(iter(rows.values()))["trained"]
    body = [
        [
            f"`{label}`",
            *(
                f"{mean_interval(x)[0]:.{digits}f}" if x else "–"
                for x, digits in zip(kept(rows[label]), (3, 2, 2), strict=True)
            ),
        ]
        for label in labels
        if label in rows
    ]
    return table(["", "prose", f"copies from up to {trained:,} back", FAR], body)


def less(rows: dict[str, dict[str, Any]], labels: Sequence[str], first: bool) -> list[list[str]]:
    """Each way with a temperature or map less the same without, or each less the first, on prose, all copies and far ones:
    mean, ± 95 % t interval."""
    body = []
    for label in labels:
        base = labels[0] if first else label.split(" + ")[0]
        if base != label and base in rows and label in rows:
            prose, near, far = (
                [a - b for a, b in zip(*pair, strict=True)] for pair in zip(kept(rows[label]), kept(rows[base]), strict=True)
            )
            found = [mean_interval(x) for x in (prose, near + far, far)]
            body.append([f"`{label}`", *(f"{mean:+.3f} ± {half:.3f}" for mean, half in found)])
    return body


if __name__ == "__main__":
    main()
