"""Reach of a model before and after training: copies from far back, and the loss in one long text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..evaluation.measures.copies import PASSAGE
from ..evaluation.measures.probe import LEAST, TOKENS, distances_to, passages, probe
from ..evaluation.rows import Row
from ..evaluation.tasks.probe import PARTS
from .data import Data
from .held_out import Tick

#: Passages that are read at each distance, and how many distances.
PASSAGES, POINTS = 2, 5
#: Tokens of held-out text that they are taken from, at least.
PROBED = PASSAGES * LEAST
#: What the measured models are called, in the order of training: the middle one is what the method gives untrained.
BEFORE, UNTRAINED, AFTER = "base", "base + method", "trained"
PICTURE_FILE = "reach.png"
#: By how much copies from the nearest distance get worse until it is said, in nats per token.
HARM = 0.05

#: By model, its rows of a probe.
Reach = Mapping[str, Sequence[Row]]


def distances(to: int, held_out: int) -> tuple[tuple[int, ...], str]:
    """From how far back passages are repeated, in a model that reads `to` tokens; from nowhere, with the reason, where text or
    model are too short."""
    if not to:
        why = "their positions jump, which this model does not take"
    elif to - PASSAGE < LEAST:
        why = f"the model reads {to:,} tokens, {LEAST + PASSAGE:,} are needed"
    elif held_out < PROBED:
        why = f"{held_out:,} tokens are held out, {PROBED:,} are needed"
    else:
        return distances_to(to - PASSAGE, POINTS), ""
    return (), f"no copies are probed: {why}"


def probed(model: Any, data: Data, back: Sequence[int], tick: Tick) -> list[Row]:
    """Losses on other text and on a copy at each distance, on passages from all over the held-out text."""
    model.eval()
    ids = torch.cat([data.held_out.new_tensor(data.start), data.held_out])[None]
    rows: list[Row] = []
    for distance in back:
        rows += probe(model, passages(ids, PASSAGES), [distance]).rows()
        tick(PASSAGES * TOKENS)
    return rows


def sentence(reach: Reach, measured: Mapping[str, Mapping[int, Mapping[str, Any]]], text: int | None) -> str:
    """Describe the result of the training: the farthest copy, and the second half of the long text.

    Args:
        measured: by model and length, see `held_out.metrics`.
        text: the length of the long text; None for none.
    """
    parts = []
    if reach:
        farthest = reach[AFTER][-1]
        said = _compared(f"copies from {farthest['distance']:,} tokens back", _copies(reach, -1))
        parts.append(said + ", no better than other text there" * (farthest["copy"][0] >= farthest["text"][0]))
    if text is not None:
        last = {
            name: next(reversed(by_length[text]["by_position"].items()))
            for name, by_length in measured.items()
            if text in by_length
        }
        first, end = map(int, last[AFTER][0].split("-"))
        parts.append(_compared(f"a text at its tokens {first:,} to {end:,}", {name: loss for name, (_, loss) in last.items()}))
    said = f"Reads {', and '.join(parts)}, in nats per token." if parts else ""
    near = _copies(reach, 0)
    if BEFORE in near and near[AFTER] > near[BEFORE] + HARM:
        back = reach[AFTER][0]["distance"]
        said += f" Copies from {back:,} tokens back got worse: {near[AFTER]:.2f} (base: {near[BEFORE]:.2f})."
    return said


def _copies(reach: Reach, which: int) -> dict[str, float]:
    """The loss on copies at the nearest (0) or the farthest (-1) distance, by model."""
    return {name: rows[which]["copy"][0] for name, rows in reach.items()}


def _compared(what: str, losses: Mapping[str, float]) -> str:
    now, names = f"{losses[AFTER]:.2f}", {BEFORE: "base", UNTRAINED: "with the untrained method"}
    others = {name: f"{losses[key]:.2f}" for key, name in names.items() if key in losses}
    said = ", ".join(f"{name}: {loss}" + ", no different" * (loss == now) for name, loss in others.items())
    return f"{what} at {now}" + (f" ({said})" if said else "")


def picture(reach: Reach, trained: int | None) -> bytes | None:
    """A PNG of both losses by distance; None without matplotlib, which the extra `cli` brings."""
    from ..evaluation.report.figures import NATS, curves, png, trained_mark

    lines = {
        f"{name}, {'copies' if part == 'copy' else 'other text'}": [(r["distance"], r[part][0]) for r in rows]
        for part in reversed(PARTS)
        for name, rows in reach.items()
    }
    try:
        return png(curves(lines, "tokens back", NATS, "By how far back the first reading is", trained_mark(trained)))
    except ImportError:
        return None
