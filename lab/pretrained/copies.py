"""What a pretrained model copies beyond its trained length, and what prose costs: many passages at random places, paired.

A text is read once under every setting, through a cache, with passages written into it beyond the trained length that repeat
earlier ones. The places are drawn once per text and length, the same for all settings, distances evenly from near to the
whole text. Rows that the result file has are not run again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hf_longattn.evaluation import PASSAGE, Copy
from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents
from lab.pretrained import reading_far
from lab.pretrained.longer_on_model import measured
from lab.pretrained.runner import RESULTS, STEP, Choice, Program, Text, choices, described, lines, parts, rows_of

RESULT = RESULTS / "copies.json"
#: Texts on which settings were chosen; tables show them apart.
CHOOSING = ("emma", "northangerabbey")
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


def less(rows: list[Row], other: str, prose: Callable[[list[tuple[Row, ...]]], str], head: str) -> str:
    """Every setting less another: all copies, those from up to the trained length back, those from farther, and prose."""
    body = {}
    for name in dict.fromkeys(r["name"] for r in rows if r["name"] != other):
        if found := pairs(rows, name, other):
            near = [d for d, distance, trained in found if distance <= trained]
            far = [d for d, distance, trained in found if distance > trained]
            body[name] = [shown([d for d, *_ in found]), shown(near), shown(far), prose(by_text(rows, name, other))]
    return lines([f"less {other}", "all copies", "up to the trained length back", "from farther back", head], body)


def by_text(rows: list[Row], *names: str) -> list[tuple[Row, ...]]:
    """The rows of these settings, of every text that all of them have read."""
    read = [{r["text"]: r for r in rows if r["name"] == name} for name in names]
    return [tuple(r[text] for r in read) for text in sorted(set.intersection(*map(set, read)))]


def prose_less(one: Row, other: Row) -> list[float]:
    """The difference of mean prose losses within the trained length, and beyond it."""
    at = one["trained"] // STEP
    halves = [(r["prose"][:at], r["prose"][at:]) for r in (one, other)]
    return [sum(x) / len(x) - sum(y) / len(y) for x, y in zip(*halves, strict=True)]


def halves(texts: list[tuple[Row, ...]]) -> str:
    return ", ".join(" / ".join(f"{x:+.3f}" for x in prose_less(*pair)) for pair in texts)


def pieces(texts: list[tuple[Row, ...]]) -> str:
    return shown([a - b for one, other in texts for a, b in zip(one["prose"], other["prose"], strict=True)])


#: Settings of the committed probe, as copies.yaml names them.
PROBED = {
    "unmodified": "unmodified",
    "@yarn:2": "YaRN × 2",
    "rerope": "rerope(window 4096)",
    "self_extend": "self_extend(window 1024, group 4)",
}


def probed(rows: list[Row]) -> str:
    """Mean loss on copies in a probe and in whole texts, from up to the trained length back and from farther."""
    probe, body = RowFile(RESULTS / "probe-smollm2.json"), {}
    for setting, name in PROBED.items():
        told = [(r["distance"], x) for r in probe if r["setting"] == setting for x in r["copy"]]
        read = [(d, x) for r in rows if r["name"] == name for (d, _), x in zip(r["copies"], r["copying"], strict=True)]
        trained = next(r["trained"] for r in rows if r["name"] == name)
        split = [[x for d, x in found if (d > trained) == far] for far in (False, True) for found in (told, read)]
        body[name] = [f"{sum(x) / len(x):.2f}" for x in split]
    return lines(["", "probe, up to the trained length back", "whole texts", "probe, from farther back", "whole texts"], body)


def contents() -> Contents:
    """What stands below these marks.

    `<!-- places: model length dtype | other -->`: every setting less the other, on the texts that chose nothing.
    `<!-- choosing: ... -->`: likewise, on those that did.
    `<!-- far copies: model length | other -->`: likewise, in rows of reading_far with long segments, without adapters or, with
    `| label | ...` behind it, these alone.
    `<!-- probe and copies: model length dtype -->`: mean losses on copies, beside those of a probe.
    """
    rows = list(RowFile(RESULT))

    def read(what: str, choosing: bool = False) -> tuple[list[Row], list[str]]:
        (model, length, dtype), labels = parts(what)
        wanted = model, int(length), dtype, choosing
        keys = ((r["model"], r["length"], r["dtype"], r["text"] in CHOOSING) for r in rows)
        return [r for r, key in zip(rows, keys, strict=True) if key == wanted], labels

    def places(what: str, choosing: bool = False) -> str:
        found, (other,) = read(what, choosing)
        return less(found, other, halves, "prose within / beyond, by text")

    def far(what: str) -> str:
        (model, length), (other, *only) = parts(what)
        kept = [r | {"name": r["label"]} for r in rows_of("reading-*.json") if r["segment"] != reading_far.SEGMENT]
        wanted = [r for r in kept if (r["model"], r["length"]) == (model, int(length))]
        named = [r for r in wanted if (r["name"] in (other, *only) if only else "adapter" not in r)]
        return less(named, other, pieces, "prose")

    return {
        "places": places,
        "choosing": lambda what: places(what, True),
        "far copies": far,
        "probe and copies": lambda what: probed(read(what)[0]),
    }


if __name__ == "__main__":
    COPIES.main(__doc__)
