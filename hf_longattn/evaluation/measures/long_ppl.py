"""LongPPL: perplexity on the tokens that far context helps with.

Most tokens of a long text are predicted as well from the last few thousand tokens, so their loss says nothing about far
context. Key tokens are those that it pays for: the model is surer of them with the whole text before them than with its last
`context` tokens alone, and sure of them at all.

Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?" (2024), Sections 2.3 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..experiment import Cell, identity
from ..loading import load_tokenizer
from ..rows import Row
from ..settings import Setting
from .losses import token_losses

#: By how many nats far context must help, and the loss below which a token counts as predicted, as published.
GAP, CERTAIN = 2.0, 2.0


def short_losses(model: Any, input_ids: Tensor, context: int = 4096, stride: int = 1024) -> Tensor:
    """The loss of every token given only tokens near it: at least context - stride of those before it, at most context.

    Args:
        input_ids: (batch, length).
        stride: tokens between the starts of the windows that are read, each of `context` tokens; less than context.

    Returns:
        float32 (batch, length); the first column, which nothing predicts, is NaN.
    """
    if not 1 <= stride < context:
        raise ValueError(f"stride must lie in [1, {context - 1}], got {stride}")
    length = input_ids.shape[1]
    losses = token_losses(model, input_ids[:, :context])
    losses = torch.nn.functional.pad(losses, (0, max(length - context, 0)), value=torch.nan)
    for end in range(context + stride, length + stride, stride):
        end, first = min(end, length), end - stride
        window = token_losses(model, input_ids[:, end - context : end], last=end - first)
        losses[:, first:end] = window[:, first - end :]
    return losses


def key_tokens(long: Tensor, short: Tensor, gap: float = GAP, certain: float = CERTAIN) -> Tensor:
    """bool, like `long`: which tokens far context helps with, by their losses with and without it (nats)."""
    return (short - long > gap) & (long < certain)


def long_loss(losses: Tensor, keys: Tensor) -> float:
    """Mean loss (nats) of the key tokens, whose exponential is LongPPL; NaN without any."""
    return float(losses[keys].mean()) if bool(keys.any()) else float("nan")


class KeyTokens:
    """LongPPL in an evaluation: one of its settings, the evaluator, finds the key tokens that all settings are measured at.

    Args:
        near: the context that counts as short, in tokens; windows of a quarter more are read.

    Raises:
        ValueError: there is no such setting.
    """

    def __init__(self, near: int, evaluator: str, settings: Sequence[Setting]) -> None:
        named = {setting.name: setting for setting in settings}
        if evaluator not in named:
            raise ValueError(f"the evaluator {evaluator!r} is none of the settings: {', '.join(named)}")
        self.near, self.evaluator, self.stride = near, named[evaluator], max(near // 4, 1)
        #: Tokens that are read at once for the short context; texts as short as that have no far context.
        self.window = near + self.stride

    def check(self, longest: int, model: str, text: str) -> None:
        """Refuse lengths without far context, and an evaluator that reads a text as other tokens than the model."""
        if self.near < 2 or longest <= self.window:
            raise ValueError(
                f"long_ppl asks what context beyond {self.near} tokens helps with, and no length exceeds {self.window}: raise "
                "lengths, or lower near"
            )
        if (other := self.evaluator.model) is not None:
            theirs, ours = (load_tokenizer(m)(text[:2000]).input_ids for m in (other, model))
            if theirs != ours:
                raise ValueError(
                    f"the evaluator {self.evaluator.name!r} has another tokenizer: its tokens are not the model's"
                )

    def cell(self, setting: Setting, key: Mapping[str, Any], text: Callable[[], Tensor], depends: Sequence[Any]) -> Cell:
        """The row of a setting on a text, (1, length) tokens: `key_loss` (nats, None without key tokens), `key_tokens`, how
        many there are, and of the evaluator `keys`, their positions.
        """
        depends = [*depends, identity(self.evaluator)]
        found = Cell(self.evaluator, key, partial(self._row, text), depends)
        own = setting.name == self.evaluator.name
        return found if own else Cell(setting, key, partial(self._row, text), depends, by=found)

    def _row(self, text: Callable[[], Tensor], model: Any, found: Row | None = None) -> Row:
        ids = text().to(model.device)
        losses = token_losses(model, ids)
        if found is None:
            keys = key_tokens(losses, short_losses(model, ids, self.window, self.stride))
        else:
            keys = torch.zeros_like(losses, dtype=torch.bool)
            keys[:, found["keys"]] = True
        loss, positions = long_loss(losses, keys), keys[0].nonzero()[:, 0].tolist()
        row = {"key_loss": None if loss != loss else round(loss, 5), "key_tokens": len(positions)}
        return row if found else row | {"keys": positions}
