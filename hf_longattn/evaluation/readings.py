"""The rows of an evaluation, read: losses, answers and differences from the unmodified model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .rows import Row
from .settings import UNMODIFIED
from .statistics import mean_interval, mean_of

LOSS, COPIES, LONG_PPL, PROBE = "loss", "copies", "long_ppl", "probe"
#: Positions over which losses are averaged before they are stored.
BIN = 512

#: A mean over documents and the half-width of its interval.
Interval = tuple[float, float]
#: From a setting to its values by document.
Measured = Callable[[str], Mapping[str, float]]


@dataclass(frozen=True)
class Readings:
    """Finished rows, and what is needed to read them.

    Args:
        settings: names, in the order of tables and curves.
        protocol: what all rows share.
        keep: the share of its score near that a task may not fall below, for effective lengths.
        facts: what stands at the end of the page.
        own: the method that the model runs by itself.
        others: settings of earlier commands, whose rows are in the same file and not among these.
    """

    rows: Sequence[Row]
    settings: Sequence[str]
    train_length: int | None = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    keep: float = 0.85
    facts: Mapping[str, str] = field(default_factory=dict)
    own: str | None = None
    others: Sequence[str] = ()

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The lengths at which losses were measured."""
        return self.lengths_of(LOSS)

    def settings_of(self, task: str) -> list[str]:
        """The settings under which a task was measured."""
        return [s for s in self.settings if any(self.of(s, task))]

    def lengths_of(self, task: str) -> list[int]:
        return sorted({r["length"] for r in self.rows if r["task"] == task})

    def losses(self, setting: str, length: int) -> dict[str, float]:
        """By document."""
        return {r["which"]: r["loss"] for r in self.of(setting, LOSS, length)}

    def bins(self, setting: str) -> dict[str, list[float]]:
        """By document, from the longest window."""
        return {r["which"]: r["bins"] for r in self.of(setting, LOSS) if "bins" in r}

    def of(self, setting: str, task: str, length: int | None = None) -> Iterable[Row]:
        return (r for r in self.rows if r["setting"] == setting and r["task"] == task and length in (None, r["length"]))

    def of_all(self, length: int, by_document: Mapping[str, Any]) -> list[Any]:
        """Return the rows of documents that every setting has read at a length: after an interruption some have read fewer."""
        common = self.common(LOSS, length)
        return [value for document, value in by_document.items() if document in common]

    def common(self, task: str, length: int) -> set[str]:
        read = [found for s in self.settings if (found := {r["which"] for r in self.of(s, task, length)})]
        return set.intersection(*read) if read else set()

    def paired(self, task: str, setting: str, length: int, measured: Measured, base: str = UNMODIFIED) -> Interval | None:
        """Return the paired difference, setting minus base, over what every setting has read."""
        mine, its, common = measured(setting), measured(base), self.common(task, length)
        differences = [mine[d] - its[d] for d in mine if d in its and d in common]
        return mean_interval(differences) if differences else None

    def difference(self, setting: str, length: int, base: str = UNMODIFIED) -> Interval | None:
        """Mean over common documents of this setting's loss minus another's, and its interval's half-width."""
        return self.paired(LOSS, setting, length, lambda s: self.losses(s, length), base)

    def probe_difference(self, setting: str, part: str, distance: int) -> Interval | None:
        """Mean over passages of a setting's loss minus the unmodified model's, and its interval's half-width.

        Args:
            part: "copy" or "text", see `tasks.probe.PARTS`.
        """
        mine, base = ([x for r in self.of(s, PROBE, distance) for x in r[part]] for s in (setting, UNMODIFIED))
        return mean_interval([a - b for a, b in zip(mine, base, strict=True)]) if mine and base else None

    def answers(self, setting: str, task: str, length: int) -> dict[str, float]:
        """Loss on the answers of a task, nats per token, by document or sample."""
        rows = ((r["which"], r["answers"]) for r in self.of(setting, task, length))
        return {which: -math.fsum(a["log_likelihood"] / a["tokens"] for a in found) / len(found) for which, found in rows}

    def bucket_difference(self, setting: str, first: int, last: int) -> float | None:
        mine, base = self.bins(setting), self.bins(UNMODIFIED)
        common = [over(mine[d], first, last) - over(base[d], first, last) for d in mine if d in base]
        return mean_interval(common)[0] if common else None

    @property
    def documents(self) -> list[str]:
        return list(dict.fromkeys(r["which"] for r in self.rows if r["task"] in (LOSS, LONG_PPL)))

    def command(self, *tasks: str) -> str:
        """Return the command that made the rows of these tasks; of all tasks, if none is named."""
        return "\n".join(dict.fromkeys(r.get("command", "") for r in self.rows if not tasks or r["task"] in tasks)).strip()

    @property
    def all_tasks(self) -> list[str]:
        return list(dict.fromkeys(r["task"] for r in self.rows))

    @property
    def tasks(self) -> list[str]:
        """The tasks with answers."""
        return list(dict.fromkeys(r["task"] for r in self.rows if "answers" in r))

    @property
    def within(self) -> list[int]:
        """The lengths that do not go beyond the trained one; all, if that is not known."""
        return [n for n in self.lengths if self.train_length is None or n <= self.train_length]

    def complete(self) -> Self:
        """The settings that have read every document at every length, where these are some and not all."""
        read = {s: {(r["task"], r["length"], r["which"]) for r in self.of_documents(s)} for s in self.settings}
        full = [s for s in self.settings if read[s] == set.union(*read.values())]
        if UNMODIFIED not in full or not 1 < len(full) < len(self.settings):
            return self
        return dataclasses.replace(self, rows=[r for r in self.rows if r["setting"] in full], settings=full)

    def of_documents(self, setting: str) -> Iterable[Row]:
        return (r for r in self.rows if r["setting"] == setting and r["task"] in (LOSS, COPIES, LONG_PPL))

    def score(self, setting: str, task: str, length: int) -> float | None:
        """The probability of an answer's token, its geometric mean over all answers of a task at a length."""
        found = [a for r in self.of(setting, task, length) for a in r["answers"]]
        mean = mean_of([a["log_likelihood"] / a["tokens"] for a in found])
        return None if mean is None else math.exp(mean)

    def effective_length(self, setting: str, task: str) -> int | None:
        """The longest measured length up to which a task keeps the share `keep` of the unmodified model's score at the
        shortest length; 0 if already the shortest does not, None if there is nothing to compare with."""
        lengths = self.lengths_of(task)
        near = self.score(UNMODIFIED, task, lengths[0]) if lengths else None
        if near is None or self.score(setting, task, lengths[0]) is None:
            return None
        scores = {length: self.score(setting, task, length) for length in lengths}
        return kept_up_to(scores, self.keep * near)


def kept_up_to(scores: Mapping[int, float | None], least: float) -> int:
    """The longest length, of scores by length from the shortest on, up to which none is below `least`; 0: the first one is."""
    return max(itertools.takewhile(lambda n: (score := scores[n]) is not None and score >= least, scores), default=0)


def over(bins: Sequence[float], first: int, last: int) -> float:
    """The mean loss at positions [first, last) from bins of BIN positions, the first token left out."""
    chosen = range(first // BIN, math.ceil(last / BIN))
    weights = [min((i + 1) * BIN, last) - i * BIN - (i == 0) for i in chosen]
    return math.fsum(bins[i] * w for i, w in zip(chosen, weights, strict=True)) / sum(weights)
