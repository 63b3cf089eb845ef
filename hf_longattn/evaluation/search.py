"""The search behind `hf-longattn extend`: candidates are probed, the best read a text, and the best of these is taken."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..extension import check_purpose, needed
from ..methods.self_extend import SelfExtend
from .calibrate import calibrate
from .experiment import Cell, Experiment
from .measures.copies import PASSAGE, SKIP, Copy, copy_losses, with_copies
from .measures.losses import loss_by_position, token_losses
from .measures.probe import LEAST, TOKENS, passages
from .rows import Row, RowFile
from .settings import UNMODIFIED, Setting
from .statistics import TOLERANCE, mean_interval
from .tasks.probe import probed

YARN, BY_HEAD = "YaRN", "leaky_rerope by head"
#: How many kinds of candidates, the best by the probe, read the whole text.
FINALISTS = 2
#: How many settings of the best kind do: a probe knows nothing of dilution, which is what a window is wide or narrow for.
WINDOWS = 2
#: Of the places of the passages that are probed.
SEED = 0
#: The trained length in which the passages that are repeated have room.
LEAST_TRAINED = 7 * PASSAGE
#: What two losses are compared by, in pairs: so many stretches of prose, and blocks of so many tokens of a copy.
STRETCHES, BLOCK = 16, 16


def candidates(train_length: int, to: int, temperature: str | None = None, plain: bool = True) -> list[Setting]:
    """List the settings that `hf-longattn extend` tries.

    The unmodified model, YaRN where rotation is plain, each kind of remap that reaches
    `to`, two ways, and where a temperature pays each ReRoPE and SelfExtend with it too.

    `to` the trained length: what improves retrieval within it.
    """
    half, quarter, eighth = (max(train_length // n, 1) for n in (2, 4, 8))
    leaky, coarse, fine = needed(half, train_length, to), *(_group(window, train_length, to) for window in (quarter, eighth))
    remaps = [
        f"rerope:window={half}",
        f"rerope:window={quarter}",
        f"leaky_rerope:window={half}:stretch={leaky}.0",
        f"leaky_rerope:window={half}:stretch={2 * leaky}.0",
        f"self_extend:window={eighth}:group={fine}",
        f"self_extend:window={quarter}:group={coarse}",
    ]
    if to == train_length:
        shifts = [f"string_remap:shift={train_length // 3}", f"string_remap:shift={half}"]
        return [Setting(UNMODIFIED), *map(Setting.parse, shifts + remaps)]
    yarn = [Setting(YARN, rope=f"yarn:{to / train_length}")] if plain else []
    if plain:
        remaps.append(f"yarn_beyond:factor={to / train_length}")
    if temperature is not None:
        remaps += [beside(temperature, name) for name in remaps if kind(name) in ("rerope", "self_extend")]
    return [Setting(UNMODIFIED), *yarn, *map(Setting.parse, remaps)]


def _group(window: int, train_length: int, to: int) -> int:
    """The least group with which SelfExtend reaches `to`: at times one more, where the window is no multiple of it."""
    fewest = needed(window, train_length, to)
    return next(g for g in count(fewest) if SelfExtend(window=window, group=g).reach(train_length) >= to)


def kind(name: str) -> str:
    """Return the kind of a candidate, which candidates of one method share."""
    return re.split("[:+ ]", name)[0]


def beside(temperature: str, name: str) -> str:
    """A candidate's name with that temperature."""
    method, _, parameters = name.partition(":")
    return f"{method}+{temperature}:{parameters}"


def tempered(name: str) -> bool:
    """Tell whether a candidate has a temperature, which no probe sees: probes read too few keys."""
    return "+" in name


def edge_of(trained: int, to: int) -> int:
    """Return where "beyond" begins: at the trained length, or at half of it where `to` is no longer."""
    return trained if to > trained else trained // 2


@dataclass(frozen=True)
class Scores:
    """Losses in nats per token: on prose within and beyond the trained length, and on each copy.

    Args:
        prose, blocks: the same beyond the trained length by stretches of the text, and of each copy by blocks of its tokens.
    """

    within: float
    beyond: float
    copies: tuple[float, ...]
    prose: tuple[float, ...] = ()
    blocks: tuple[tuple[float, ...], ...] = ()

    @property
    def copying(self) -> float:
        return fmean(self.copies)

    def total(self, purpose: str = "both") -> float:
        """Return the loss to minimise: prose beyond the trained length, far copying, or both with equal weight."""
        return weighed(self.beyond, self.copying, purpose)

    def against(self, other: Scores, purpose: str = "both") -> tuple[float, float]:
        """This total minus another's on the same text, and the half-width of its 95 % interval, for these copies: NaN where
        too little was read to know it.
        """
        prose = _half(self.prose, other.prose)
        copies = [_half(*both) for both in zip(self.blocks, other.blocks, strict=True)]
        copying = math.hypot(*copies) / len(copies) if copies else math.nan
        half = {"reading": prose, "retrieval": copying, "both": math.hypot(prose, copying) / 2}[purpose]
        return self.total(purpose) - other.total(purpose), half

    def beats(self, other: Scores, purpose: str = "both") -> bool:
        """Tell whether this total is lower by more than chance."""
        mean, half = self.against(other, purpose)
        return mean < -half


def _half(mine: Sequence[float], others: Sequence[float]) -> float:
    """The half-width of the interval of a mean difference, in pairs."""
    return mean_interval([a - b for a, b in zip(mine, others, strict=True)])[1] if mine else math.nan


def weighed(text: float, copying: float, purpose: str) -> float:
    """A loss on text and one on copies as one number."""
    return {"reading": text, "retrieval": copying, "both": (text + copying) / 2}[purpose]


def plan_copies(train_length: int, to: int) -> list[Copy]:
    """Five copies: one that the unmodified model reaches, then four beyond the trained length from ever farther back.

    Raises:
        ValueError: they do not fit between the two lengths.
    """
    least = train_length + 4 * max(PASSAGE * 3 // 2, math.ceil(2 * PASSAGE - 0.1 * train_length))
    if train_length < LEAST_TRAINED:
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
    losses, length = token_losses(model, ids), ids.shape[1]
    within, beyond = loss_by_position(losses, [1, train_length, length], taken)
    edges = [train_length + (length - train_length) * n // STRETCHES for n in range(STRETCHES + 1)]
    prose = [x for x in loss_by_position(losses, edges, taken) if not math.isnan(x)]  # copies alone fill some
    blocks = [losses[0, c.position + SKIP : c.position + PASSAGE].view(-1, BLOCK).mean(1).tolist() for c in copies]
    return Scores(within, beyond, tuple(copy_losses(losses, copies)), tuple(prose), tuple(map(tuple, blocks)))


def tolerated(scores: Mapping[str, Scores], tolerance: float) -> dict[str, Scores]:
    """Beside the unmodified model those that cost at most so many nats within the trained length."""
    return {n: s for n, s in scores.items() if n != UNMODIFIED and s.within <= scores[UNMODIFIED].within + tolerance}


def best(scores: Mapping[str, Scores], tolerance: float, purpose: str = "both") -> str:
    """The name with the lowest total among those that cost at most `tolerance` nats within the trained length and are better
    than the unmodified model by more than chance; or YaRN, which needs no plugin, where that is as good, but for chance.

    Raises:
        ValueError: there is none.
    """
    if not (allowed := tolerated(scores, tolerance)):
        raise ValueError(
            f"every candidate costs more than {tolerance} nats per token within the trained length; raise the tolerance if "
            "that is acceptable"
        )
    better = {n: s for n, s in allowed.items() if s.beats(scores[UNMODIFIED], purpose)}
    if not better:
        raise ValueError("nothing reads better than the model as it is, by more than chance")
    first = min(better, key=lambda n: better[n].total(purpose))
    return YARN if YARN in better and not better[first].beats(better[YARN], purpose) else first


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
        tolerance: what a choice may cost within the trained length, in nats a token.
        heads: whether a leaky_rerope that is measured, head by head, is one more candidate, called BY_HEAD.
        train_length: the trained length that settings name; None: they read it from the model's config.
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
    heads: bool = False
    train_length: int | None = None
    settings: dict[str, Setting] = field(init=False)
    copies: list[Copy] = field(init=False)
    experiment: Experiment = field(init=False)

    def __post_init__(self) -> None:
        check_purpose(self.purpose)
        found = candidates(self.trained, self.to, self.temperature, self.plain)
        self.settings = {s.name: dataclasses.replace(s, train_length=self.train_length) for s in found}
        if (kept := self.rows.find(setting=BY_HEAD)) is not None:
            self.settings[BY_HEAD] = Setting(BY_HEAD, **kept["what"])
        self.copies = plan_copies(self.edge, self.to)
        self.experiment = Experiment(self.rows, self.load, ("setting", "distance"), about=self.about)

    @property
    def to(self) -> int:
        return self.input_ids.shape[1]

    @property
    def edge(self) -> int:
        return edge_of(self.trained, self.to)

    @property
    def distances(self) -> list[int]:
        """Two that are probed: halfway beyond the edge, and all the way."""
        return sorted({max(end, LEAST) for end in ((self.edge + self.to) // 2, self.to - PASSAGE)})

    @property
    def probes(self) -> int:
        """The number of candidates that are probed."""
        return sum(not tempered(name) for name in self.settings)

    @property
    def work(self) -> int:
        """Tokens that will have been read in the end, or more where the best kinds have fewer settings: for progress."""
        probes = self.probes * len(self.distances)
        # the unmodified model, the best kind with its windows, the other kinds
        readers = FINALISTS + WINDOWS + (self.temperature is not None)
        return probes * min(2, self.to // LEAST) * TOKENS + readers * self.to

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
            n: Scores(
                row["within"], row["beyond"], tuple(row["copies"]), tuple(row["prose"]), tuple(map(tuple, row["blocks"]))
            )
            for n, row in found.items()
        }

    def _by_head(self, model: Any) -> Setting:
        """A leaky_rerope that caps the far keys of heads that copy, as measured at the beginning of the text."""
        leaky = next(s for name, s in self.settings.items() if name.startswith("leaky"))
        assert leaky.config is not None
        start = self.input_ids[:, : min(self.trained // 2, 4096)].to(model.device)
        return Setting(BY_HEAD, calibrate(model, [start], leaky.config).to_dict(), train_length=self.train_length)

    def cells(self) -> Iterator[Cell]:
        """Yield the cells to probe and read; each depends on what earlier ones found."""
        plain = self.settings[UNMODIFIED]
        yield from (*self._probing(plain), self._reading(plain))
        if self.heads and BY_HEAD not in self.settings:
            self.settings[BY_HEAD] = self._by_head(self.experiment.load(plain))
        for setting in list(self.settings.values()):
            if setting.name != UNMODIFIED and not tempered(setting.name):
                yield from self._probing(setting)
        for n, names in enumerate(self.ranked()):
            if n < FINALISTS or not tolerated(self.scores(), self.tolerance):
                yield from (self._reading(self.settings[name]) for name in (names[:1] if n else names[:WINDOWS]))
            if not n and self.temperature is not None:
                read = self.scores()
                window = min(names[:WINDOWS], key=lambda name: read[name].total(self.purpose))
                name = beside(self.temperature, window)
                if name in self.settings:
                    yield self._reading(self.settings[name])

    def choice(self) -> str:
        """The name of the best of those that have read the text: see `best`."""
        return best(self.scores(), self.tolerance, self.purpose)

    def _probing(self, setting: Setting) -> Iterator[Cell]:
        """A setting at every distance."""
        ids = passages(self.input_ids, min(2, self.to // LEAST), SEED)
        for distance in self.distances:
            key = {"setting": setting.name, "distance": distance}
            yield Cell(setting, key, partial(probed, ids, distance), work=len(ids) * TOKENS)

    def _reading(self, setting: Setting) -> Cell:
        """`score` of a setting."""

        def measured(model: Any) -> Row:
            ids = self.input_ids.to(model.device)
            found = score(model, ids, self.edge, self.copies)
            if setting.name == UNMODIFIED and not self.plain:  # a scaling may depend on the length of the text
                near = [c for c in self.copies if c.position < self.edge]
                found = dataclasses.replace(found, within=score(model, ids[:, : self.edge], self.edge, near).within)
            return {"read": self.to} | dataclasses.asdict(found)

        return Cell(setting, {"setting": setting.name, "distance": None}, measured, work=self.to)
