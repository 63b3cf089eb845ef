"""`hf-longattn probe`: what settings do to far distances, in seconds a distance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import Model, Texts, measure, measuring


@measuring("distances", "passages", "dtype", "device", "seed")
def probe(
    context: typer.Context,
    model: Model,
    text: Texts,
    out: Annotated[
        Path | None, typer.Option(help="A folder for rows and report; an interrupted run continues where it stopped.")
    ] = None,
    **given: Any,
) -> None:
    """Probe how far back MODEL reads, unmodified and under methods, without reading long texts.

    The model reads a passage, then, after a jump in positions, other text and the passage again. The loss on the other text
    shows whether the model works at that position, the loss on the copy whether it retrieves from that distance. Intervals
    are over passages. In a long text many keys in between compete for attention; a probe does not measure that. The same as
    a task of eval: --tasks probe.
    """
    measure(context, model, text, out, given | {"tasks": "probe", "lengths": ()})
