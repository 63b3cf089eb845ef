"""The rows of an evaluation as sections of a report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cells import BIN, COPIES, LONG_PPL, LOSS, ON_DOCUMENTS
from .measures.copies import PASSAGE, SKIP
from .report import Figure, Section, Table
from .report.figures import curves, heat_map, tokens_shown
from .rows import Row
from .settings import UNMODIFIED
from .statistics import mean_interval, wilson

NATS = "loss (nats per token)"
AS_ABOVE = "As under “Loss by length”."
#: Nats per token that a setting may cost within the trained length and still come first, as `hf-longattn extend` has it.
TOLERANCE = 0.02

#: A mean over documents and the half-width of its interval.
Interval = tuple[float, float]
#: From a setting to its values by document.
Measured = Callable[[str], Mapping[str, float]]


@dataclass(frozen=True)
class Results:
    """Finished rows, and what is needed to read them.

    Args:
        settings: names, in the order of tables and curves.
        targets, bos, prefix: of the protocol.
        near, evaluator: of `long_ppl`.
        keep: the share of its score near that a task may not fall below, for effective lengths.
    """

    rows: Sequence[Row]
    settings: Sequence[str]
    targets: int
    bos: bool
    train_length: int | None
    prefix: str | None = None
    near: int = 4096
    evaluator: str = UNMODIFIED
    keep: float = 0.85
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", sorted({r["length"] for r in self.rows if r["task"] == LOSS}))

    # losses ----------------------------------------------------------------------------------------------------------

    def losses(self, setting: str, length: int) -> dict[str, float]:
        """By document."""
        return {r["which"]: r["loss"] for r in self._rows(setting, LOSS, length)}

    def bins(self, setting: str) -> dict[str, list[float]]:
        """By document, from the longest window."""
        return {r["which"]: r["bins"] for r in self._rows(setting, LOSS) if "bins" in r}

    def _rows(self, setting: str, task: str, length: int | None = None) -> Iterable[Row]:
        return (r for r in self.rows if r["setting"] == setting and r["task"] == task and length in (None, r["length"]))

    def _of_all(self, length: int, by_document: Mapping[str, Any]) -> list[Any]:
        """Those of the documents that every setting has read at a length: after an interruption some have read fewer."""
        common = self._common(LOSS, length)
        return [value for document, value in by_document.items() if document in common]

    def _common(self, task: str, length: int) -> set[str]:
        read = [found for s in self.settings if (found := {r["which"] for r in self._rows(s, task, length)})]
        return set.intersection(*read) if read else set()

    def _paired(self, task: str, setting: str, length: int, measured: Measured) -> Interval | None:
        """Of a setting minus the unmodified model, over the documents or samples that every setting has read."""
        mine, base = measured(setting), measured(UNMODIFIED)
        differences = [mine[d] - base[d] for d in mine if d in base and d in self._common(task, length)]
        return mean_interval(differences) if differences else None

    def _left_out(self) -> str:
        """Told where means are over fewer documents than some settings have read."""
        for n in self.lengths:
            counts = [len(found) for s in self.settings if (found := self.losses(s, n))]
            if len(set(counts)) > 1:
                return f"Not all settings are done: means at {n:,} are over the documents that all of these have read."
        return ""

    def difference(self, setting: str, length: int) -> Interval | None:
        """Mean over common documents of this setting's loss minus the unmodified model's, and its interval's half-width."""
        return self._paired(LOSS, setting, length, lambda s: self.losses(s, length))

    def answers(self, setting: str, task: str, length: int) -> dict[str, float]:
        """Loss on the answers of a task, nats per token, by document or sample."""
        rows = ((r["which"], r["answers"]) for r in self._rows(setting, task, length))
        return {which: -math.fsum(a["log_likelihood"] / a["tokens"] for a in found) / len(found) for which, found in rows}

    def _equal(self, setting: str) -> bool:
        """Whether a setting's losses are the unmodified model's, to the digits that are shown: mostly so by design."""
        pairs = [(x, self.losses(UNMODIFIED, n).get(d, x)) for n in self.lengths for d, x in self.losses(setting, n).items()]
        return all(abs(mine - base) < 0.0005 for mine, base in pairs)

    def bucket_difference(self, setting: str, first: int, last: int) -> float | None:
        mine, base = self.bins(setting), self.bins(UNMODIFIED)
        common = [over(mine[d], first, last) - over(base[d], first, last) for d in mine if d in base]
        return mean_interval(common)[0] if common else None

    @property
    def documents(self) -> list[str]:
        return list(dict.fromkeys(r["which"] for r in self.rows if r["task"] in (LOSS, LONG_PPL)))

    def command(self, *tasks: str) -> str:
        """What made the rows of these tasks; of all, if none is named."""
        return "\n".join(dict.fromkeys(r.get("command", "") for r in self.rows if not tasks or r["task"] in tasks)).strip()

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(r["task"] for r in self.rows if r["task"] not in (LOSS, LONG_PPL)))

    # the page --------------------------------------------------------------------------------------------------------

    @property
    def within(self) -> list[int]:
        """The lengths that do not go beyond the trained one; all, if that is not known."""
        return [n for n in self.lengths if self.train_length is None or n <= self.train_length]

    def summary(self) -> str:
        """Whether something helps at the longest length, and what it costs within the trained one."""
        if not self.lengths:
            return "No losses were measured; what each setting costs on short text is not known from this page."
        longest, others = self.lengths[-1], [s for s in self.settings if s != UNMODIFIED]
        result = {s: d for s in others if (d := self.difference(s, longest))}
        sentences = []
        if not result:
            sentences.append(f"Only the unmodified model has been measured at {longest:,} tokens yet.")
        else:
            same = [s for s in result if self._equal(s)]
            changed = [s for s in result if s not in same]
            if changed:
                best = min(changed, key=lambda s: result[s][0])
                against = f"{best}, {_signed(result[best])} nats per token against the unmodified model"
                sentences.append(
                    f"At {longest:,} tokens the lowest loss is that of {against}."
                    if result[best][0] < 0
                    else f"At {longest:,} tokens no setting has a lower loss than the unmodified model; nearest is {against}."
                )
            if same:
                sentences.append(
                    f"Equal to the unmodified model in every loss: {', '.join(same)}. Clamped temperatures, windows and "
                    "position remaps change nothing at the lengths that they leave alone."
                )
        costs = {s: (d, n) for s in others for n in self.within if (d := self.difference(s, n))}  # the longest there is
        if costs:
            message = "; ".join(f"{s} {_signed(d)} at {n:,}" for s, (d, n) in costs.items())
            sentences.append(f"Within the trained length the loss changes by: {message} tokens.")
        return " ".join(sentences)

    def complete(self) -> Results:
        """The settings that have read every document at every length, where these are some and not all."""
        read = {s: {(r["task"], r["length"], r["which"]) for r in self._rows_of_documents(s)} for s in self.settings}
        full = [s for s in self.settings if read[s] == set.union(*read.values())]
        if UNMODIFIED not in full or not 1 < len(full) < len(self.settings):
            return self
        return dataclasses.replace(self, rows=[r for r in self.rows if r["setting"] in full], settings=full)

    def _rows_of_documents(self, setting: str) -> Iterable[Row]:
        return (r for r in self.rows if r["setting"] == setting and r["task"] in ON_DOCUMENTS)

    def _of_fewer(self) -> Table:
        """The verdict over the documents that all settings have read."""
        read = [{r["which"] for r in self._rows_of_documents(s)} for s in self.settings]
        common = set.intersection(*(found for found in read if found))
        result = dataclasses.replace(self, rows=[r for r in self.rows if r["which"] in common])
        title = f"All settings, on {' and '.join(d for d in self.documents if d in common)} alone"
        return dataclasses.replace(result._verdict().tables[0], title=title)

    def headline(self) -> str:
        """Which setting to take, with its price; the summary where none is better than the unmodified model."""
        if (whole := self.complete()) is not self:
            return whole.headline()
        first, *others = self._ranked() or [UNMODIFIED]
        if first == UNMODIFIED:
            return self.summary()
        told = [f"{text} {_signed(found)}" for text, _, found in self._judged(first) if found]
        after = f" Next: {others[0]}." if others[:1] not in ([], [UNMODIFIED]) else ""
        return f"Take {first}. In nats per token, against the unmodified model: {'; '.join(told)}.{after}"

    def _judged(self, setting: str) -> list[tuple[str, int, Interval | None]]:
        """What the verdict is about: its name, the sign of what is good, and the difference from the unmodified model."""
        out: list[tuple[str, int, Interval | None]] = []
        if self.within:
            out.append((f"cost at {self.within[-1]:,}", -1, self.difference(setting, self.within[-1])))
        if self.lengths and self.lengths[-1] not in self.within:
            out.append((f"gain at {self.lengths[-1]:,}", 1, _negative(self.difference(setting, self.lengths[-1]))))
        for task in self.tasks:
            n = max(r["length"] for r in self.rows if r["task"] == task)
            found = self._paired(task, setting, n, functools.partial(self.answers, task=task, length=n))
            out.append((f"{_title(task).lower()}: gain at {n:,}", 1, _negative(found)))
        return out

    def _ranked(self) -> list[str]:
        """The settings that are measured in all that the verdict is about, best first.

        First what gains and costs at most TOLERANCE within the trained length, then what gains more than it costs, then the
        unmodified model, then the others; the mean of the gains decides, or the cost where nothing else was measured.
        """

        def place(setting: str) -> tuple[int, float]:
            means = [(sign, found[0]) for _, sign, found in judged[setting] if found]
            cost = math.fsum(mean for sign, mean in means if sign < 0)
            gains = [mean for sign, mean in means if sign > 0]
            gain = math.fsum(gains) / len(gains) if gains else -cost
            if setting == UNMODIFIED:
                return 2, 0.0
            return (3 if gain <= max(cost, 0.0) else int(cost > TOLERANCE)), -gain

        judged = {s: self._judged(s) for s in self.settings}
        whole = [s for s in self.settings if judged[s] and all(found for _, _, found in judged[s])]
        return sorted(whole, key=place)

    def _verdict(self) -> Section:
        heads = [text for text, _, _ in self._judged(UNMODIFIED)]
        rows, tones = [], []
        for s in self._ranked():
            judged = self._judged(s)
            rows.append([s, *("0" if s == UNMODIFIED else _signed(found) for _, _, found in judged if found)])
            tones.append([0, *(_tone(sign, found) for _, sign, found in judged if found)])
        open_ = [s for s in self.settings if s not in [row[0] for row in rows]]
        text = (
            "Differences from the unmodified model in nats per token, paired by document, ± 95 % interval. A cost above zero "
            f"is harm, a gain above zero is good. First comes what gains and costs at most {TOLERANCE}, then what gains more "
            "than it costs, each by the mean of its gains. Neighbours may differ by chance alone."
        )
        note = f"Blue is better and orange worse, by more than chance and by more than {TOLERANCE}."
        note += f" Not measured in full yet: {', '.join(open_)}." if open_ else ""
        return Section("Verdict", text, [Table("Best first", ["setting", *heads], rows, note=note, tones=tones)])

    def sections(self) -> list[tuple[int, Section]]:
        """Each with its order; of settings that have read fewer documents than the others only what they have in common."""
        if (whole := self.complete()) is not self:
            (order, verdict), *others = whole.sections()
            return [(order, dataclasses.replace(verdict, tables=[*verdict.tables, self._of_fewer()])), *others]
        out = []
        if len(self._ranked()) > 1:
            out.append((5, self._verdict()))
        if self.lengths:
            out += [(10, self._by_length()), (11, self._short())]
        if any(self.bins(s) for s in self.settings):
            out.append((12, self._by_position()))
        if any(r["task"] == LONG_PPL for r in self.rows):
            out.append((15, self._long_ppl()))
        out += [(20 + i, self._task(name)) for i, name in enumerate(self.tasks)]
        several = len({r["length"] for r in self.rows if r["task"] in self.tasks}) > 1
        return out + ([(40, self._effective())] if several else [])

    def _protocol(self) -> str:
        bos = "with a beginning-of-text token first" if self.bos else "without a beginning-of-text token"
        if self.prefix is None:
            how = (
                f"Fixed windows, one forward pass each without a cache, {bos}. The same last {self.targets} tokens of each "
                "document are scored at every length; only how much of the text before them is read differs. "
            )
        else:
            how = (
                f"Of each document the first tokens are read, {bos}, and the last {self.targets} of them are scored: other "
                "words at every length, so compare settings and not lengths. The text before them is read once under "
                f"{self.prefix}, and settings that differ in positions and length temperatures alone read on over the same KV "
                "cache: what they do to the text before is left out. Other weights, rope and logit maps read it themselves. "
            )
        return how + (
            f"{len(self.documents)} document{'s' * (len(self.documents) != 1)}: {'; '.join(self.documents)}. Intervals are "
            "95 % t intervals of the mean over documents, of differences paired by document; with one document there is none. "
            "Perplexity is the exponential of the mean loss."
        )

    def _by_length(self) -> Section:
        columns = ["setting", *(f"{n:,}" for n in self.lengths)]
        mean = {(s, n): _mean(self._of_all(n, self.losses(s, n))) for s in self.settings for n in self.lengths}
        losses = [[s, *(mean[s, n] for n in self.lengths)] for s in self.settings]
        perplexities = [
            [s, *(None if (m := mean[s, n]) is None else math.exp(m) for n in self.lengths)] for s in self.settings
        ]
        against = [
            [s, *(_signed(d) if (d := self.difference(s, n)) else None for n in self.lengths)]
            for s in self.settings
            if s != UNMODIFIED
        ]
        note = self._left_out()
        tokens = "the same tokens" if self.prefix is None else f"the last {self.targets} tokens"
        tables = [
            Table(f"Mean loss of {tokens}, nats, by context length", columns, losses, note=note),
            Table("Difference from the unmodified model, nats, ± 95 % interval", columns, against, note=_note(self.documents)),
            Table(f"Perplexity of {tokens}", columns, perplexities, digits=2),
        ]
        lines = {s: [(n, m) for n in self.lengths if (m := mean[s, n]) is not None] for s in self.settings}
        figures = []
        if len(self.lengths) > 1 and self.prefix is None:  # with one, lengths are of other words: no line through them
            figures = _pair(
                lambda limits: curves(
                    lines,
                    "context (tokens, log scale)",
                    NATS,
                    f"Loss of {tokens} by context length",
                    self._mark(self.lengths),
                    log_x=True,
                    limits=limits,
                ),
                [y for p in lines.values() for _, y in p],
                "loss-by-length",
                f"Mean loss of {tokens} against the length of context, one line a setting",
            )
        return Section("Loss by length", "", tables, figures, self._protocol(), self.command(LOSS))

    def _short(self) -> Section:
        within, trained = self.within, self.train_length
        length = "not known from its config" if trained is None else f"{trained:,} tokens"
        binned = any(self.bins(s) for s in self.settings)
        by_what = "By length: the same tokens with shorter context. By position: all tokens there, in the longest window."
        buckets = [(a, b) for a, b in self._buckets() if binned and (trained is None or b <= trained)]
        columns = ["setting", *(f"length {n:,}" for n in within), *(f"positions {a:,}–{b:,}" for a, b in buckets)]
        rows = [
            [
                s,
                *(d[0] if (d := self.difference(s, n)) else None for n in within),
                *(self.bucket_difference(s, a, b) for a, b in buckets),
            ]
            for s in self.settings
            if s != UNMODIFIED
        ]
        text = (
            f"What a setting costs on texts that the model could read before: loss minus the unmodified model's, within the "
            f"trained length ({length}). Above zero is harm. {by_what if binned else ''}"
        )
        table = Table("Short-context regression, nats per token", columns, rows)
        return Section("Within the trained length", text, [table], (), AS_ABOVE, self.command(LOSS))

    def _buckets(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise([0, *(n for n in self.lengths if n % BIN == 0 or n == self.lengths[-1])]))

    def _by_position(self) -> Section:
        buckets, longest = self._buckets(), self.lengths[-1]
        columns = ["setting", *(f"{a:,}–{b:,}" for a, b in buckets)]
        rows = []
        lines: dict[str, list[tuple[float, float]]] = {}
        for s in self.settings:
            bins = self._of_all(longest, self.bins(s))
            rows.append([s, *(_mean([over(b, x, y) for b in bins]) for x, y in buckets)])
            means = [math.fsum(column) / len(bins) for column in zip(*bins, strict=True)]
            lines[s] = [(i * BIN + BIN / 2, m) for i, m in enumerate(means)]
        figures = _pair(
            lambda limits: curves(
                lines, "position (tokens)", NATS, f"Loss by position in windows of {longest:,}", self._mark(), limits=limits
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
        return Section("Loss by position", text, [table], figures, AS_ABOVE, self.command(LOSS))

    def _mark(self, lengths: Sequence[int] = ()) -> dict[str, float]:
        beyond = self.train_length is not None and self.lengths[-1] > self.train_length
        return {f"trained: {tokens_shown(self.train_length)}": self.train_length} if beyond and self.train_length else {}

    def _task(self, name: str) -> Section:
        lengths = sorted({r["length"] for r in self.rows if r["task"] == name})
        columns = ["setting", *(f"{n:,}" for n in lengths)]
        accuracy, intervals, likelihood = [], [], []
        for s in self.settings:
            cells = [[a for r in self._rows(s, name, n) for a in r["answers"]] for n in lengths]
            accuracy.append([s, *(_mean([float(a["exact"]) for a in c]) for c in cells)])
            intervals.append([s, *(_share([a["exact"] for a in c]) for c in cells)])
            likelihood.append([s, *(_mean([a["log_likelihood"] / a["tokens"] for a in c]) for c in cells)])
        counts = sorted({len({r["which"] for r in self._rows(s, name, n)}) for s in self.settings for n in lengths} - {0})
        tables = [
            Table("Accuracy", columns, accuracy, digits=2, shade=(0.0, 1.0)),
            Table("Accuracy with its 95 % Wilson interval", columns, intervals),
            Table("Log-likelihood of the answer, nats per token (0 is certain)", columns, likelihood),
        ]
        if name == COPIES:
            return self._copies(lengths)
        if not any(a["exact"] for r in self.rows if r["task"] == name for a in r["answers"]):
            tables = [Table(t.title, t.columns, t.rows, note="No answer is right under any setting.") for t in tables[2:]]
        return Section(
            _title(name),
            "An answer is right if every token of it is the most likely one, given the true tokens before it. The log-"
            "likelihood still moves where a small model is never right.",
            tables,
            self._maps(name, lengths) if name in ("needle", "needles") else (),
            f"Task {name} of hf_longattn.tasks at each length, {' or '.join(map(str, counts))} texts per setting and length, "
            "the same texts for every setting; one forward pass over text and answer.",
            self.command(name),
        )

    def _copies(self, lengths: Sequence[int]) -> Section:
        tables = []
        for n in lengths:
            distances: list[int] = next((r["distances"] for r in self.rows if r["task"] == COPIES and r["length"] == n), [])
            order = sorted(range(len(distances)), key=lambda i: distances[i])
            rows: list[list[str | float | None]] = []
            for s in self.settings:
                found = [r["answers"] for r in self._rows(s, COPIES, n) if r["which"] in self._common(COPIES, n)]
                losses = [_mean([-f[i]["log_likelihood"] / f[i]["tokens"] for f in found]) for i in order]
                rows.append([s, *losses, _mean([x for x in losses if x is not None])])
            columns = ["setting", *(f"{distances[i]:,} back" for i in order), "all"]
            tables.append(Table(f"Loss on copies at {n:,} tokens, nats", columns, rows, digits=2))
            lines = {
                str(s): [(distances[i], x) for i, x in zip(order, losses, strict=True) if isinstance(x, float)]
                for s, *losses, _ in rows
            }
        figures = _pair(
            lambda limits: curves(
                lines, "how far back (tokens)", NATS, tables[-1].title.removesuffix(", nats"), limits=limits
            ),
            [y for points in lines.values() for _, y in points],
            "copies-by-distance",
            "Mean loss on copies against how far back their first reading is, one line a setting",
        )
        return Section(
            _title(COPIES),
            f"The last tokens of a text repeat passages of {PASSAGE} tokens from far back. A model that reaches the first "
            f"reading predicts the second nearly free; the first {SKIP} tokens of each do not count.",
            tables,
            figures,
            AS_ABOVE,
            self.command(COPIES),
        )

    def _long_ppl(self) -> Section:
        lengths = sorted({r["length"] for r in self.rows if r["task"] == LONG_PPL})
        columns = ["setting", *(f"{n:,}" for n in lengths)]
        found = {(s, n): {r["which"]: r for r in self._rows(s, LONG_PPL, n)} for s in self.settings for n in lengths}
        for n in lengths:  # after an interruption some have read fewer
            common = set.intersection(*(set(found[s, n]) for s in self.settings if found[s, n]))
            for s in self.settings:
                found[s, n] = {d: r for d, r in found[s, n].items() if d in common and r["key_tokens"]}
        losses = {at: _pooled(rows.values()) for at, rows in found.items()}
        rows = [[s, *(losses[s, n] for n in lengths)] for s in self.settings]
        perplexities = [[s, *(None if (x := losses[s, n]) is None else math.exp(x) for n in lengths)] for s in self.settings]
        against = []
        for s in self.settings:
            cells: list[str | None] = []
            for n in lengths:
                base = found[UNMODIFIED, n]
                paired = [r["key_loss"] - base[d]["key_loss"] for d, r in found[s, n].items() if d in base]
                cells.append(_signed(mean_interval(paired)) if paired else None)
            if s != UNMODIFIED:
                against.append([s, *cells])
        counts = [sum(r["key_tokens"] for r in found[self.evaluator, n].values()) for n in lengths]
        tables = [
            Table("LongPPL: perplexity of the key tokens", columns, perplexities, digits=2),
            Table("Mean loss of the key tokens, nats", columns, rows),
            Table("Difference from the unmodified model, nats, ± 95 % interval", columns, against, note=_note(self.documents)),
            Table("Key tokens", columns, [["all documents", *counts]]),
        ]
        text = (
            f"Most tokens are predicted as well from the last {self.near:,} tokens as from the whole text. The key tokens are "
            "the others: far context lowers their loss by more than 2 nats, to less than 2 nats. Lengths have key tokens of "
            "their own: compare settings, not columns."
        )
        protocol = (
            f"Key tokens are found by “{self.evaluator}”, the same for every setting: their loss with the whole text before "
            f"them against that with the last {self.near:,} tokens or up to a quarter more (Fang et al. 2024). Means "
            "over all key tokens, intervals over documents."
        )
        return Section("LongPPL", text, tables, (), protocol, self.command(LONG_PPL))

    def score(self, setting: str, task: str, length: int) -> float | None:
        """The probability of an answer's token, its geometric mean over all answers of a task at a length."""
        found = [a for r in self._rows(setting, task, length) for a in r["answers"]]
        mean = _mean([a["log_likelihood"] / a["tokens"] for a in found])
        return None if mean is None else math.exp(mean)

    def effective_length(self, setting: str, task: str) -> int | None:
        """The longest measured length up to which a task keeps the share `keep` of the unmodified model's score at the
        shortest length; 0 if already the shortest does not, None if there is nothing to compare with."""
        lengths = sorted({r["length"] for r in self.rows if r["task"] == task})
        near = self.score(UNMODIFIED, task, lengths[0]) if lengths else None
        if near is None or self.score(setting, task, lengths[0]) is None:
            return None
        kept = 0
        for length in lengths:
            score = self.score(setting, task, length)
            if score is None or score < self.keep * near:
                break
            kept = length
        return kept

    def _effective(self) -> Section:
        rows: list[list[Any]] = []
        for s in self.settings:
            found = [self.effective_length(s, task) for task in self.tasks]
            known = [n for n in found if n is not None]
            rows.append([s, *found, *([min(known) if len(known) == len(found) else None] if len(found) > 1 else [])])
        measured = {task: sorted({r["length"] for r in self.rows if r["task"] == task}) for task in self.tasks}
        near = ", ".join(
            f"{_title(task)} {x:.3f} at {measured[task][0]:,}"
            for task in self.tasks
            if (x := self.score(UNMODIFIED, task, measured[task][0])) is not None
        )
        text = (
            f"The longest measured length up to which a setting keeps {self.keep:.0%} of the unmodified model's score at the "
            f"shortest length. The score is the probability of an answer's token (geometric mean over the answers): {near}. "
            "0: not even at the shortest. The longest length that was measured means that or more."
        )
        columns = ["setting", *(_title(task) for task in self.tasks), *(["all of them"] if len(self.tasks) > 1 else [])]
        lengths = "; ".join(f"{_title(t)}: {', '.join(f'{n:,}' for n in ns)}" for t, ns in measured.items())
        table = Table("Effective length, tokens", columns, rows, note=f"Measured at {lengths}.")
        return Section("Effective length", text, [table], (), "As under each task.", self.command(*self.tasks))

    def _maps(self, name: str, lengths: Sequence[int]) -> list[Figure]:
        """Of each setting accuracy and log-likelihood by length and depth."""
        bands = [f"{20 * i}–{20 * i + 20} %" for i in range(5)] if name == "needles" else None
        depths = sorted({round(a["depth"], 2) for r in self.rows if r["task"] == name for a in r["answers"]})
        labels = bands or [f"{100 * d:.0f} %" for d in depths]

        def row_of(depth: float) -> int:
            return min(int(depth * 5), 4) if bands else depths.index(round(depth, 2))

        figures, grids = [], {}
        for s in self.settings:
            cells: dict[tuple[int, int], list[Mapping[str, float]]] = {}
            for r in self._rows(s, name):
                for a in r["answers"]:
                    cells.setdefault((row_of(a["depth"]), lengths.index(r["length"])), []).append(a)
            if cells:
                grids[s] = cells
        worst = min((a["log_likelihood"] / a["tokens"] for g in grids.values() for c in g.values() for a in c), default=-1.0)
        scale = math.floor(worst) if worst < 0 else -1.0
        right = any(a["exact"] for g in grids.values() for c in g.values() for a in c)
        for i, (s, cells) in enumerate(grids.items()):
            shapes = (range(len(labels)), range(len(lengths)))
            for kind, value, limits, unit in (
                ("accuracy", lambda a: float(a["exact"]), (0.0, 1.0), "share of answers right"),
                ("log-likelihood", lambda a: a["log_likelihood"] / a["tokens"], (float(scale), 0.0), "nats per answer token"),
            ):
                if kind == "accuracy" and not right:
                    continue  # a map of zeros says no more than the table
                grid = [[_mean([value(a) for a in cells.get((y, x), [])]) for x in shapes[1]] for y in shapes[0]]
                png = heat_map(
                    grid,
                    labels,
                    [tokens_shown(n) for n in lengths],
                    "length (tokens)",
                    "depth of the needle",
                    f"{s}: {kind}",
                    limits,
                    unit,
                )
                alt = f"Heat map of {kind} by length and depth of the needle under {s}"
                figures.append(Figure(f"{name}-{i:02d}-{kind}", png, alt, f"{s}: {kind}; all maps of a kind share one scale."))
        return figures


def over(bins: Sequence[float], first: int, last: int) -> float:
    """The mean loss at positions [first, last) from bins of BIN positions, the first token left out."""
    chosen = range(first // BIN, math.ceil(last / BIN))
    weights = [min((i + 1) * BIN, last) - i * BIN - (i == 0) for i in chosen]
    return math.fsum(bins[i] * w for i, w in zip(chosen, weights, strict=True)) / sum(weights)


def _pair(draw: Callable[[tuple[float, float] | None], bytes], values: Sequence[float], name: str, alt: str) -> list[Figure]:
    """A figure with all values, and one without those far above the rest where they would flatten it."""
    if not values:
        return []
    axis = "The loss axis does not start at zero."
    figures = [Figure(name, draw(None), alt, f"{alt}. {axis}")]
    ordered = sorted(values)
    low, middle, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    if high - low > 2.5 * max(middle - low, 0.05):
        top = middle + 1.5 * max(middle - low, 0.05)
        caption = f"The same, cut at {top:.2f} nats to tell close lines apart: what rises above is off the picture. {axis}"
        figures.append(Figure(f"{name}-closer", draw((low - 0.05, top)), f"{alt}, cut at {top:.2f} nats", caption))
    return figures


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def _pooled(rows: Iterable[Row]) -> float | None:
    """The mean loss of all key tokens."""
    listed = list(rows)
    total = sum(r["key_tokens"] for r in listed)
    return math.fsum(r["key_loss"] * r["key_tokens"] for r in listed) / total if total else None


def _share(hits: Sequence[bool]) -> str | None:
    if not hits:
        return None
    low, high = wilson(sum(hits), len(hits))
    return f"{sum(hits)}/{len(hits)} ({low:.2f}–{high:.2f})"


def _negative(difference: Interval | None) -> Interval | None:
    return difference and (-difference[0], difference[1])


def _tone(sign: int, difference: Interval) -> int:
    """1 for better and -1 for worse than the unmodified model; 0 for less than chance (if that is known) or TOLERANCE."""
    mean, half = difference
    told = abs(mean) > TOLERANCE and not abs(mean) <= half
    return told * (1 if mean * sign > 0 else -1)


def _signed(difference: Interval) -> str:
    mean, half = difference
    text = f"{mean:+.3f}".replace("-", "−")
    return text if math.isnan(half) else f"{text} ± {half:.3f}"


def _note(documents: Sequence[str]) -> str:
    return "One document, so no interval." if len(documents) < 2 else ""


def _title(task: str) -> str:
    titles = {
        "needle": "Needle by length and depth",
        "needles": "Three needles",
        "passkey": "Pass key",
        COPIES: "Copies from far back",
    }
    return titles.get(task, task.replace("_", " ").capitalize())
