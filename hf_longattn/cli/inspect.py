"""`hf-longattn inspect`: look into a model's attention, with and without methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import Model, Texts, measure, measuring


@measuring("layers", "what", "rows", "delta", "dtype", "device")
def inspect(
    context: typer.Context,
    model: Model,
    text: Texts,
    length: Annotated[str, typer.Option(help="Tokens to read; 16k is 16,384.")] = "4k",
    out: Annotated[
        Path | None, typer.Option(help="A folder for rows and report; the report of another command gets sections.")
    ] = None,
    **given: Any,
) -> None:
    """Look into MODEL's attention on your text: entropy, attention by distance, logits, outputs, per layer and head.

    One forward pass per setting over the first --length tokens; memory grows linearly with it. With --method the
    unmodified model is measured too, for comparison. --out gets rows.jsonl (every number by layer, head and length),
    figures/*.png and index.html, a self-contained page. The same as a task of eval: --tasks attention.
    """
    measure(context, model, text, out, given | {"tasks": "attention", "lengths": length})
