"""The page of an evaluation: its results as sections of a report."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from ..results import BIN, LONG_PPL, LOSS, Interval, Results, over
from ..settings import UNMODIFIED
from ..statistics import TOLERANCE, mean_of
from ..verdict import judged, ranked, signed, tone
from .answers import AS_ABOVE, effective, task
from .figures import NATS, curves, pair, tokens_shown
from .section import Section, Table


def sections(results: Results) -> list[tuple[int, Section]]:
    """Each with its order; of settings that have read fewer documents than the others only what they have in common."""
    if (whole := results.complete()) is not results:
        (order, verdict), *others = sections(whole)
        return [(order, dataclasses.replace(verdict, tables=[*verdict.tables, _of_fewer(results)])), *others]
    out = []
    if len(ranked(results)) > 1:
        out.append((5, _verdict(results)))
    if results.lengths:
        out += [(10, _by_length(results)), (11, _short(results))]
    if any(results.bins(s) for s in results.settings):
        out.append((12, _by_position(results)))
    if any(r["task"] == LONG_PPL for r in results.rows):
        out.append((15, _long_ppl(results)))
    out += [(20 + i, task(results, name)) for i, name in enumerate(results.tasks)]
    several = len({r["length"] for r in results.rows if r["task"] in results.tasks}) > 1
    return out + ([(40, effective(results))] if several else [])


def _verdict(results: Results) -> Section:
    heads = [text for text, _, _ in judged(results, UNMODIFIED)]
    rows, tones = [], []
    for s in ranked(results):
        about = [(sign, found) for _, sign, found in judged(results, s) if found]
        rows.append([s, *("0" if s == UNMODIFIED else signed(found) for _, found in about)])
        tones.append([0, *(tone(sign, found) for sign, found in about)])
    open_ = [s for s in results.settings if s not in [row[0] for row in rows]]
    text = (
        "Differences from the unmodified model in nats per token, paired by document, ± 95 % interval. A cost above zero "
        f"is harm, a gain above zero is good. First comes what gains and costs at most {TOLERANCE}, then what gains more "
        "than it costs, each by the mean of its gains. Neighbours may differ by chance alone."
    )
    note = f"Blue is better and orange worse, by more than chance and by more than {TOLERANCE}."
    note += f" Not measured in full yet: {', '.join(open_)}." if open_ else ""
    return Section("Verdict", text, [Table("Best first", ["setting", *heads], rows, note=note, tones=tones)])


def _of_fewer(results: Results) -> Table:
    """The verdict over the documents that all settings have read."""
    read = [{r["which"] for r in results.of_documents(s)} for s in results.settings]
    common = set.intersection(*(found for found in read if found))
    result = dataclasses.replace(results, rows=[r for r in results.rows if r["which"] in common])
    title = f"All settings, on {' and '.join(d for d in results.documents if d in common)} alone"
    return dataclasses.replace(_verdict(result).tables[0], title=title)


def _protocol(results: Results) -> str:
    bos = "with a beginning-of-text token first" if results.bos else "without a beginning-of-text token"
    if results.prefix is None:
        how = (
            f"Fixed windows, one forward pass each without a cache, {bos}. The same last {results.targets} tokens of each "
            "document are scored at every length; only how much of the text before them is read differs. "
        )
    else:
        how = (
            f"Of each document the first tokens are read, {bos}, and the last {results.targets} of them are scored: other "
            "words at every length, so compare settings and not lengths. The text before them is read once under "
            f"{results.prefix}, and settings that differ in positions and length temperatures alone read on over the same KV "
            "cache: what they do to the text before is left out. Other weights, rope and logit maps read it themselves. "
        )
    read = results.documents
    return how + (
        f"{len(read)} document{'s' * (len(read) != 1)}: {'; '.join(read)}. Intervals are "
        "95 % t intervals of the mean over documents, of differences paired by document; with one document there is none. "
        "Perplexity is the exponential of the mean loss."
    )


def _left_out(results: Results) -> str:
    """Told where means are over fewer documents than some settings have read."""
    for n in results.lengths:
        counts = [len(found) for s in results.settings if (found := results.losses(s, n))]
        if len(set(counts)) > 1:
            return f"Not all settings are done: means at {n:,} are over the documents that all of these have read."
    return ""


def _by_length(results: Results) -> Section:
    columns = ["setting", *(f"{n:,}" for n in results.lengths)]
    mean = {(s, n): mean_of(results.of_all(n, results.losses(s, n))) for s in results.settings for n in results.lengths}
    losses = [[s, *(mean[s, n] for n in results.lengths)] for s in results.settings]
    perplexities = [
        [s, *(None if (m := mean[s, n]) is None else math.exp(m) for n in results.lengths)] for s in results.settings
    ]
    note = _left_out(results)
    tokens = "the same tokens" if results.prefix is None else f"the last {results.targets} tokens"
    tables = [
        Table(f"Mean loss of {tokens}, nats, by context length", columns, losses, note=note),
        _differences(results, results.lengths, results.difference),
        Table(f"Perplexity of {tokens}", columns, perplexities, digits=2),
    ]
    lines = {s: [(n, m) for n in results.lengths if (m := mean[s, n]) is not None] for s in results.settings}
    figures = []
    if len(results.lengths) > 1 and results.prefix is None:  # with one, lengths are of other words: no line through them
        figures = pair(
            lambda limits: curves(
                lines,
                "context (tokens, log scale)",
                NATS,
                f"Loss of {tokens} by context length",
                _mark(results, results.lengths),
                log_x=True,
                limits=limits,
            ),
            [y for p in lines.values() for _, y in p],
            "loss-by-length",
            f"Mean loss of {tokens} against the length of context, one line a setting",
        )
    return Section("Loss by length", "", tables, figures, _protocol(results), results.command(LOSS))


def _short(results: Results) -> Section:
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


def _buckets(results: Results) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *(n for n in results.lengths if n % BIN == 0 or n == results.lengths[-1])]))


def _by_position(results: Results) -> Section:
    buckets, longest = _buckets(results), results.lengths[-1]
    columns = ["setting", *(f"{a:,}–{b:,}" for a, b in buckets)]
    rows = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for s in results.settings:
        bins = results.of_all(longest, results.bins(s))
        rows.append([s, *(mean_of([over(b, x, y) for b in bins]) for x, y in buckets)])
        means = [math.fsum(column) / len(bins) for column in zip(*bins, strict=True)]
        lines[s] = [(i * BIN + BIN / 2, m) for i, m in enumerate(means)]
    figures = pair(
        lambda limits: curves(
            lines, "position (tokens)", NATS, f"Loss by position in windows of {longest:,}", _mark(results), limits=limits
        ),
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


def _mark(results: Results, lengths: Sequence[int] = ()) -> dict[str, float]:
    beyond = results.train_length is not None and results.lengths[-1] > results.train_length
    return {f"trained: {tokens_shown(results.train_length)}": results.train_length} if beyond and results.train_length else {}


def _differences(results: Results, lengths: Sequence[int], difference: Callable[[str, int], Interval | None]) -> Table:
    rows = [
        [s, *(signed(d) if (d := difference(s, n)) else None for n in lengths)] for s in results.settings if s != UNMODIFIED
    ]
    title = "Difference from the unmodified model, nats, ± 95 % interval"
    note = "One document, so no interval." if len(results.documents) < 2 else ""
    return Table(title, ["setting", *(f"{n:,}" for n in lengths)], rows, note=note)


def _long_ppl(results: Results) -> Section:
    lengths = sorted({r["length"] for r in results.rows if r["task"] == LONG_PPL})
    columns = ["setting", *(f"{n:,}" for n in lengths)]
    found = {(s, n): results.key_rows(s, n) for s in results.settings for n in lengths}
    mean = {at: mean_of(r["key_loss"] for r in rows for _ in range(r["key_tokens"])) for at, rows in found.items()}
    losses = [[s, *(mean[s, n] for n in lengths)] for s in results.settings]
    perplexities = [[s, *(None if (m := mean[s, n]) is None else math.exp(m) for n in lengths)] for s in results.settings]
    counts = [max(sum(r["key_tokens"] for r in found[s, n]) for s in results.settings) for n in lengths]

    def difference(setting: str, n: int) -> Interval | None:
        return results.paired(LONG_PPL, setting, n, lambda s: {r["which"]: r["key_loss"] for r in found[s, n]})

    tables = [
        Table("LongPPL: perplexity of the key tokens", columns, perplexities, digits=2),
        Table("Mean loss of the key tokens, nats", columns, losses),
        _differences(results, lengths, difference),
        Table("Key tokens", columns, [["all documents", *counts]]),
    ]
    text = (
        f"Most tokens are predicted as well from the last {results.near:,} tokens as from the whole text. The key tokens are "
        "the others: far context lowers their loss by more than 2 nats, to less than 2 nats. Lengths have key tokens of "
        "their own: compare settings, not columns."
    )
    protocol = (
        f"Key tokens are found by “{results.evaluator}”, the same for every setting: their loss with the whole text before "
        f"them against that with the last {results.near:,} tokens or up to a quarter more (Fang et al. 2024). Means "
        "over all key tokens, intervals over documents."
    )
    return Section("LongPPL", text, tables, (), protocol, results.command(LONG_PPL))
