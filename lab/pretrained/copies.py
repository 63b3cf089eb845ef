"""What a pretrained model copies beyond its trained length, and what prose costs: many passages at random places, paired.

A text is read once under every setting, through a cache, with passages written into it beyond the trained length that repeat
earlier ones. The places are drawn once per text and length, the same for all settings, distances evenly from near to the
whole text. Rows that the result file has are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from hf_longattn.attention.kernels.precision import fast_dtype
from hf_longattn.evaluation import PASSAGE, Copy, copy_losses, loss_by_position, token_losses, with_copies
from hf_longattn.evaluation.report.markdown import Contents, table
from hf_longattn.evaluation.rows import Rows, versions_line
from hf_longattn.evaluation.statistics import mean_interval
from lab.pretrained.longer_on_model import ROOT, Choice, load_choice, remap, rope_numbers

RESULT = ROOT / "lab" / "results" / "copies.json"
STEP = 1024
PROTOCOL = (
    "The first `length` tokens of a text, read through a cache, 2,048 at a time. Beyond the trained length, `copies` "
    "([distance, position]) overwrite 128 tokens by those `distance` before, at places and from distances drawn once per text "
    "and length. copying: mean loss in nats on each copy, its first 16 tokens left out. prose: mean loss of each 1024 "
    "positions, copies left out."
)


def places(text: str, length: int, trained: int, count: int) -> list[Copy]:
    """Copies at random places beyond the trained length, from random distances, evenly spread; none meets another."""
    rng = random.Random(f"{text}:{length}")
    room = (length - trained) // count
    if room < PASSAGE + 1:
        raise SystemExit(f"{count} copies do not fit behind {trained} tokens of {length}")
    positions = [trained + n * room + rng.randrange(room - PASSAGE) for n in range(count)]
    shares = [(n + rng.random()) / count for n in range(count)]
    rng.shuffle(shares)
    # what is copied comes from before the trained length, where nothing is overwritten, or is the newest prose
    found = []
    for position, share in zip(positions, shares, strict=True):
        source = int((1 - share) * (trained - PASSAGE))
        found.append(Copy(position - source, position))
    return found


def settings(trained: int, times: float) -> list[Choice]:
    half, factor = trained // 2, max(2.0, times)
    return [
        Choice(f"YaRN × {factor:g}", rope=f"yarn:{factor}"),
        remap("rerope", window=half),
        remap("yarn_far", window=half, factor=factor),
        remap("yarn_far", window=half, border=half, factor=factor),
        Choice("unmodified"),
        remap("yarn_beyond", factor=factor),
        remap("self_extend", window=trained // 8, group=int(2 * factor)),
        remap("leaky_rerope", window=half, stretch=2 * factor),
        remap("rerope", window=trained // 4),
        remap("yarn_far", window=half, factor=2 * factor),
        remap("yarn_far", window=half, factor=factor, stretch=4),
        remap("yarn_far", window=half, border=3 * trained // 4, factor=factor),
        remap("yarn_far", window=3 * trained // 4, factor=factor),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="as the demo obtains it")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="plain texts; a file's name names it in the result")
    parser.add_argument("--length", type=int, nargs="+", default=[16384])
    parser.add_argument("--copies", type=int, default=24)
    parser.add_argument("--only", default="", help="only settings whose name matches this regular expression")
    parser.add_argument("--dtype", default=fast_dtype(), help="default: what this CPU multiplies fast, %(default)s")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    transformers.set_seed(0)
    transformers.logging.disable_progress_bar()
    source = args.model / "SOURCE"
    about = {
        "source": source.read_text().strip() if source.exists() else args.model.name,
        "versions": f"{versions_line('hf_longattn', 'transformers', 'torch')}, {torch.get_num_threads()} threads",
    }
    trained = AutoConfig.from_pretrained(args.model).get_text_config().max_position_embeddings
    file = Rows(args.result, protocol=PROTOCOL)
    encode = AutoTokenizer.from_pretrained(args.model)
    for length in args.length:
        chosen = [c for c in settings(trained, length / trained) if re.search(args.only, c.name)]
        for choice, text in itertools.product(chosen, args.text):
            key = {"name": choice.name, "model": args.model.name, "text": text.stem, "length": length, "dtype": args.dtype}
            if file.find(**key):
                continue
            tokens = encode(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
            if tokens.shape[1] < length:
                sys.exit(f"{text.name} has {tokens.shape[1]} tokens; {length} are needed")
            row = key | measured(choice, args, tokens[:, :length], places(text.stem, length, trained, args.copies))
            command = f"python lab/pretrained/copies.py --text {text.name} --length {length} --copies {args.copies}"
            command += f" --dtype {args.dtype} --model {args.model.name} --only '^{re.escape(choice.name)}$'"
            file.put(row | {"trained": trained, "rope": rope_numbers(choice), "command": command} | about)
            print(length, text.stem, choice.name, mean_interval(row["copying"]), f"{row['cpu_seconds']} s", flush=True)


def measured(choice: Choice, args: argparse.Namespace, ids: torch.Tensor, copies: list[Copy]) -> dict[str, Any]:
    """The losses on copies and prose of one text under one setting."""
    start, length = time.process_time(), ids.shape[1]
    model = load_choice(choice, args.model, args.dtype, ids)
    ids, taken = with_copies(ids, copies)
    losses = token_losses(model, ids, prefill=2048)
    return {
        "prose": [round(x, 4) for x in loss_by_position(losses, [*range(0, length, STEP), length], taken)],
        "copying": [round(x, 4) for x in copy_losses(losses, copies)],
        "copies": [[c.distance, c.position] for c in copies],
        "config": choice.config and choice.config.to_dict(),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def pairs(rows: Iterable[dict[str, Any]], one: str, other: str) -> list[tuple[float, int, int]]:
    """Of every copy that both have read: the loss under `one` less that under `other`, its distance, the trained length."""
    by_name = {(r["name"], r["text"]): r for r in rows}
    found = []
    for (name, text), row in by_name.items():
        if name == one and (base := by_name.get((other, text))) is not None:
            losses = zip(row["copying"], base["copying"], row["copies"], strict=True)
            found += [(a - b, distance, row["trained"]) for a, b, (distance, _) in losses]
    return found


def shown(differences: Sequence[float]) -> str:
    if not differences:
        return "–"
    mean, half = mean_interval(differences)
    return f"{mean:+.3f} ± {half:.3f} ({sum(d < 0 for d in differences)} of {len(differences)})"


def less(rows: list[dict[str, Any]], other: str) -> str:
    """Every setting less another: all copies, those from up to the trained length back, those from farther, and prose."""
    body = []
    for name in dict.fromkeys(r["name"] for r in rows if r["name"] != other):
        if found := pairs(rows, name, other):
            near = [d for d, distance, trained in found if distance <= trained]
            far = [d for d, distance, trained in found if distance > trained]
            by_text = [prose_less(rows, name, other, text) for text in texts(rows, name, other)]
            prose = [" / ".join(f"{x:+.3f}" for x in differences) for differences in by_text]
            body.append([f"`{name}`", shown([d for d, *_ in found]), shown(near), shown(far), ", ".join(prose)])
    head = [
        f"less {other}",
        "all copies",
        "up to the trained length back",
        "from farther back",
        "prose within / beyond, by text",
    ]
    return table(head, body)


def texts(rows: list[dict[str, Any]], *names: str) -> list[str]:
    """The texts that all of these settings have read."""
    read = [{r["text"] for r in rows if r["name"] == name} for name in names]
    return sorted(set.intersection(*read))


def prose_less(rows: list[dict[str, Any]], one: str, other: str, text: str) -> list[float]:
    """The difference of mean prose losses within the trained length, and beyond it."""
    a, b = (next(r for r in rows if r["name"] == name and r["text"] == text) for name in (one, other))
    at = a["trained"] // STEP
    parts = [(a["prose"][:at], b["prose"][:at]), (a["prose"][at:], b["prose"][at:])]
    return [sum(x) / len(x) - sum(y) / len(y) for x, y in parts]


def contents() -> Contents:
    """What stands below `<!-- places: model length dtype | other -->`: every setting less the other."""
    rows = list(Rows(RESULT))

    def asked(what: str) -> str:
        first, other = (part.strip() for part in what.split("|"))
        model, length, dtype = first.split()
        return less([r for r in rows if (r["model"], r["length"], r["dtype"]) == (model, int(length), dtype)], other)

    return {"places": asked}


if __name__ == "__main__":
    main()
