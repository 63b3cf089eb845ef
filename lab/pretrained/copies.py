"""What a pretrained model copies beyond its trained length, and what prose costs: many passages at random places, paired.

A text is read once under every setting, through a cache, with passages written into it beyond the trained length that repeat
earlier ones. The places are drawn once per text and length, the same for all settings, distances evenly from near to the
whole text. Rows that the result file has are not run again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from typing import Any

from hf_longattn.evaluation import PASSAGE, Copy
from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents
from lab.pretrained.longer_on_model import measured
from lab.pretrained.runner import RESULTS, STEP, Choice, Program, Text, choices, described, lines, parts

RESULT = RESULTS / "copies.json"
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
    return [Copy(p - int((1 - share) * (trained - PASSAGE)), p) for p, share in zip(positions, shares, strict=True)]


def settings(text: Text) -> list[Choice]:
    trained, factor = text.trained, max(2.0, text.length / text.trained)
    shares = {"half": trained // 2, "quarter": trained // 4, "eighth": trained // 8, "three_quarters": 3 * trained // 4}
    return choices("copies", **shares, factor=factor, double=2 * factor, group=int(2 * factor))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--copies", type=int, default=24)


def key(text: Text, args: argparse.Namespace) -> dict[str, Any]:
    return {"model": args.model.name, "text": text.name, "length": text.length, "dtype": args.dtype}


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    copies = places(text.name, text.length, text.trained, args.copies)
    return measured(model, text.ids, copies, 2048) | described(choice, text.trained)


COPIES = Program("copies", RESULT, PROTOCOL, settings, measure, key, options=options, spare=0)


# tables ---------------------------------------------------------------------------------------------------------------


def pairs(rows: Iterable[Row], one: str, other: str) -> list[tuple[float, int, int]]:
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


def less(rows: list[Row], other: str) -> str:
    """Every setting less another: all copies, those from up to the trained length back, those from farther, and prose."""
    body = {}
    for name in dict.fromkeys(r["name"] for r in rows if r["name"] != other):
        if found := pairs(rows, name, other):
            near = [d for d, distance, trained in found if distance <= trained]
            far = [d for d, distance, trained in found if distance > trained]
            prose = [" / ".join(f"{x:+.3f}" for x in prose_less(a, b)) for a, b in by_text(rows, name, other)]
            body[name] = [shown([d for d, *_ in found]), shown(near), shown(far), ", ".join(prose)]
    columns = ["all copies", "up to the trained length back", "from farther back", "prose within / beyond, by text"]
    return lines([f"less {other}", *columns], body)


def by_text(rows: list[Row], *names: str) -> list[tuple[Row, ...]]:
    """The rows of these settings, of every text that all of them have read."""
    read = [{r["text"]: r for r in rows if r["name"] == name} for name in names]
    return [tuple(r[text] for r in read) for text in sorted(set.intersection(*map(set, read)))]


def prose_less(one: Row, other: Row) -> list[float]:
    """The difference of mean prose losses within the trained length, and beyond it."""
    at = one["trained"] // STEP
    halves = [(r["prose"][:at], r["prose"][at:]) for r in (one, other)]
    return [sum(x) / len(x) - sum(y) / len(y) for x, y in zip(*halves, strict=True)]


def contents() -> Contents:
    """What stands below `<!-- places: model length dtype | other -->`: every setting less the other."""
    rows = list(RowFile(RESULT))

    def asked(what: str) -> str:
        (model, length, dtype), (other,) = parts(what)
        return less([r for r in rows if (r["model"], r["length"], r["dtype"]) == (model, int(length), dtype)], other)

    return {"places": asked}


if __name__ == "__main__":
    COPIES.main(__doc__)
