"""`hf-longattn eval`, what methods do to a model, as a page; `probe` and `inspect`, one task of it each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import Model, Texts, measure, measuring

Out = Annotated[Path | None, typer.Option(help="A folder for rows and report; an interrupted run continues where it stopped.")]


@measuring(
    *("lengths", "tasks", "windows", "targets", "bos", "samples", "questions", "answer_tokens", "kinds", "ruler_data"),
    *("chat", "depths", "near", "evaluator", "keep", "distances", "passages", "layers", "what", "rows", "delta"),
    *("dtype", "device", "seed", "shortest_first", "prefix"),
)
def evaluate(
    context: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="A folder for the report; an interrupted run continues where it stopped.")],
    text: Texts = [],  # noqa: B006
    *,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Measure nothing; write the page from all rows in the folder.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, list the rows to measure, and stop.")] = False,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    **given: Any,
) -> None:
    """Measure MODEL unmodified and under methods, and write a page that shows what each costs and gains.

    It measures loss by length (the same tokens, with more and more context) and by position, and tasks. Mistakes in the
    command are refused before weights are read. After an interruption the same command continues. More settings, tasks and
    texts can be measured into the same folder later: every row is kept, and the page is of the settings that are named now.
    Several processes or GPUs:
    torchrun --nproc-per-node 8 -m hf_longattn.cli eval ...
    """
    measure(context, model, text, out, given, title, page_only, dry_run)


@measuring("distances", "passages", "dtype", "device", "seed")
def probe(context: typer.Context, model: Model, text: Texts, out: Out = None, **given: Any) -> None:
    """Probe how far back MODEL reads, unmodified and under methods, without reading long texts.

    The model reads a passage, then, after a jump in positions, other text and 128 tokens of the passage again. The loss on
    the other text shows whether the model works at that position, the loss on the copy whether it retrieves from that
    distance. Intervals are over passages. In a long text many keys in between compete for attention; a probe does not measure
    that. The same as a task of eval: --tasks probe.
    """
    measure(context, model, text, out, given | {"tasks": "probe", "lengths": ()})


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
