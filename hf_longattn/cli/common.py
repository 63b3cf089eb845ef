"""What the commands share: the console, lengths, loading a model."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from .. import rope

console = Console()


def tokens(text: str) -> int:
    """A number of tokens; "32k" is 32 * 1024."""
    number, unit = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
    try:
        return int(number) * unit
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a length; write 32768 or 32k") from None


def load(model: str, dtype: str, yarn: float | None = None) -> Any:
    """A causal language model for inference, with YaRN for `yarn` times its trained length if given."""
    config = AutoConfig.from_pretrained(model)
    if yarn is not None:
        rope.yarn(config, yarn)
    return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype).eval()
