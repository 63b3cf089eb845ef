"""Making a pretrained model longer without training."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig, length_of
from ..integration import apply, rope
from ..integration.layers import candidates_of, pretrained
from ..integration.model import running
from ..integration.planning import bound_config, position_tables
from ..methods.yarn_beyond import YarnBeyond
from ..slots.method import ModelFacts
from ..slots.registry import did_you_mean
from ..telling import warn
from .calibrate import calibrate
from .experiment import Cell, Experiment, Latest, Measure
from .measures.copies import PASSAGE, Copy, copy_losses, with_copies
from .measures.losses import loss_by_position, token_losses
from .measures.probe import LEAST, TOKENS, passages, probing
from .rows import Row, RowFile
from .settings import UNMODIFIED, Setting
from .statistics import TOLERANCE

Model = TypeVar("Model", bound=nn.Module)
YARN, BY_HEAD = "YaRN", "leaky_rerope by head"
#: What a longer model can be for; the first is the default.
PURPOSES = ("both", "reading", "retrieval")
#: How many kinds of candidates, the best by the probe, read the whole text.
FINALISTS = 2
#: How many settings of the best kind do: a probe knows nothing of dilution, which is what a window is wide or narrow for.
WINDOWS = 2
#: From how many times the trained length on a temperature beside ReRoPE pays.
PAYS = {"logn": 1.5, "yarn_temperature": 1.5, "infoscale": 4}
#: Of the places of the passages that are probed.
SEED = 0


def extend(
    model: Model,
    to: int | str,
    method: str | LongAttnConfig | None = None,
    purpose: str = "both",
    train_length: int | str | None = None,
    **parameters: Any,
) -> Model:
    """Make a model read texts of `to` tokens (32768 or "32k"), in place and without training; returns the model.

    The default keeps every distance below half the trained length exact and shows larger ones as that (ReRoPE): short texts
    give the same logits as before, and far tokens stay visible. Pass the trained length as `to` to improve retrieval within
    it. Where many keys would dilute attention a temperature is added: LogN from one and a half times the trained
    length on in models with QK-norm, InfoScale from four times on in others. Other methods and parameters as in `apply`.
    A RoPE scaling that the model was trained with (Llama 3's, longrope, YaRN, linear) stays, and the remap works on top of
    it; one that was added for inference is refused. All that says how long the model reads says `to`, so that harnesses and
    servers do not cut texts: its configs, generation config and, where it is saved, its tokenizer. It says what it said before
    once the method is taken out. Where a rotation depends on it (dynamic NTK, longrope without a factor), it stays.
    Layers without rotation, and those with a sliding window shorter than the trained length, do not change. If no layer is
    left, a warning says so.

    Args:
        train_length: the length that the model was trained at, by default read from its config. `describe` shows it, with the
            reason.
        purpose: what the default is for. "retrieval" (of what lies far back) and "both" take ReRoPE; with QK-norm "both" adds
            LogN and "retrieval" YaRN's temperature. "reading", to predict long texts well, takes Leaky ReRoPE, which keeps
            order among far tokens, and no temperature.

    Raises:
        ValueError: `to` is not a length, below the trained length, or beyond the method's reach; the method does not extend;
            `purpose` is unknown, or given together with a method. The model is then unchanged.

    Warns if a method is replaced, the trained length is ambiguous, there is nothing to remap, or the model has a sliding
    window that is shorter than `to`.
    """
    check_purpose(purpose)
    if method is not None and purpose != PURPOSES[0]:
        raise ValueError(f"purpose chooses a method and {method!r} is one: leave out purpose={purpose!r}, or the method")
    length = length_of(to)
    config = _config(model, length, method, purpose, _told(model, train_length), parameters)
    _check(model, config, length)
    replaced = running(model)
    apply(model, dataclasses.replace(config, extended_to=length))
    if replaced is not None and replaced.name != config.name:
        warn(f"{config.name} replaces {replaced.name}, which the model ran")
    if (window := own_window(model)) is not None and window < length:
        warn(
            f"the model has a sliding window of its own, {window:,} tokens: what lies farther back stays unseen. To lift it, "
            "build the model with sliding_window=None in its config"
        )
    return model


def _config(
    model: nn.Module,
    length: int,
    method: str | LongAttnConfig | None,
    purpose: str,
    told: int | None,
    given: Mapping[str, Any],
) -> LongAttnConfig:
    """What is asked for; of no method the one that serves the purpose."""
    parameters = dict(given) if told is None else {**given, "train_length": told}
    if method is None:
        known = bound_config(model, LongAttnConfig(train_length=told))[1]
        trained = known.train_length
        pays = None if "stack" in parameters else temperature(known, length, purpose)  # which could mean either
        method = "leaky_rerope" if purpose == "reading" else rerope_with(pays)
        if method == "leaky_rerope" and trained is not None:
            parameters = {"stretch": max(4.0, float(needed(trained // 2, trained, length)))} | parameters
    return LongAttnConfig.parse(method, parameters)


def _check(model: nn.Module, config: LongAttnConfig, length: int) -> None:
    """Raise ValueError where a config does not take a model to a length."""
    base = pretrained(model)
    if base.config.is_encoder_decoder:
        raise ValueError(
            f"{type(base).__name__} reads its text with an encoder, and methods go into causal attention alone: "
            "it would read no more than before"
        )
    if not config.key_bands:
        raise ValueError(
            f"{config.name} extends nothing: beyond the trained length a model meets distances that it does not know, "
            'and only position remaps ("rerope", the default, "leaky_rerope", "self_extend", "dual_chunk", '
            '"yarn_beyond") and windows change those. Use hf_longattn.apply, beside hf_longattn.rope, if that is what you want'
        )
    facts = bound_config(model, config)[1]
    if facts.train_length is None:
        raise ValueError("the model's config names no maximum length to extend: use hf_longattn.apply with a window")
    if rope.settings_of(base) is None and (table := next(position_tables(base), None)) is not None:
        raise ValueError(
            f"the model learned its positions, in a table of {table.num_embeddings} entries, which no method can extend: use "
            "hf_longattn.apply for a window within it, or a model with rotary positions"
        )
    changed = config.positions is not None and not isinstance(config.positions, YarnBeyond)  # within the trained length
    if length < facts.train_length + (not changed):
        raise ValueError(
            f"the model was trained at {facts.train_length} tokens ({facts.trained}) and reads {length} as it is: nothing to "
            "extend. Pass train_length= if it was trained at another length"
        )
    bound_config(model, dataclasses.replace(config, extended_to=length))


def own_window(model: nn.Module) -> int | None:
    """The sliding window of layers that take a method all the same, because it is as wide as the trained length."""
    layers = [x for x in candidates_of(pretrained(model)) if x.windowed and x.kind == "full"]
    return int(layers[0].module.config.sliding_window) if layers else None


def _told(model: nn.Module, train_length: int | str | None) -> int | None:
    """The trained length as it is told now, or was told or read when the method came that the model runs."""
    if train_length is not None:
        return length_of(train_length)
    return None if (present := running(model)) is None else present.train_length


def check_purpose(purpose: str) -> None:
    """Raise ValueError if there is none of that name."""
    if purpose not in PURPOSES:
        raise ValueError(f"unknown purpose {purpose!r}; {did_you_mean(purpose, PURPOSES)}known: {', '.join(PURPOSES)}")


def needed(window: int, train_length: int, to: int) -> int:
    """The stretch or group with which a remap of that window reaches `to`, at least 2."""
    return max(2, math.ceil((to - window) / (train_length - window)))


def temperature(facts: ModelFacts, to: int, purpose: str = "both") -> str | None:
    """The temperature that pays beside ReRoPE at that length, if one does: with QK-norm, which bounds how sharp a row of
    attention can be, LogN, or for retrieval YaRN's, which copies better and costs more on prose; else InfoScale. None for
    models that have a temperature of their own.
    """
    sharp = "yarn_temperature" if purpose == "retrieval" else "logn"
    name = sharp if facts.qk_norm else "infoscale"
    if facts.own_temperature is not None or facts.train_length is None or to < PAYS[name] * facts.train_length:
        return None
    return name


def rerope_with(temperature: str | None) -> str:
    return "rerope" if temperature is None else f"rerope+{temperature}"


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
        tolerance: what a choice may cost within the trained length, in nats a token.
    """

    input_ids: Tensor
    trained: int
    rows: RowFile
    purpose: str = "both"
    tolerance: float = TOLERANCE
    about: Mapping[str, Any] = field(default_factory=dict)
    temperature: str | None = None
    plain: bool = True
    settings: dict[str, Setting] = field(init=False)
    copies: list[Copy] = field(init=False)

    def __post_init__(self) -> None:
        check_purpose(self.purpose)
        self.settings = {s.name: s for s in candidates(self.trained, self.to, self.temperature, self.plain)}
        if (kept := self.rows.find(setting=BY_HEAD)) is not None:
            self.settings[BY_HEAD] = Setting(BY_HEAD, kept["what"]["method"])
        self.copies = plan_copies(self.edge, self.to)

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

    def share(self, row: Row) -> int:
        """What a row is of `work`."""
        return int(row["read"]) if "read" in row else len(row["text"]) * TOKENS

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

    def run(
        self,
        load: Callable[[Setting], Any],
        done: Callable[[Row, bool], None] = lambda row, new: None,
        measured: Callable[[Any], Setting] | None = None,
    ) -> str:
        """Probe, read and choose; returns the name of the best.

        Args:
            load: from a setting to its model; of the unmodified one first, before any other.
            done: told of every row, and whether it was measured now.
            measured: from the unmodified model to one more candidate, called BY_HEAD.

        Raises:
            ValueError: nothing stays within the tolerance, or nothing is better than the model as it is.
        """
        probe = probing(passages(self.input_ids, min(2, self.to // LEAST), SEED), self.distances)
        load, plain = Latest(load), self.settings[UNMODIFIED]

        def run(settings: Sequence[Setting], *measures: Measure) -> None:
            Experiment(settings, [self.input_ids], measures, self.rows, load, about=self.about, done=done).run()

        run([plain], probe, self._reading)
        if measured is not None and BY_HEAD not in self.settings:
            self.settings[BY_HEAD] = measured(load(plain))
        run([s for s in self.settings.values() if s.name != UNMODIFIED and not tempered(s.name)], probe)
        for n, names in enumerate(self.ranked()):
            if n < FINALISTS or not self._tolerated():
                run([self.settings[name] for name in (names[:1] if n else names[:WINDOWS])], self._reading)
            if not n and self.temperature is not None:
                read = self.scores()
                window = min(names[:WINDOWS], key=lambda name: read[name].total(self.purpose))
                run([s for s in self.settings.values() if s.name == beside(self.temperature, window)], self._reading)
        scores = self.scores()
        choice = best(scores, UNMODIFIED, self.tolerance, self.purpose)
        if self.to == self.trained and scores[choice].total(self.purpose) >= scores[UNMODIFIED].total(self.purpose):
            raise ValueError("nothing reads better within the trained length than the model as it is")
        return choice

    def _tolerated(self) -> bool:
        """Whether one of those that have read the text costs little enough within the trained length."""
        scores = self.scores()
        return any(n != UNMODIFIED and s.within <= scores[UNMODIFIED].within + self.tolerance for n, s in scores.items())

    def _reading(self, setting: Setting, texts: Sequence[Tensor]) -> Iterator[Cell]:
        """`score` as a measure; the unmodified model, a baseline within its trained length, reads that far only."""
        length = self.trained if setting.name == UNMODIFIED else self.to

        def measured(model: Any) -> Row:
            copies = [c for c in self.copies if c.position + PASSAGE <= length]
            s = score(model, self.input_ids[:, :length].to(model.device), self.edge, copies)
            beyond = None if math.isnan(s.beyond) else s.beyond
            found = [*s.copies, *[None] * (len(self.copies) - len(copies))]
            return {"read": length, "within": s.within, "beyond": beyond, "copies": found}

        yield Cell(setting, {"distance": None}, measured)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
