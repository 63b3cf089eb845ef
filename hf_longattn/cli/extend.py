"""`hf-longattn extend`: make a model longer without training, and show that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..evaluation.statistics import TOLERANCE
from .common import (
    Device,
    Dtype,
    Model,
    TrainLength,
    check,
    command_line,
    console,
    device_here,
    refusing,
    run,
    say,
    say_precision,
    stop,
    table,
    tokens,
    trained_at,
)


def extend(
    context: typer.Context,
    model: Model,
    to: Annotated[
        str,
        typer.Option(
            help="Length to reach, in tokens (32k is 32,768, 1M 1,048,576); the trained length improves retrieval within it."
        ),
    ],
    text: Annotated[Path, typer.Option(help="A text of at least that many tokens, of the kind you care about.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to save the best model, rows and plot; an interrupted run continues where it stopped."),
    ] = None,
    purpose: Annotated[
        str, typer.Option("--for", help="What to minimise: loss on prose (reading), on far copies (retrieval), or both.")
    ] = "both",
    tolerance: Annotated[
        float,
        typer.Option(help="Acceptable cost within the trained length, in nats per token; 0.02 is 2 % of perplexity."),
    ] = TOLERANCE,
    train_length: TrainLength = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Make MODEL longer without training: probe a list of methods, read your text with the best of them, keep the best.

    Candidates are first probed at far positions, in seconds. The best kinds then read the text in one forward pass each, with
    some passages repeated from far back; loss is reported on prose, within and beyond the trained length, and on these
    copies. Exit status 1 if nothing stays within the tolerance, or nothing is better than the unmodified model by more than
    chance.
    """
    from ..checks import check_folder, check_output
    from ..evaluation.rows import SEARCHED
    from ..files import read_plain_text

    length, given = tokens(to), trained_at(train_length)
    if not tolerance >= 0:
        raise typer.BadParameter(f"a cost in nats is 0 or more, not {tolerance:g}", param_hint="--tolerance")
    with refusing("--out"):
        if out is not None:
            check_output(out)
            check_folder(out, set(), SEARCHED, f"{SEARCHED}.lock")
    check(model, dtype)
    with refusing("--text"):
        content = read_plain_text(text)
    device = device_here(device)

    from ..evaluation.loading import OneModel
    from ..evaluation.measured_extension import MeasuredExtension, format_row, losses, summary
    from ..extension import beyond_shown, check_purpose

    with refusing("--for"):
        check_purpose(purpose)
    with refusing("MODEL"):
        plan = MeasuredExtension(model, length, purpose, given)
    with refusing("--to"):
        say(f"Trained at {plan.trained:,} tokens: {plan.facts.train_length_source}.")
    if own := plan.own():
        say(own)
    with refusing("MODEL"):
        plan.check_extends()
    chosen = plan.checkpoint.precision(dtype, device)
    say_precision(dtype, chosen)
    saved_in = plan.checkpoint.dtype if dtype == "auto" and plan.checkpoint.is_half else dtype  # whatever it was read in
    if not plan.checkpoint.speaks:
        return plan.write(plan.by_rule(saved_in, say), out, say)
    if doubt := beyond_shown(plan.trained, length):
        say(f"Warning: {doubt}.")
    with refusing("MODEL"):
        plan.check_room()
    with refusing("--to"):
        plan.check_copies()
    with refusing("--text"):
        ids = plan.encode(content, str(text))
    with refusing("--out"):
        rows = plan.rows(text.name, content, ids, chosen, out)
    search = plan.search(ids, rows, OneModel(plan.checkpoint, chosen, device), tolerance, command_line(context))
    for line in plan.leave_out(search):
        say(line)
    say(f"Probing {search.probes} candidates, then reading {search.to} tokens with the best.")
    if run(search.experiment, out, format_row, cells=search.cells(), total=search.work):
        stop(search.experiment, out)
    found = losses(search)
    console.print(table(found.title, found.columns, found.shown()))
    try:
        choice = search.choice()
    except ValueError as error:
        say(f"{str(error)[0].upper()}{str(error)[1:]}.")
        raise typer.Exit(1) from None
    for line in summary(search, choice):
        say(line)
    if out is not None:
        plan.save(search, choice, saved_in, out, say)
