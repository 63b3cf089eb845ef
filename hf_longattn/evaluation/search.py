"""The search behind `hf-longattn extend`: candidates are probed, the best read a text, and the best of these is taken."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..extension import check_purpose, needed
from .calibrate import calibrate
from .experiment import Cell, Experiment
from .measures.copies import PASSAGE, Copy, copy_losses, with_copies
from .measures.losses import loss_by_position, token_losses
from .measures.probe import LEAST, TOKENS, passages
from .rows import Row, RowFile
from .settings import UNMODIFIED, Setting
from .statistics import TOLERANCE
from .tasks.probe import probed

YARN, BY_HEAD = "YaRN", "leaky_rerope by head"
#: How many kinds of candidates, the best by the probe, read the whole text.
FINALISTS = 2
#: How many settings of the best kind do: a probe knows nothing of dilution, which is what a window is wide or narrow for.
WINDOWS = 2
#: Of the places of the passages that are probed.
SEED = 0


def candidates(train_length: int, to: int, temperature: str | None = None, plain: bool = True) -> list[Setting]:
    """What `hf-longattn extend` tries: the unmodified model, YaRN where rotation is plain, each kind of remap that reaches
    `to`, two ways, and where a temperature pays each ReRoPE and SelfExtend with it too.

    `to` the trained length: what improves retrieval within it.
    """
    half, quarter, eighth = (max(train_length // n, 1) for n in (2, 4, 8))
    leaky, coarse, fine = (needed(window, train_length, to) for window in (half, quarter, eighth))
    remaps = [
        f"rerope:window={half}",
        f"rerope:window={quarter}",
        f"leaky_rerope:window={half}:stretch={leaky}.0",
        f"leaky_rerope:window={half}:stretch={2 * leaky}.0",
        f"self_extend:window={eighth}:group={fine}",
        f"self_extend:window={quarter}:group={coarse}",
    ]
    if to == train_length:
        shifts = [f"string:shift={train_length // 3}", f"string:shift={half}"]
        return [Setting(UNMODIFIED), *map(Setting.parse, shifts + remaps)]
    yarn = [Setting(YARN, rope=f"yarn:{to / train_length}")] if plain else []
    if plain:
        remaps.append(f"yarn_beyond:factor={to / train_length}")
    if temperature is not None:
        remaps += [beside(temperature, name) for name in remaps if kind(name) in ("rerope", "self_extend")]
    return [Setting(UNMODIFIED), *yarn, *map(Setting.parse, remaps)]


def kind(name: str) -> str:
    """What the candidates of one method have in common."""
    return re.split("[:+ ]", name)[0]


def beside(temperature: str, name: str) -> str:
    """A candidate's name with that temperature."""
    method, _, parameters = name.partition(":")
    return f"{method}+{temperature}:{parameters}"


def tempered(name: str) -> bool:
    """Whether a candidate has a temperature, which no probe can see: it reads too few keys."""
    return "+" in name


def by_head(model: nn.Module, input_ids: Tensor, leaky: Setting, train_length: int) -> Setting:
    """A leaky_rerope that caps the far keys of heads that copy, as measured at the beginning of a text (1, length)."""
    assert leaky.config is not None
    method = calibrate(model, [input_ids[:, : min(train_length // 2, 4096)]], leaky.config)
    return Setting(BY_HEAD, method.to_dict())


@dataclass(frozen=True)
class Scores:
    """Losses in nats per token: on prose within and beyond the trained length, and on each copy; NaN where none was read."""

    within: float
    beyond: float
    copies: tuple[float, ...]

    @property
    def copying(self) -> float:
        return sum(self.copies) / len(self.copies)

    def total(self, purpose: str = "both") -> float:
        """What is minimised: prose beyond the trained length, far copying, or both with equal weight."""
        return weighed(self.beyond, self.copying, purpose)


def weighed(text: float, copying: float, purpose: str) -> float:
    """A loss on text and one on copies as one number."""
    return {"reading": text, "retrieval": copying, "both": (text + copying) / 2}[purpose]


def plan_copies(train_length: int, to: int) -> list[Copy]:
    """Five copies: one that the unmodified model reaches, then four beyond the trained length from ever farther back.

    Raises:
        ValueError: they do not fit between the two lengths.
    """
    least = train_length + 4 * max(PASSAGE, math.ceil(2 * PASSAGE - 0.1 * train_length))
    if train_length < 7 * PASSAGE:
        raise ValueError(f"five passages of {PASSAGE} tokens have no room in a trained length of {train_length} tokens")
    if to < least:
        raise ValueError(
            f"four passages of {PASSAGE} tokens are repeated beyond the trained length of {train_length}, which takes {least} "
            f"tokens or more, not {to}"
        )
    ends = [train_length + (to - train_length) * n // 4 for n in (1, 2, 3, 4)]
    sources = [int(share * train_length) for share in (0.9, 0.75, 0.65, 0.05)]
    far = [Copy(end - PASSAGE - source, end - PASSAGE) for source, end in zip(sources, ends, strict=True)]
    return [Copy(train_length // 4, train_length // 2), *far]


@torch.inference_mode()
def score(model: nn.Module, input_ids: Tensor, train_length: int, copies: Sequence[Copy]) -> Scores:
    """One forward pass over a text (1, length) with `copies` written into it; prose loss leaves them out."""
    ids, taken = with_copies(input_ids, copies)
    losses = token_losses(model, ids)
    within, beyond = loss_by_position(losses, [1, train_length, ids.shape[1]], taken)
    return Scores(within, beyond, tuple(copy_losses(losses, copies)))


def best(scores: Mapping[str, Scores], unmodified: str, tolerance: float, purpose: str = "both") -> str:
    """The name with the lowest total among those that cost at most `tolerance` nats within the trained length.

    Raises:
        ValueError: nothing but the unmodified model stays within the tolerance.
    """
    allowed = {n: s for n, s in scores.items() if s.within <= scores[unmodified].within + tolerance}
    if set(allowed) <= {unmodified}:
        raise ValueError(
            f"every candidate costs more than {tolerance} nats per token within the trained length; raise the tolerance if "
            "that is acceptable"
        )
    return min((n for n in allowed if n != unmodified), key=lambda n: allowed[n].total(purpose))


@dataclass
class Search:
    """The best way to make a model longer, for a purpose: candidates are probed, the best ones read a text.

    Args:
        input_ids: a text, (1, to).
        trained: the length that the model was trained at, `to` at most.
        temperature: the one that pays beside ReRoPE, if any.
        plain: whether the model's rotation is unscaled, so that YaRN is a candidate.
        rows: what is measured is kept here, row by row, and not measured again.
        load: from a setting to its model; of the unmodified one first, before any other.
        measured: from the unmodified model to one more candidate, called BY_HEAD.
        tolerance: what a choice may cost within the trained length, in nats a token.
    """

    input_ids: Tensor
    trained: int
    rows: RowFile
    load: Callable[[Setting], Any]
    purpose: str = "both"
    tolerance: float = TOLERANCE
    about: Mapping[str, Any] = field(default_factory=dict)
    temperature: str | None = None
    plain: bool = True
    measured: Callable[[Any], Setting] | None = None
    settings: dict[str, Setting] = field(init=False)
    copies: list[Copy] = field(init=False)
    experiment: Experiment = field(init=False)

    def __post_init__(self) -> None:
        check_purpose(self.purpose)
        self.settings = {s.name: s for s in candidates(self.trained, self.to, self.temperature, self.plain)}
        if (kept := self.rows.find(setting=BY_HEAD)) is not None:
            self.settings[BY_HEAD] = Setting(BY_HEAD, kept["what"]["method"])
        self.copies = plan_copies(self.edge, self.to)
        self.experiment = Experiment(self.rows, self.load, ("setting", "distance"), about=self.about)

    @property
    def to(self) -> int:
        return self.input_ids.shape[1]

    @property
    def edge(self) -> int:
        """Where "beyond" begins: at the trained length, or within it at its half."""
        return self.trained if self.to > self.trained else self.trained // 2

    @property
    def distances(self) -> list[int]:
        """Two that are probed: halfway beyond the edge, and all the way."""
        return sorted({max(end, LEAST) for end in ((self.edge + self.to) // 2, self.to - PASSAGE)})

    @property
    def work(self) -> int:
        """Tokens that will have been read in the end, or more where the best kinds have fewer settings: for progress."""
        probes = sum(not tempered(name) for name in self.settings) * len(self.distances)
        finalists = FINALISTS - 1 + WINDOWS + (self.temperature is not None)
        return probes * min(2, self.to // LEAST) * TOKENS + self.trained + finalists * self.to

    def probed(self) -> dict[str, float]:
        """By setting, of those probed at every distance, the loss that `purpose` minimises."""
        out = {}
        for name in self.settings:
            found = [row for d in self.distances if (row := self.rows.find(setting=name, distance=d))]
            if len(found) == len(self.distances):
                text, copying = (fmean(x for row in found for x in row[what]) for what in ("text", "copy"))
                out[name] = weighed(text, copying, self.purpose)
        return out

    def ranked(self) -> list[list[str]]:
        """The settings of each kind by the probe, best first, and so the kinds."""
        of: dict[str, list[str]] = {}
        for _, name in sorted((loss, name) for name, loss in self.probed().items() if name != UNMODIFIED):
            of.setdefault(kind(name), []).append(name)
        return list(of.values())

    def scores(self) -> dict[str, Scores]:
        """By setting, of those that have read the text."""
        found = {n: row for n in self.settings if (row := self.rows.find(setting=n, distance=None))}
        return {
            n: Scores(row["within"], _or_nan(row["beyond"]), tuple(map(_or_nan, row["copies"]))) for n, row in found.items()
        }

    def cells(self) -> Iterator[Cell]:
        """What is probed and read: what comes next depends on what was found."""
        plain = self.settings[UNMODIFIED]
        yield from (*self._probing(plain), self._reading(plain))
        if self.measured is not None and BY_HEAD not in self.settings:
            self.settings[BY_HEAD] = self.measured(self.experiment.load(plain))
        for setting in list(self.settings.values()):
            if setting.name != UNMODIFIED and not tempered(setting.name):
                yield from self._probing(setting)
        for n, names in enumerate(self.ranked()):
            if n < FINALISTS or not self._tolerated():
                yield from (self._reading(self.settings[name]) for name in (names[:1] if n else names[:WINDOWS]))
            if not n and self.temperature is not None:
                read = self.scores()
                window = min(names[:WINDOWS], key=lambda name: read[name].total(self.purpose))
                name = beside(self.temperature, window)
                if name in self.settings:
                    yield self._reading(self.settings[name])

    def choice(self) -> str:
        """The name of the best of those that have read the text.

        Raises:
            ValueError: nothing stays within the tolerance, or nothing is better than the model as it is.
        """
        scores = self.scores()
        choice = best(scores, UNMODIFIED, self.tolerance, self.purpose)
        if self.to == self.trained and scores[choice].total(self.purpose) >= scores[UNMODIFIED].total(self.purpose):
            raise ValueError("nothing reads better within the trained length than the model as it is")
        return choice

    def _tolerated(self) -> bool:
        """Whether one of those that have read the text costs little enough within the trained length."""
        scores = self.scores()
        return any(n != UNMODIFIED and s.within <= scores[UNMODIFIED].within + self.tolerance for n, s in scores.items())

    def _probing(self, setting: Setting) -> Iterator[Cell]:
        """A setting at every distance."""
        ids = passages(self.input_ids, min(2, self.to // LEAST), SEED)
        for distance in self.distances:
            key = {"setting": setting.name, "distance": distance}
            yield Cell(setting, key, probed(ids, distance), work=len(ids) * TOKENS)

    def _reading(self, setting: Setting) -> Cell:
        """`score` of a setting; the unmodified model, a baseline within its trained length, reads that far only."""
        length = self.trained if setting.name == UNMODIFIED else self.to

        def measured(model: Any) -> Row:
            copies = [c for c in self.copies if c.position + PASSAGE <= length]
            s = score(model, self.input_ids[:, :length].to(model.device), self.edge, copies)
            beyond = None if math.isnan(s.beyond) else s.beyond
            found = [*s.copies, *[None] * (len(self.copies) - len(copies))]
            return {"read": length, "within": s.within, "beyond": beyond, "copies": found}

        return Cell(setting, {"setting": setting.name, "distance": None}, measured, work=length)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
