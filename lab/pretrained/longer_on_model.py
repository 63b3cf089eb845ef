"""Making a pretrained model longer: every way, in one forward pass over a text into which copies are written.

A row is one choice (a rope scaling, a method, or both) on the first --length tokens of --text, the same copies for all.
Rows that the result file has are not run again; every row is written as it is done. Calibrated choices are measured on the
last tokens of the text, which no pass reads. --adapter evaluates a trained adapter under the same choices.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from hf_longattn.evaluation import PASSAGE, Copy, copy_losses, loss_by_position, token_losses, with_copies
from hf_longattn.evaluation.report import figures
from hf_longattn.evaluation.rows import Row
from lab.markdown import Contents
from lab.pretrained import paired, runner
from lab.pretrained.runner import RESULTS, STEP, Choice, Program, Text, choices, described, lines, parts, with_adapter

PROTOCOL = (
    "One forward pass over the first `length` tokens of a text in which the passages of `copies` ([distance, position], 128 "
    "tokens) are overwritten by a repetition of those `distance` tokens before; no cache. prose: mean loss in nats per "
    "token of each 1024 positions outside copies; copying: mean loss on each copy, its first 16 tokens left out. "
    "Calibrated: on the last `calibration` tokens of the same text, which the pass does not read."
)
#: (distance, position); a text takes those that fit.
COPIES = [
    *((2500, 3000), (4200, 5500), (1400, 6200), (6800, 7500), (2500, 9000), (8000, 10000), (5500, 11500), (9000, 13000)),
    *((3000, 13500), (12500, 14000), (7000, 15000), (11000, 15500), (15500, 15800)),
    *((5300, 18000), (11800, 20000), (18800, 22000), (8000, 24000), (23700, 26000), (4500, 28000), (14300, 29500)),
    *((28400, 31000), (31000, 32000), (20000, 32400)),
    *((9000, 34000), (33500, 35000), (20000, 36500), (30000, 38000), (38500, 39500), (4000, 40000)),
]


def options(parser: argparse.ArgumentParser) -> None:
    runner.adapter_option(parser)
    parser.add_argument("--prefill", type=int, help="read through a cache, this many tokens at a time; default: one pass")


def load(choice: Choice, text: Text, args: argparse.Namespace) -> Any:
    return runner.load(with_adapter(choice, args.adapter), args.model, args.dtype, text.calibration)


def key(text: Text, args: argparse.Namespace) -> dict[str, Any]:
    adapter = args.adapter and args.adapter.name
    return {"text": text.name, "length": text.length, "model": args.model.name, "dtype": args.dtype, "adapter": adapter}


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    copies = [Copy(d, p) for d, p in COPIES if p + PASSAGE <= text.length]
    return measured(model, text.ids, copies, args.prefill) | described(choice, text.trained)


def measured(model: Any, ids: torch.Tensor, copies: list[Copy], prefill: int | None) -> Row:
    """The losses on copies and prose of a text (1, length) into which the copies are written."""
    length = ids.shape[1]
    ids, taken = with_copies(ids, copies)
    losses = token_losses(model, ids, prefill=prefill)
    return {
        "prose": [round(x, 4) for x in loss_by_position(losses, [*range(0, length, STEP), length], taken)],
        "copying": [round(x, 4) for x in copy_losses(losses, copies)],
        "copies": [[c.distance, c.position] for c in copies],
    }


LONGER = Program(
    "longer_on_model",
    RESULTS / "longer-smollm2.json",
    PROTOCOL,
    lambda text: choices("longer"),
    measure,
    key,
    load,
    options,
)


# tables ---------------------------------------------------------------------------------------------------------------


def load_all() -> list[Row]:
    """Rows of every model, each with its label."""
    return runner.rows_of("longer-*.json")


#: Prose within and beyond the trained length; copies within it, beyond it from known distances, and from farther back.
GROUPS = ("within", "beyond", "known", "new", "far")
HEAD = ["", "prose, within", "prose, beyond", "copies, within", "copies, beyond", "copies, farther back"]


def summary(row: Row) -> list[float]:
    """Means of `GROUPS`; of prose over tokens, where no copies stand."""
    counts = torch.full((len(row["prose"]), STEP), 1.0)
    counts[0, 0] = 0
    for _, position in row["copies"]:
        counts.view(-1)[position : position + PASSAGE] = 0
    weights, loss = counts.sum(1), torch.tensor(row["prose"])
    edge = row["trained"] // STEP
    prose = [float((loss[part] * weights[part]).sum() / weights[part].sum()) for part in (slice(edge), slice(edge, None))]
    return prose + [sum(x) / len(x) if (x := paired.losses(row, group)) else math.nan for group in GROUPS[2:]]


def contents() -> Contents:
    """What stands below these marks.

    `<!-- longer: model text length | label | ... -->`: means; with no label of every row without an adapter.
    `<!-- longer-less: model text length | label | label | ... -->`: the second and further ones less the first.
    `<!-- loss: model text length | label | what -->`: a number of a sentence, of `GROUPS` and with a number of digits.
    `<!-- costs: model text length | label | label | what -->`: likewise, by how much the first one's is higher.
    """
    rows = load_all()

    def asked(what: str) -> tuple[dict[str, Row], list[str]]:
        words, names = parts(what)
        here = {r["label"]: r for r in runner.having(rows, words, ("model", "text", "length"))}
        return here, [n for n in names or [n for n, r in here.items() if "adapter" not in r] if n in here]

    def less(what: str) -> str:
        here, (first, *names) = asked(what)
        body = {n: [paired.interval(paired.differences([(here[n], here[first])], g)) for g in GROUPS] for n in names}
        return lines(["", *(f"Δ {x}" for x in HEAD[1:])], body)

    def content(what: str) -> str:
        here, names = asked(what)
        found = {n: enumerate(summary(here[n])) for n in names}
        return lines(HEAD, {n: ["–" if x != x else f"{x:.{3 if i < 2 else 2}f}" for i, x in v] for n, v in found.items()})

    def told(what: str) -> str:
        words, (*labels, number) = parts(what)
        here = {r["label"]: r for r in runner.having(rows, words, ("model", "text", "length"))}
        group, digits = number.split()
        at = GROUPS.index(group)
        one, *other = (round(summary(here[label])[at], 3 if at < 2 else 2) for label in labels)  # as a table has them
        if not (value := one - sum(other)) > 0:
            raise ValueError(f"a page says that {labels[0]} costs more than {labels[1]} ({number}): {value:+.3f}")
        return f"{value:.{digits}f}"

    return {"longer": content, "longer-less": less, "loss": told, "costs": told}


TRAINED, BASELINE = 8192, "YaRN × 2"  # of the model in the picture
SHOWN = ["unmodified", BASELINE, "rerope(window 4096)", "leaky_rerope(window 4096, stretch 4)"]
SHOWN += ["leaky_rerope(window 4096, stretch 4; copying heads capped)", "rerope(window 4096), pose-rerope-half"]


def pictures(model: str = "SmolLM2-135M-Instruct", length: int = 16384) -> dict[str, bytes]:
    """Left, prose loss by position less YaRN's; right, copy loss by distance beyond the trained length. A text a row."""
    rows = [r for r in load_all() if (r["model"], r["length"]) == (model, length)]
    texts = [r["text"] for r in rows if r["label"] == BASELINE]
    figure, panels = figures.pyplot().subplots(
        len(texts), 2, figsize=(11, 3.8 * len(texts)), squeeze=False, constrained_layout=True
    )
    for text, (left, right) in zip(texts, panels, strict=True):
        here = {r["label"]: r for r in rows if r["text"] == text}
        for name, own in zip(SHOWN, figures.styles(SHOWN), strict=True):
            if name in here:
                draw(here[name], here[BASELINE], left, right, own | {"markersize": 5, "linewidth": 1.5, "label": name})
        for panel in (left, right):
            panel.axvline(TRAINED, color="#999999", linewidth=1, linestyle=":")
        common = {"title": f"{text}: prose", "xlabel": "position (tokens)"}
        left.set(ylabel="loss less YaRN's (nats a token)", ylim=(-0.16, 0.12), **common)
        common = {"title": f"{text}: a passage read again beyond {TRAINED}", "xlabel": "how far back (tokens)"}
        right.set(ylabel="loss (nats a token)", ylim=(0, 4), **common)
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return {"longer.png": figures.png(figure)}


def draw(row: Row, baseline: Row, left: Any, right: Any, style: dict[str, Any]) -> None:
    prose = [a - b for a, b in zip(row["prose"], baseline["prose"], strict=True)]
    left.plot([STEP * (n + 0.5) for n in range(len(prose))], prose, **style)
    beyond = sorted((d, x) for (d, p), x in zip(row["copies"], row["copying"], strict=True) if p > TRAINED)
    right.plot(*zip(*beyond, strict=True), **style)


if __name__ == "__main__":
    LONGER.main(__doc__)
