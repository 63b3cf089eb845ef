"""What a pretrained model copies beyond its trained length, and what prose costs: many passages at random places, paired.

A text is read once under every setting, through a cache, with passages written into it beyond the trained length that repeat
earlier ones. The places are drawn once per text and length, the same for all settings, distances evenly from near to the
whole text. Rows that the result file has are not run again.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from hf_longattn.evaluation import PASSAGE, Copy
from hf_longattn.evaluation.rows import Row, RowFile
from lab.markdown import Contents
from lab.pretrained import paired
from lab.pretrained.longer_on_model import measured
from lab.pretrained.runner import RESULTS, Choice, Program, Text, choices, described, drawn, lines

RESULT = RESULTS / "copies.json"
#: Texts on which settings were chosen; tables show them apart.
CHOOSING = ("emma", "mansfieldpark", "northangerabbey")
PROTOCOL = (
    "The first `length` tokens of a text, read through a cache, 2,048 at a time. Beyond the trained length, `copies` "
    "([distance, position]) overwrite 128 tokens by those `distance` before, at places and from distances drawn once per text "
    "and length. copying: mean loss in nats on each copy, its first 16 tokens left out. prose: mean loss of each 1024 "
    "positions, copies left out."
)


def places(text: str, length: int, trained: int, count: int) -> list[Copy]:
    """Copies at random places beyond the trained length, from random distances, evenly spread; none meets another."""
    rng = random.Random(f"{text}:{length}")
    positions = [trained + place for place in drawn(rng, count, length - trained)]
    shares = [(n + rng.random()) / count for n in range(count)]
    rng.shuffle(shares)
    # what is copied comes from before the trained length, where nothing is overwritten, or is the newest prose
    return [Copy(p - int((1 - share) * (trained - PASSAGE)), p) for p, share in zip(positions, shares, strict=True)]


def settings(text: Text) -> list[Choice]:
    trained, factor = text.trained, max(2.0, text.length / text.trained)
    shares = {"half": trained // 2, "quarter": trained // 4, "eighth": trained // 8}
    return choices("copies", **shares, factor=factor, double=2 * factor, group=int(2 * factor))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--copies", type=int, default=24)


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    copies = places(text.name, text.length, text.trained, args.copies)
    return measured(model, text.ids.to(model.device), copies, 2048) | described(choice, text.trained)


COPIES = Program("copies", RESULT, PROTOCOL, settings, measure, options=options, spare=0, gpu=True)


# tables ---------------------------------------------------------------------------------------------------------------


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

    `copied less`, `copied better`, `copied worse`: model length dtype, see `paired.marks`.
    `<!-- probe and copies: model length dtype -->`: mean losses on copies, beside those of a probe.
    """
    select = paired.by_words(list(RowFile(RESULT)), ("model", "length", "dtype"), CHOOSING)
    marks = paired.marks("copied", select, paired.halves, "prose within / beyond, by text")
    return {**marks, "probe and copies": lambda what: probed(select(what.split()))}


if __name__ == "__main__":
    COPIES.main(__doc__)
