"""Loss on the last tokens of every document with more and more text before them, and by position in the longest window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..corpus import Corpus, Document
from ..measures.losses import loss_by_position, token_losses
from ..readings import BIN, LOSS, Interval, Readings, over
from ..report import Section, Table, by_length
from ..report.figures import NATS, curves, pair, trained_mark
from ..rows import Row
from ..settings import UNMODIFIED, Setting
from ..statistics import mean_of
from ..verdict import signed
from .documents import OnDocuments

AS_ABOVE = "As under “Loss by length”."


class Loss(OnDocuments):
    """Mean loss on a document's last tokens; in the longest window, if it is read whole, also by position, in bins."""

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        shortest, targets = corpus.options.lengths[0], corpus.options.targets
        if targets >= shortest:
            way = f"lower targets (--targets {shortest // 2}) or raise lengths" if shortest > 1 else "raise lengths"
            raise ValueError(f"{targets} targets do not fit into {shortest} tokens: {way}")

    def measure(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        corpus, targets, ids = self.corpus, self.options.targets, self.corpus.context(document, length).to(model.device)
        longest = self.options.prefix is None and length == corpus.longest
        prefix = corpus.prefixes.of(setting, document, length, model)
        losses = token_losses(model, ids, last=None if longest else targets, prefix=prefix)
        row: Row = {"loss": round(float(losses[:, -targets:].mean()), 5)}
        if longest:
            bins = loss_by_position(losses, [*range(0, length, BIN), length])
            row["bins"] = [round(b, 5) for b in bins]
        return row

    @staticmethod
    def format_row(row: Row) -> str:
        return f"{row['loss']:.3f} nats"

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        """Losses by length, what is lost within the trained length, and losses by position."""
        binned = any(results.bins(s) for s in results.settings)
        return [_by_length(results), _short(results), *([_by_position(results)] if binned else [])]


def _protocol(results: Readings) -> str:
    bos = "with a beginning-of-text token first" if results.protocol.get("bos") else "without a beginning-of-text token"
    targets, prefix = (results.protocol.get(name) for name in ("targets", "prefix"))
    if prefix is None:
        how = (
            f"Fixed windows, one forward pass each without a cache, {bos}. The same last {targets} tokens of each "
            "document are scored at every length; only how much of the text before them is read differs. "
        )
    else:
        how = (
            f"Of each document the first tokens are read, {bos}, and the last {targets} of them are scored: other "
            "words at every length, so compare settings and not lengths. The text before them is read once under "
            f"{prefix}, and settings that differ in positions and length temperatures alone read on over the same KV "
            "cache: what they do to the text before is left out. Other weights, rope and logit maps read it themselves. "
        )
    read = results.documents
    return how + (
        f"{len(read)} document{'s' * (len(read) != 1)}: {'; '.join(read)}. Intervals are "
        "95 % t intervals of the mean over documents, of differences paired by document; with one document there is none. "
        "Perplexity is the exponential of the mean loss."
    )


def _left_out(results: Readings) -> str:
    """Told where means are over fewer documents than some settings have read."""
    for n in results.lengths:
        counts = [len(found) for s in results.settings if (found := results.losses(s, n))]
        if len(set(counts)) > 1:
            return f"Not all settings are done: means at {n:,} are over the documents that all of these have read."
    return ""


def _by_length(results: Readings) -> Section:
    whole = results.protocol.get("prefix") is None
    mean = {(s, n): mean_of(results.of_all(n, results.losses(s, n))) for s in results.settings for n in results.lengths}
    tokens = "the same tokens" if whole else f"the last {results.protocol.get('targets')} tokens"
    title = f"Mean loss of {tokens}, nats, by context length"
    losses, perplexities = with_exponentials(mean, results, title, f"Perplexity of {tokens}", _left_out(results))
    tables = [losses, differences(results, results.lengths, results.difference), perplexities]
    lines = {s: [(n, m) for n in results.lengths if (m := mean[s, n]) is not None] for s in results.settings}
    figures = []
    if len(results.lengths) > 1 and whole:  # with a prefix, lengths are of other words: no line through them
        heading, mark = f"Loss of {tokens} by context length", _mark(results)
        figures = pair(
            lambda limits: curves(lines, "context (tokens, log scale)", NATS, heading, mark, log_x=True, limits=limits),
            [y for p in lines.values() for _, y in p],
            "loss-by-length",
            f"Mean loss of {tokens} against the length of context, one line a setting",
        )
    return Section("Loss by length", "", tables, figures, _protocol(results), results.command(LOSS))


def _short(results: Readings) -> Section:
    within, trained = results.within, results.train_length
    length = "not known from its config" if trained is None else f"{trained:,} tokens"
    binned = any(results.bins(s) for s in results.settings)
    by_what = "By length: the same tokens with shorter context. By position: all tokens there, in the longest window."
    buckets = [(a, b) for a, b in _buckets(results) if binned and (trained is None or b <= trained)]
    columns = ["setting", *(f"length {n:,}" for n in within), *(f"positions {a:,}–{b:,}" for a, b in buckets)]
    rows = [
        [
            s,
            *(d[0] if (d := results.difference(s, n)) else None for n in within),
            *(results.bucket_difference(s, a, b) for a, b in buckets),
        ]
        for s in results.settings
        if s != UNMODIFIED
    ]
    text = (
        f"What a setting costs on texts that the model could read before: loss minus the unmodified model's, within the "
        f"trained length ({length}). Above zero is harm. {by_what if binned else ''}"
    )
    table = Table("Short-context regression, nats per token", columns, rows)
    return Section("Within the trained length", text, [table], (), AS_ABOVE, results.command(LOSS))


def _buckets(results: Readings) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *(n for n in results.lengths if n % BIN == 0 or n == results.lengths[-1])]))


def _by_position(results: Readings) -> Section:
    buckets, longest, mark = _buckets(results), results.lengths[-1], _mark(results)
    columns = ["setting", *(f"{a:,}–{b:,}" for a, b in buckets)]
    rows = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for s in results.settings:
        bins = results.of_all(longest, results.bins(s))
        rows.append([s, *(mean_of([over(b, x, y) for b in bins]) for x, y in buckets)])
        means = [math.fsum(column) / len(bins) for column in zip(*bins, strict=True)]
        lines[s] = [(i * BIN + BIN / 2, m) for i, m in enumerate(means)]
    title = f"Loss by position in windows of {longest:,}"
    figures = pair(
        lambda limits: curves(lines, "position (tokens)", NATS, title, mark, limits=limits),
        [y for p in lines.values() for _, y in p],
        "loss-by-position",
        "Mean loss against position in the longest window, one line a setting",
    )
    text = (
        f"One forward pass over windows of {longest:,} tokens; every token counts at its position, averaged over bins of "
        f"{BIN} tokens in the figure. Different positions are different words, so compare lines, not the ups and downs "
        "of one."
    )
    table = Table(f"Mean loss by position in windows of {longest:,}, nats", columns, rows)
    return Section("Loss by position", text, [table], figures, AS_ABOVE, results.command(LOSS))


def _mark(results: Readings) -> dict[str, float]:
    """The trained length, where some length lies beyond."""
    trained = results.train_length
    return trained_mark(trained) if trained and results.lengths[-1] > trained else {}


def with_exponentials(
    mean: dict[tuple[str, int], float | None], results: Readings, losses: str, perplexities: str, note: str = ""
) -> tuple[Table, Table]:
    """Means of losses by (setting, length), and their exponentials, under these titles."""
    settings, lengths = results.settings, sorted({n for _, n in mean})
    exponentials = {at: None if m is None else math.exp(m) for at, m in mean.items()}
    nats = by_length(losses, settings, lengths, lambda s, n: mean[s, n], note=note, brief=True)
    return nats, by_length(perplexities, settings, lengths, lambda s, n: exponentials[s, n], digits=2)


def differences(results: Readings, lengths: Sequence[int], difference: Callable[[str, int], Interval | None]) -> Table:
    """From the unmodified model, by setting and length."""
    others = [s for s in results.settings if s != UNMODIFIED]
    title = "Difference from the unmodified model, nats, ± 95 % interval"
    note = "One document, so no interval." if len(results.documents) < 2 else ""
    return by_length(title, others, lengths, lambda s, n: signed(d) if (d := difference(s, n)) else None, note=note)
