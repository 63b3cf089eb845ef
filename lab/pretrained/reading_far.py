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
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.evaluation import PASSAGE, Copy, copy_losses, prefix_of, token_losses, with_copies
from hf_longattn.evaluation.measures.losses import Prefix, shortened
from hf_longattn.evaluation.rows import Row
from hf_longattn.evaluation.settings import Setting
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents
from lab.pretrained import longer_on_model, paired, runner
from lab.pretrained.copies import CHOOSING
from lab.pretrained.runner import RESULTS, Choice, Program, Text, choices, described, lines, parts

PROTOCOL = (
    "The text before the last `segment` tokens of the first `length` is read once under streaming (window 4096, 4 sinks) by "
    "the unmodified weights, or with `adapter` by the adapted ones (under a rope scaling of its own by a way that has one); "
    "each way reads the segment over those keys (whole: a way reads the text before itself). In the segment, passages of 128 "
    "tokens that repeat those `distance` tokens before (copies: [distance, position]) take turns with 128 tokens of prose. "
    "prose, copying: mean loss in nats of each piece of prose and of each copy, its first 16 tokens left out. Calibrated: on "
    "the last `calibration` tokens of the text, which nothing else reads."
)
SEGMENT = 2048
#: Where the repeated passages stand, as shares of the text before the segment; in this order, near and far mixed.
SHARES = (0.05, 0.5, 0.9, 0.02, 0.25, 0.97, 0.12, 0.75)
PREFILL = LongAttnConfig.preset("streaming", window=4096)


def settings(text: Text) -> list[Choice]:
    half, factor = text.trained // 2, text.length // (text.trained // 2)
    shares = {"half": half, "quarter": text.trained // 4, "eighth": text.trained // 8, "trained": text.trained}
    return choices("reading", **shares, factor=factor, halved=max(2, factor // 2))


def copies_at(text: str, length: int, segment: int = SEGMENT) -> list[Copy]:
    """Passages that the segment repeats, each behind as many tokens of prose: from SHARES, or in a segment of another length
    from places drawn once per text and length, evenly spread over the text before."""
    before = length - segment
    positions = range(before + PASSAGE, length - PASSAGE + 1, 2 * PASSAGE)
    if segment == SEGMENT:
        return [Copy(p - int(before * share), p) for p, share in zip(positions, SHARES, strict=True)]
    rng = random.Random(f"{text}:{length}")
    sources = runner.drawn(rng, len(positions), before)
    rng.shuffle(sources)
    return [Copy(p - source, p) for p, source in zip(positions, sources, strict=True)]


def load(choice: Choice, model: Path, dtype: str, calibration: Tensor, adapter: Path | None) -> Any:
    """The model under a choice, with an adapter's weights if there is one: the method that it records gives way."""
    if adapter is None:
        return runner.load(choice, model, dtype, calibration)
    plain = Choice(Setting(adapter.name, rope=choice.setting.rope, adapter=str(adapter)))
    adapted = runner.load(plain, model, dtype, calibration)
    with contextlib.suppress(ValueError):  # of an adapter that was trained without a method
        hf_longattn.remove(adapted)
    return adapted if choice.setting.config is None else hf_longattn.apply(adapted, choice.setting.config)


def options(parser: argparse.ArgumentParser) -> None:
    runner.adapter_option(parser)
    parser.add_argument("--segment", type=int, default=SEGMENT, help="tokens at the end that are measured")
    parser.add_argument("--whole", action="store_true", help="each way reads the text before the segment itself")
    parser.add_argument("--keys", type=Path, help="keep the keys of the text before here, for the next call (23 KiB a token)")


def key(text: Text, args: argparse.Namespace) -> dict[str, Any]:
    return longer_on_model.key(text, args) | {"whole": args.whole, "segment": args.segment}


def read_by_itself(model: Any, ids: Tensor) -> Prefix:
    """Keys and values of a text under a model's own rope scaling, read over distances that it knows."""
    before = prefix_of(hf_longattn.apply(model, PREFILL, stack=True), ids)
    hf_longattn.remove(model)
    return before


def reader(text: Text, args: argparse.Namespace) -> Any:
    """The model, adapted or not, that reads a text for all settings that do not scale rope."""
    return load(Choice(Setting("prefill", PREFILL.to_dict())), args.model, args.dtype, text.ids, args.adapter)


class Before:
    """The text before the segment as keys and values, of one reading of each text for all ways that do not scale rope."""

    def __init__(self) -> None:
        self.read: dict[Path, Prefix] = {}

    def __call__(self, model: Any, text: Text, choice: Choice, args: argparse.Namespace, ids: Tensor) -> Prefix:
        if args.whole:
            return prefix_of(model, ids[:, : -args.segment])
        if choice.setting.rope:
            return read_by_itself(model, ids[:, : -args.segment])
        return shortened(self.shared(text, args), text.length - args.segment)

    def shared(self, text: Text, args: argparse.Namespace) -> Prefix:
        longest, file = max(args.length) - args.segment, args.keys
        if file and args.adapter:  # keys are those of the weights that read
            file = file.with_stem(f"{file.stem}-{args.adapter.name}")
        if text.path not in self.read and file and file.exists():
            self.read[text.path] = torch.load(file, weights_only=False)
        if text.path not in self.read or self.read[text.path].get_seq_length() < longest:
            start = time.process_time()
            self.read[text.path] = prefix_of(reader(text, args), text.tokens[:, :longest])
            print(f"the text before: {time.process_time() - start:.0f} s", flush=True)
            if file:
                torch.save(self.read[text.path], file)
        return self.read[text.path]


BEFORE = Before()


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    copies = copies_at(text.name, text.length, args.segment)
    ids, _ = with_copies(text.ids, copies)
    before = BEFORE(model, text, choice, args, ids)
    found = measured(token_losses(model, ids, last=args.segment - 1, prefix=before), copies)
    return found | {"copies": [[c.distance, c.position] for c in copies]} | described(choice, text.trained)


def measured(losses: Tensor, copies: Sequence[Copy]) -> dict[str, list[float]]:
    """Mean loss of each piece of prose before a copy, and of each copy."""
    prose = [losses[:, c.position - PASSAGE : c.position].nanmean() for c in copies]
    return {
        "prose": [round(float(x), 4) for x in prose],
        "copying": [round(x, 4) for x in copy_losses(losses, copies)],
    }


READING = Program(
    "reading_far",
    RESULTS / "reading-smollm2.json",
    PROTOCOL,
    settings,
    measure,
    key,
    lambda choice, text, args: load(choice, args.model, args.dtype, text.calibration, args.adapter),
    options,
    lengths=(16384, 32768, 65536),
)


# tables ---------------------------------------------------------------------------------------------------------------

FAR = "copies from farther back"


#: Losses on each piece of prose, on copies from distances that the model knows, and on those from farther back.
GROUPS = ("prose", "near", "far")


def contents() -> Contents:
    """What stands below these marks.

    `<!-- reading: [model] text length [whole] -->`: means; with `| label | ...` behind it of these rows alone.
    `<!-- reading-less: [model] text length -->`: with `| label | label | ...` the further ones less the first.
    `far less`, `far better`, `far worse`: model length, of longer segments; `far text less` and so on: model text length, of
    one text alone; `text better`, `text worse`: [model] text length [whole], likewise; see `paired.marks`.
    """
    rows = [r | {"name": r["label"]} for r in runner.rows_of("reading-*.json")]

    def on_text(words: list[str]) -> list[Row]:
        whole = words[-1] == "whole"
        *model, text, length = words[:-1] if whole else words
        wanted = [*(model or ["SmolLM2-135M-Instruct"]), text, length, str(whole), str(SEGMENT)]
        return runner.having(rows, wanted, ("model", "text", "length", "whole", "segment"))

    def asked(what: str) -> tuple[dict[str, Row], list[str]]:
        words, labels = parts(what)
        here = {r["label"]: r for r in on_text(words)}
        return here, labels or [label for label, r in here.items() if "adapter" not in r]

    longer = [r for r in rows if r["segment"] != SEGMENT]
    return {
        **paired.marks("far", paired.by_words(longer, ("model", "length"), CHOOSING)),
        **paired.marks("far text", lambda words: runner.having(longer, words, ("model", "text", "length"))),
        **paired.marks("text", on_text),
        "reading": lambda what: shown(*asked(what)),
        "reading-less": lambda what: lines(["", "Δ prose", "Δ all copies", f"Δ {FAR}"], less(*asked(what), "|" in what)),
    }


def shown(rows: dict[str, Row], labels: Sequence[str]) -> str:
    trained = next(iter(rows.values()))["trained"]
    body = {}
    for label in (x for x in labels if x in rows):
        values = zip((paired.losses(rows[label], group) for group in GROUPS), (3, 2, 2), strict=True)
        body[label] = [f"{mean_interval(x)[0]:.{digits}f}" if x else "–" for x, digits in values]
    return lines(["", "prose", f"copies from up to {trained:,} back", FAR], body)


def less(rows: dict[str, Row], labels: Sequence[str], first: bool) -> dict[str, list[str]]:
    """Each way with a temperature or map less the same without, or each less the first, on prose, all copies and far ones:
    mean, ± 95 % t interval."""
    body = {}
    for label in labels:
        base = labels[0] if first else label.split(" + ")[0]
        if base != label and base in rows and label in rows:
            pair = [(rows[label], rows[base])]
            body[label] = [paired.interval(paired.differences(pair, which)) for which in ("prose", "all", "far")]
    return body


if __name__ == "__main__":
    READING.main(__doc__)
