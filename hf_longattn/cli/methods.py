"""`hf-longattn methods`: every method by name."""

from __future__ import annotations

from .common import console


def methods() -> None:
    """List every method: its name, its slot, whether it needs training, and what it does.

    A method that needs training harms a pretrained model, with its default parameters, until the model is trained with it or
    it is calibrated. Methods of different slots combine: rerope+infoscale.
    """
    from ..slots.method import SLOTS
    from ..slots.registry import method, method_names, summary_of

    known = {name: method(name) for name in method_names()}
    rows = [("name", "slot", "training", "what it does")]
    for name in sorted(known, key=lambda n: (SLOTS.index(known[n].slot), n)):
        rows.append((name, known[name].slot, "needed" if known[name].needs_training else "-", summary_of(name)))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    for row in rows:
        line = "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
