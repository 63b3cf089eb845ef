"""The result of `extend`, tried on a tiny model with the same settings: for docs/models.md and `hf-longattn doctor`.

Where it is refused: which slots of a method the model takes all the same.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ..config import written
from ..extension import extend, own_window
from ..integration import apply, remove
from ..integration.layers import View, candidates_of, language_config
from ..integration.state import method_of
from ..integration.trained_length import Trained, trained
from .miniature import miniature

#: How many times the trained length.
TIMES = (2, 8)
#: What fills each slot of a method, in words, and one of them.
KINDS = {
    "positions": ("position remaps", "rerope"),
    "visibility": ("windows", "windowed"),
    "temperature": ("temperatures", "infoscale"),
    "logit_map": ("logit maps", "scale_invariant"),
    "score": ("scores", "cosscale"),
    "sink": ("sinks", "attention_sink"),
    "output_norm": ("output norms", "output_standardise"),
}


@dataclass(frozen=True)
class Reach:
    """The result of `extend` to one length.

    Args:
        to: the length, in tokens.
        text: what changes in which layers, or why nothing can.
        refused: whether `extend` raises.
    """

    to: int
    text: str
    refused: bool = False

    def __str__(self) -> str:
        return f"to {self.to:,}: {'refused: ' * self.refused}{self.text}"


def trained_line(known: Trained) -> str:
    """A trained length with its reason, and what was taken for granted."""
    return f"{known}; {known.assumed}: pass train_length= if that is not so" if known.assumed else str(known)


def outlook(config: PreTrainedConfig, train_length: int | None = None) -> list[Reach]:
    """Try `extend` on a config's model at `TIMES` its trained length.

    Args:
        train_length: the trained length, where it is not the one that the config tells.

    Raises:
        whatever building a tiny model of this config raises: see `miniature`.
    """
    model = miniature(config)
    length = trained(language_config(config), train_length=train_length).length or 1024  # where there is none extend says so
    return [_reach(model, n * length, train_length) for n in TIMES]


def taken(config: PreTrainedConfig, train_length: int | None = None) -> dict[str, str | None]:
    """By kind of method, "windows (streaming)": why a config's model refuses it, or None: it takes it.

    Args:
        train_length: the trained length, where it is not the one that the config tells.

    Raises:
        whatever building a tiny model of this config raises: see `miniature`.
    """
    model, found = miniature(config), {}
    for kind, method in KINDS.values():
        found[f"{kind} ({method})"] = why = _refusal(apply, model, method, train_length)
        if why is None:
            remove(model)
    return found


def _refusal(put: Callable[..., Any], model: Any, what: str | int, train_length: int | None) -> str | None:
    """Why `apply` or `extend` refuses a model; None: it is done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether it helps is another question
        try:
            put(model, what, train_length=train_length)
        except (ValueError, NotImplementedError) as error:
            return " ".join(str(error).split())
    return None


def _reach(model: Any, to: int, train_length: int | None) -> Reach:
    if (why := _refusal(extend, model, to, train_length)) is not None:
        return Reach(to, why, refused=True)
    text, window = changes(model), own_window(View(model))
    if window is not None and window < to:
        text += f"; seen are the last {window:,} tokens, by a window of the model's own"
    remove(model)
    return Reach(to, text)


def changes(model: Any) -> str:
    """Describe the attention layers that a method changes, and those that it leaves alone with the reason."""
    methods = [method for x in candidates_of(model) if (method := method_of(x.module)) is not None]
    done = Counter((written(p.config.methods, ["window"]), p.reason) for p in methods if p.config is not None)
    alone = Counter(p.reason for p in methods if p.config is None)
    if len(done) == 1 and not alone:
        return f"{next(iter(done))[0]} in every attention layer"
    parts = [f"{what} in {n} of {len(methods)} attention layers{f' ({why})' * bool(why)}" for (what, why), n in done.items()]
    if not any(p.config is not None and p.config.positions for p in methods):
        parts.insert(0, "nothing to remap: no distance that the model rotates by grows with the text")
    if alone:
        parts.append("left alone: " + ", ".join(f"{n} of {len(methods)} ({why})" for why, n in alone.items()))
    return "; ".join(parts)
