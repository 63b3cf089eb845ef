"""`hf-longattn doctor`: what would silently not work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .common import Device, Dtype, check, device_here, refusing, say

if TYPE_CHECKING:
    from ..evaluation.environment import Finding


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model or adapter on the Hub, or a directory; without one, what is installed here.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Load the model too: what that says, and damaged weights.")
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Look for what of MODEL's method would silently not run here; its first lines are what a report of a bug needs.

    It checks versions; missing kernels; engines that would drop the method; the trained length and what `extend` makes of
    it; a recorded method that does not run; and weights with NaN or infinity. Where `extend` is refused it says which methods
    MODEL takes. Exit status 1 if there is a problem, or if MODEL takes no method; 2 if it cannot be read.
    """
    check(model, dtype, adapter=True)
    device = device_here(device)

    from ..evaluation.environment import LIMIT, PROBLEM, environment

    problems = limits = 0
    with refusing("MODEL"):
        for result in environment() if model is None else _examined(model, dtype, device, weights):
            problems += result.level == PROBLEM
            limits += result.level == LIMIT
            say(f"{result.level:<8}{result.topic:<10} {result.text}")
    if problems:
        said = f"{problems} problem{'s' * (problems != 1)} found."
    elif limits:
        said = "Nothing is broken, but this model cannot do everything: see the lines that begin with limit."
    else:
        said = "No problem found."
    say(said)
    if problems:
        raise typer.Exit(1)


def _examined(model: str, dtype: str, device: str, weights: bool) -> Iterator[Finding]:
    """Findings about a model, which take transformers; what that has to say while it loads is among them."""
    from transformers.utils import logging

    from ..evaluation.doctor import examine

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    yield from examine(model, dtype, device, weights)
