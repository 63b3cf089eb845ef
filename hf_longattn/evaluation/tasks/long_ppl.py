"""LongPPL: perplexity on the tokens that far context helps with.

Most tokens of a long text are predicted as well from the last few thousand tokens, so their loss says nothing about far
context. Key tokens are those that it pays for: the model is surer of them with the whole text before them than with its last
`context` tokens alone, and sure of them at all.

Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?" (2024), Sections 2.3 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checkpoints import load_tokenizer
from ..corpus import Corpus, Document
from ..experiment import Cell, identity
from ..measures.losses import token_losses
from ..readings import LONG_PPL, Interval, Readings
from ..report import Section, Table
from ..rows import Row
from ..settings import Setting
from ..statistics import mean_of
from .base import Task
from .loss import differences, with_exponentials

#: By how many nats far context must help, and the loss below which a token counts as predicted, as published.
GAP, CERTAIN = 2.0, 2.0


def short_losses(model: Any, input_ids: Tensor, context: int, stride: int, start: int) -> Tensor:
    """The loss of every token given only tokens near it: at least context - stride of those before it, at most context.

    Args:
        input_ids: (batch, length).
        stride: tokens between the starts of the windows that are read, each of `context` tokens; less than context.
        start: this many first tokens, a beginning-of-text token, stand before every window.

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
        near = torch.cat([input_ids[:, :start], input_ids[:, end - context : end]], 1)
        window = token_losses(model, near, last=end - first)
        losses[:, first:end] = window[:, first - end :]
    return losses


def key_tokens(long: Tensor, short: Tensor) -> Tensor:
    """bool, like `long`: which tokens far context helps with, by their losses with and without it (nats)."""
    return (short - long > GAP) & (long < CERTAIN)


def long_loss(losses: Tensor, keys: Tensor) -> float:
    """Mean loss (nats) of the key tokens, whose exponential is LongPPL; NaN without any."""
    return float(losses[keys].mean()) if bool(keys.any()) else float("nan")


class LongPPL(Task):
    """One of the settings, the evaluator, finds the key tokens that all settings are measured at."""

    documents: ClassVar[bool] = True

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        named = {s.name: s for s in self.options.settings}
        near, longest = self.options.near, self.options.lengths[-1]
        if self.options.evaluator not in named:
            raise ValueError(f"the evaluator {self.options.evaluator!r} is none of the settings: {', '.join(named)}")
        if self.options.prefix is not None:
            raise ValueError("long_ppl reads whole documents: measure it without a prefix")
        self.evaluator, self.stride = named[self.options.evaluator], max(near // 4, 1)
        #: Tokens that are read at once for the short context; texts as short as that have no far context.
        self.window = near + self.stride
        if near < 2 or longest <= self.window:
            raise ValueError(
                f"long_ppl asks what context beyond {near} tokens helps with, and no length exceeds {self.window}: raise "
                "lengths, or lower near"
            )
        if (other := self.evaluator.model) is not None:
            text = next(iter(self.options.texts.values()))[:2000]
            if load_tokenizer(other)(text).input_ids != corpus.tokenizer(text).input_ids:
                raise ValueError(
                    f"the evaluator {self.evaluator.name!r} has another tokenizer: its tokens are not the model's"
                )

    @property
    def protocol(self) -> dict[str, Any]:
        return {"near": self.options.near, "evaluator": self.options.evaluator}

    def cells(self, setting: Setting) -> Iterator[Cell]:
        for length in (n for n in self.options.lengths if n > self.window):
            for document in self.corpus.documents:
                measure = partial(self.measure, document, length)
                depends = [document.numbers, identity(self.evaluator)]
                found = self.cell(self.evaluator, length, document.name, measure, depends)
                own = setting.name == self.evaluator.name
                yield found if own else self.cell(setting, length, document.name, measure, depends, by=found)

    def measure(self, document: Document, length: int, model: Any, found: Row | None = None) -> Row:
        """`key_loss` (nats, None without key tokens), `key_tokens`, how many there are, and of the evaluator `keys`, their
        positions.
        """
        ids = self.corpus.context(document, length).to(model.device)
        losses = token_losses(model, ids)
        if found is None:
            keys = key_tokens(losses, short_losses(model, ids, self.window, self.stride, len(self.corpus.start)))
        else:
            keys = torch.zeros_like(losses, dtype=torch.bool)
            keys[:, found["keys"]] = True
        loss, positions = long_loss(losses, keys), keys[0].nonzero()[:, 0].tolist()
        row = {"key_loss": None if loss != loss else round(loss, 5), "key_tokens": len(positions)}
        return row if found else row | {"keys": positions}

    @staticmethod
    def format_row(row: Row) -> str:
        loss = "none" if row["key_loss"] is None else f"{row['key_loss']:.3f} nats"
        return f"{row['key_tokens']} key tokens, {loss}"

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        lengths, near = results.lengths_of(name), results.protocol["near"]
        found = {(s, n): _key_rows(results, s, n) for s in results.settings for n in lengths}
        mean = {at: mean_of(r["key_loss"] for r in rows for _ in range(r["key_tokens"])) for at, rows in found.items()}
        counts = [max(sum(r["key_tokens"] for r in found[s, n]) for s in results.settings) for n in lengths]

        def difference(setting: str, n: int) -> Interval | None:
            return results.paired(name, setting, n, lambda s: {r["which"]: r["key_loss"] for r in found[s, n]})

        ppl = "LongPPL: perplexity of the key tokens"
        losses, perplexities = with_exponentials(mean, results, "Mean loss of the key tokens, nats", ppl)
        tables = [
            perplexities,
            losses,
            differences(results, lengths, difference),
            Table("Key tokens", losses.columns, [["all documents", *counts]]),
        ]
        text = (
            f"Most tokens are predicted as well from the last {near:,} tokens as from the whole text. The key tokens are "
            "the others: far context lowers their loss by more than 2 nats, to less than 2 nats. Lengths have key tokens of "
            "their own: compare settings, not columns."
        )
        protocol = (
            f"Key tokens are found by “{results.protocol['evaluator']}”, the same for every setting: their loss with the "
            f"whole text before them against that with the last {near:,} tokens or up to a quarter more (Fang et al. 2024). "
            "Means over all key tokens, intervals over documents."
        )
        return [Section("LongPPL", text, tables, (), protocol, results.command(name))]


def _key_rows(results: Readings, setting: str, length: int) -> list[Row]:
    """Return the rows of documents that have key tokens and that every setting has read."""
    common = results.common(LONG_PPL, length)
    return [r for r in results.of(setting, LONG_PPL, length) if r["which"] in common and r["key_tokens"]]
