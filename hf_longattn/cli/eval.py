"""`hf-longattn eval`: what methods do to a model, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import Model, Texts, measure, measuring


@measuring(
    *("lengths", "tasks", "windows", "targets", "bos", "samples", "kinds", "chat", "depths", "near", "evaluator", "keep"),
    *("distances", "passages", "layers", "what", "rows", "delta"),
    *("dtype", "device", "seed", "shortest_first", "prefix"),
)
def evaluate(
    context: typer.Context,
    model: Model,
    text: Texts,
    out: Annotated[Path, typer.Option(help="A folder for the report; an interrupted run continues where it stopped.")],
    *,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Measure nothing; write the page from the rows so far.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    **given: Any,
) -> None:
    """Measure MODEL unmodified and under methods, and write a page that shows what each costs and gains.

    It measures loss by length (the same tokens, with more and more context) and by position, and tasks. Mistakes in the
    command are refused before weights are read. After an interruption the same command continues, and more settings, tasks
    and texts can be added to a folder later. Several processes or GPUs:
    torchrun --nproc-per-node 8 -m hf_longattn.cli eval ...
    """
    measure(context, model, text, out, given, title, page_only)
