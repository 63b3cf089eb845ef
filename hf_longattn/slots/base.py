"""The base class of each slot's methods."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .method import Heads, Method, ModelFacts, require_at_least

#: From positions (int64, any shape) to the positions that a rotation should show instead (float64): the same shape, or one
#: dimension more, last, where heads differ; heads that share a key head share its remap.
Remap = Callable[[Tensor], Tensor]
#: From a model's frequencies, float64 (pairs,), to those that pairs are turned by instead, and a factor on what is turned.
Spectrum = Callable[[Tensor], tuple[Tensor, float]]


@dataclass(frozen=True)
class KeyInterval:
    """Keys of one row that form an interval and share one way of being rotated.

    All positions count from the start of the row's sequence. first, last: the interval, int64 like the query positions they
    were made from; None is no limit. query, key: remaps of positions (see `Remap`); None: unchanged. spectrum: the
    frequencies that remapped sides are turned by; None: the model's.
    """

    first: Tensor | None = None
    last: Tensor | None = None
    query: Remap | None = None
    key: Remap | None = None
    spectrum: Spectrum | None = None


def near(i: Tensor, w: int) -> KeyInterval:
    """Keys less than w away from queries at i, on both sides: the mask takes care of causality."""
    return KeyInterval(first=i - w + 1, last=i + w - 1)


def capped(last: Tensor, w: int) -> KeyInterval:
    """Keys up to `last`, all of them at distance w: the query rotated for w, keys for 0."""
    return KeyInterval(last=last, query=lambda i: torch.full_like(i, w).double(), key=lambda j: torch.zeros_like(j).double())


def check_rotation(name: str, facts: ModelFacts, stack: bool) -> None:
    """Refuse models whose rotary distances cannot be remapped."""
    if facts.rope_type is None:
        raise ValueError(
            f"{name} remaps rotary distances, and this model shows no rotary frequencies (inv_freq): it has no rotary "
            "position encoding, or takes its rotations from a table that ends where its training did (GPT-J, CodeGen)"
        )
    if not facts.rotation_is_own and not stack:
        raise ValueError(
            f"the model scales its rotary positions already (rope_type {facts.rope_type!r}) and {name} would do it again: its "
            f"trained length is {facts.train_length} ({facts.train_length_source}). Pass train_length= if it was trained "
            "with the scaling, stack=True if you want both, or load the model with its default rope"
        )


def try_out(method: Method, facts: ModelFacts, what: str) -> None:
    """Raise ValueError for a method whose functions fail on tiny tensors.

    Args:
        what: names it.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # where a model is built it is the model's, on no device
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            for call, found, wanted in method.trial(facts):
                shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", type(found).__name__)
                if (shape, dtype) != (wanted.shape, wanted.dtype):
                    shown = "no tensor" if shape is None else f"shape {tuple(shape)}"
                    raise ValueError(
                        f"it gives {shown}, {dtype}, and not shape {tuple(wanted.shape)}, {wanted.dtype} ({call})"
                    )
                if bool((found != found).any() or (found == math.inf).any()):
                    raise ValueError(f"it gives NaN or infinity ({call}), and so would every logit")
    except Exception as error:
        raise ValueError(f"{what} fails on tiny tensors: {str(error) or type(error).__name__}") from error
    finally:
        torch.set_default_dtype(default)


def check_head_dependent(method: Method, why: str, differs: bool) -> None:
    """Raise ValueError for a method whose heads differ and that does not say so."""
    if differs and not method.head_dependent:
        raise ValueError(
            f"{why}, and head_dependent is False: split over processes, heads would take each other's. Let that property "
            "return True"
        )


def check_by_row(what: str, of_all: Tensor, alone: Iterable[Tensor], dim: int) -> None:
    """Raise ValueError for a function that gives a row something else alone than among other rows."""
    if not torch.allclose(of_all, torch.cat(list(alone), dim), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"a row gets something else alone than among other rows ({what}), so that caches, chunks and padding would change "
            "results: each row is to depend on itself alone"
        )


class KeyIntervals(Method, ABC):
    """A method that says by intervals of keys which ones a query sees, and at which distances the rotary encoding shows them.

    Two slots are made of this: `positions` changes distances, `visibility` hides keys and may change distances too.
    """

    @abstractmethod
    def intervals(self, i: Tensor) -> list[KeyInterval]:
        """The visible keys of query positions i as disjoint intervals, nearest first."""

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        """The distance shown between query position i and key position j <= i (int64, broadcast together), float64.

        One dimension more, last, where key heads differ (see `Remap`).
        """
        return (i - j).double()

    def rescaled(self, i: Tensor, j: Tensor) -> Tensor | None:
        """bool, the pairs of query i and key j (broadcast together) that are turned by `spectrum`; None: there are none."""
        return None

    def spectrum(self, inv_freq: Tensor) -> tuple[Tensor, float]:
        """See `Spectrum`."""
        return inv_freq, 1.0

    #: Why distances are not defined for tokens at several positions each (M-RoPE), in words; None: they are, by the intervals.
    why_not_by_axis: ClassVar[str | None] = None
    #: True if distances may be changed in a model that scales them already.
    stack: bool = False

    @property
    def uses_train_length(self) -> bool:
        return True

    def bind(self, facts: ModelFacts) -> Self:
        if self.remaps:
            check_rotation(self.name, facts, self.stack)
        return super().bind(facts)

    @property
    def own_temperature(self) -> str | None:
        """The temperature that is part of the method, in words, or None."""
        return None

    @property
    def remaps(self) -> bool:
        """True if distances change."""
        return type(self).distance is not KeyIntervals.distance

    def reach(self, train_length: int) -> int | None:
        """The longest text in which no distance is shown as train_length or more; None where there is no such limit."""
        return None

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        def of_one_head(x: Tensor, like: Tensor) -> Tensor:
            return x[..., 0] if x.ndim > like.ndim else x

        i, j = torch.arange(12, device="cpu")[:, None], torch.arange(12, device="cpu")
        for n, interval in enumerate(self.intervals(j)):
            ends, remaps = {"first": interval.first, "last": interval.last}, {"query": interval.query, "key": interval.key}
            yield from ((f"intervals()[{n}].{name}", end, j) for name, end in ends.items() if end is not None)
            shown = {name: of_one_head(remap(j), j).nan_to_num() for name, remap in remaps.items() if remap is not None}
            yield from ((f"intervals()[{n}].{name}", positions, j.double()) for name, positions in shown.items())
        distances = (i - j).double()
        yield "distance", of_one_head(self.distance(i, j), distances).nan_to_num(), distances  # of keys ahead it may be none
        _check_intervals(self)


def _check_intervals(method: KeyIntervals) -> None:
    """Raise ValueError unless every key that a query sees lies in one interval, at the distance that the method states.

    Looks at queries near the first positions and near powers of two, and for each at the keys at both edges of its intervals.
    """
    near_powers = [2**k + d for k in range(5, 18) for d in (-1, 0, 1)]
    i = torch.tensor([*range(24), *near_powers], device="cpu")
    intervals, whole = method.intervals(i), torch.full_like(i, 0)
    edges = [(whole if b.first is None else b.first, i if b.last is None else b.last) for b in intervals]
    looked_at = [whole, whole + 1, i // 2, i, *(edge + d for ends in edges for edge in ends for d in (-1, 0, 1))]
    j = torch.minimum(torch.stack(looked_at, 1).clamp(min=0), i[:, None])
    i = i[:, None]
    inside = torch.stack([(first[:, None] <= j) & (j <= last[:, None]) for first, last in edges])
    seen = method.visible(i, j) if isinstance(method, Visibility) else torch.ones_like(j, dtype=torch.bool)

    def refuse(pairs: Tensor, why: str, *distances: Tensor) -> None:
        """Raise for the first of these pairs, with its own distances in the places that `why` has for them."""
        if bool(pairs.any()):
            row, column, *head = pairs.nonzero()[0].tolist()
            own = (float(x.expand_as(pairs)[row, column, *head]) for x in distances)
            raise ValueError(f"of the query at {int(i[row, 0])} and the key at {int(j[row, column])} {why.format(*own)}")

    refuse(inside.sum(0) > 1, "two intervals hold the pair, which would count twice: intervals() must be disjoint")
    refuse(seen & ~inside.any(0), "no interval holds the pair, which would not be seen: intervals() leaves a gap")
    refuse(~seen & inside.any(0), "an interval holds the pair, which visible() hides")
    stated, rows = method.distance(i, j), list(zip(i.split(1), j.split(1), strict=True))
    check_by_row("distance", stated, (method.distance(*row) for row in rows), 0)
    if isinstance(method, Visibility):
        check_by_row("visible", seen.double(), (method.visible(*row).double() for row in rows), 0)
    for n, interval in enumerate(intervals):
        f, g = ((x.double() if to is None else to(x)) for to, x in ((interval.query, i), (interval.key, j)))
        f, g, want = (x if x.ndim == 3 else x[..., None] for x in (f, g, stated))  # heads
        wrong = inside[n, ..., None] & ~torch.isclose(f - g, want, rtol=1e-9, atol=1e-6)
        why = f"distance() is {{:g}}, and its interval, intervals()[{n}], shows query(i) - key(j) = {{:g}}"
        refuse(wrong, why, want, f - g)


class Window(KeyIntervals):
    """A method that changes only keys that are `window` tokens away and farther, `window` being a field of it."""

    window: int | None
    #: The default window is the trained length divided by this.
    default_divisor: ClassVar[int] = 2
    #: True if the window may be as long as the trained length.
    may_be_whole: ClassVar[bool] = False

    def validate(self) -> None:
        require_at_least(1, window=self.window)

    def bind(self, facts: ModelFacts) -> Self:
        bound, length = super().bind(facts), facts.train_length
        if self.window is None:
            if length is None:
                raise ValueError(f"{self.name} needs window: the model's config names no maximum length")
            return dataclasses.replace(bound, window=max(length // self.default_divisor, 1))  # type: ignore[call-arg]
        if length is not None and (self.window > length or (self.window == length and not self.may_be_whole)):
            raise ValueError(
                f"window {self.window} must be {'at most' if self.may_be_whole else 'below'} the trained length {length}: "
                "beyond it are the distances that the model does not know"
            )
        return bound

    @property
    def identity_below(self) -> float:
        return self.window or 0


class Positions(KeyIntervals):
    """The distance that the rotary encoding shows for a pair, in place of the true one; every key is in an interval."""

    slot: ClassVar[str] = "positions"

    @abstractmethod
    def distance(self, i: Tensor, j: Tensor) -> Tensor: ...

    def reach(self, train_length: int) -> int | None:
        """The longest text in which no distance is shown as train_length or more; None where there is no such limit.

        By default what `distance` says of the first key; None of a method with a `spectrum` of its own.
        """
        if type(self).spectrum is not KeyIntervals.spectrum:
            return None
        nests = (x for name in (*self.by_head, *self.by_layer) if isinstance(x := getattr(self, name), tuple))
        layers = [self.for_layer(n) for n in range(max(map(len, nests), default=1))]

        def knows(length: int) -> bool:
            i, j = (torch.tensor([n], device="cpu") for n in (length - 1, 0))
            return all(bool((layer.distance(i, j) < train_length).all()) for layer in layers)

        with torch.device("cpu"):
            known, unknown = train_length, 1 << 40
            if knows(unknown):
                return None
            while unknown - known > 1:
                middle = (known + unknown) // 2
                known, unknown = (middle, unknown) if knows(middle) else (known, middle)
        return known


class Visibility(KeyIntervals):
    """A method that hides some of the earlier keys from a query."""

    slot: ClassVar[str] = "visibility"

    @abstractmethod
    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        """bool, whether the query at position i sees the key at j <= i."""

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        yield from super().trial(facts)
        i, j = torch.arange(12, device="cpu")[:, None], torch.arange(12, device="cpu")
        yield "visible", self.visible(i, j), i >= j


class Score(Method, ABC):
    """A score of its own in place of S = scaling q . k."""

    slot: ClassVar[str] = "score"

    @abstractmethod
    def fold(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        """Query, key and scaling such that scaling q . k is the new score."""

    @property
    def cosine(self) -> float | None:
        """The c of a score that is c cos(q, k), so that kernels divide products by norms; None: it has no such form."""
        return None

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        query, key = (
            torch.arange(1.0, 1 + heads * 6 * facts.head_dim, device="cpu").sin().view(1, heads, 6, facts.head_dim)
            for heads in (facts.num_heads, facts.num_kv_heads)
        )
        for x in (query, key):
            x[:, :, 0] = 0  # as in a cache's empty places
        found = self.fold(query, key)
        yield "fold, the query, at first of zeros", found[0], query
        yield "fold, the key, at first of zeros", found[1], key
        yield "fold, the scaling", torch.tensor(float(found[2]), device="cpu"), torch.ones((), device="cpu")
        alone = [self.fold(q, k) for q, k in zip(query.split(1, 2), key.split(1, 2), strict=True)]
        check_by_row("fold, the query", found[0], (q for q, _, _ in alone), 2)
        check_by_row("fold, the key", found[1], (k for _, k, _ in alone), 2)


class Temperature(Method, ABC):
    """A factor on the logits of each query row."""

    slot: ClassVar[str] = "temperature"


@dataclass(frozen=True, kw_only=True)
class LengthTemperature(Temperature):
    """S -> factor(n_i) S, where n_i is the number of keys that query i sees.

    Args:
        train_length: n_tr, default: the length the model was trained at.
        clamp: never let the factor fall below 1; below n_tr a pretrained model never saw flatter attention.
        stack: allow it beside a temperature that the model has already (YaRN's, Llama 4's).
    """

    learns: ClassVar[bool] = True

    train_length: int | None = None
    clamp: bool = True
    stack: bool = False

    @property
    def rises_to_one(self) -> bool:
        """True if the published factor grows with n and is 1 at n_tr: clamped, it is 1 up to there."""
        return False

    @property
    def needs_training(self) -> bool:
        return not self.clamp

    @property
    def identity_below(self) -> float:
        return self.train_length or 0 if self.clamp and self.rises_to_one else 0

    def validate(self) -> None:
        require_at_least(2, train_length=self.train_length)

    def bind(self, facts: ModelFacts) -> Self:
        if facts.own_temperature and not self.stack:
            raise ValueError(
                f"the model has a temperature of its own ({facts.own_temperature}); putting {self.name} on top of it "
                "sharpens twice. Pass stack=True if that is what you want"
            )
        if self.train_length is not None or not self.uses_train_length:
            return self
        if facts.train_length is None:
            raise ValueError(f"{self.name} needs train_length: the model's config names no maximum length")
        return dataclasses.replace(self, train_length=facts.train_length)

    def factor(self, n: Tensor, head_dim: int) -> Tensor:
        """The multiplier for rows that see n keys: float64 in, float64 out, shape of n; n = 0 counts as 1."""
        factor = self._published(n.clamp(min=1), head_dim)
        return factor.clamp(min=1) if self.clamp else factor

    def _published(self, n: Tensor, head_dim: int) -> Tensor:
        return self.formula(n, head_dim, self.filled("train_length") if self.uses_train_length else 0)

    @abstractmethod
    def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
        """The published factor, unclamped."""

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        n = torch.tensor([1, 2, 3, 16, 17, 65536], dtype=torch.float64, device="cpu")
        found = self._published(n, facts.head_dim)
        yield "formula", found, n
        check_by_row("formula", found, (self._published(x, facts.head_dim) for x in n.split(1)), 0)
        if (part := self.module(facts)) is not None:
            by_head = n.expand(1, facts.num_heads, -1)
            yield "its module", part(by_head, own=lambda parameter: parameter), by_head
            differs = part(by_head[:, :1], own=lambda parameter: parameter).shape[1] > 1
            check_head_dependent(self, "its module has a parameter for each head", differs)


class EntropyTemperature(Temperature, ABC):
    """L -> factor(H) L on the finished logits, where H is the entropy (nats) of softmax(L)."""

    @abstractmethod
    def factor(self, entropy: Tensor) -> Tensor:
        """The multiplier, differentiable, shape of entropy."""

    @property
    def polynomial(self) -> tuple[float, ...]:
        """`factor` as a polynomial: the entropies that lower and higher ones are held at, then its coefficients, the highest
        power first; empty where it is none.
        """
        return ()

    def prepared(self, like: Tensor) -> Callable[[Tensor], Tensor]:
        """`factor` for entropies of a dtype and a device, with constants that all layers of a pass share."""
        return self.factor

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        entropy = torch.linspace(0, 11, facts.num_heads * 6, device="cpu")  # 11 nats: 60,000 keys alike
        entropy = entropy.view(1, facts.num_heads, 6)
        found = self.factor(entropy)
        yield "factor", found, entropy
        check_by_row("factor", found, map(self.factor, entropy.split(1, 2)), 2)


class LogitMap(Method, ABC):
    """L_ij = gain_t S_ij + bias_t at the distance t = |i - j|."""

    slot: ClassVar[str] = "logit_map"
    learns: ClassVar[bool] = True

    sink_tokens: int = 0
    """The first keys of each sequence that the map leaves alone."""
    blends: ClassVar[bool] = False
    """True if the map has a strength: `tables` then takes another one, a float64 without dimensions, or None, last."""

    @property
    def needs_training(self) -> bool:
        return True

    def for_heads(self, heads: Heads) -> LogitMap:  # type: ignore[override]
        return LogitMapOfHeads(self, heads) if self.head_dependent else self

    @abstractmethod
    def tables(self, heads: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """gain and bias for t = 0 .. length-1: two float64 tensors, each of shape (heads or 1, length)."""

    def checked_tables(self, heads: int, length: int, device: torch.device, *strength: Tensor | None) -> tuple[Tensor, Tensor]:
        """`tables`; ValueError where they have other rows than one, or one for each head."""
        gain, bias = self.tables(heads, length, device, *strength)
        if wrong := [len(x) for x in (gain, bias) if len(x) not in (1, heads)]:
            what = f"{' or '.join(self.by_head)} holds" if self.by_head else "tables() gives"
            raise ValueError(
                f"{self.name}: {what} {wrong[0]} numbers for {heads} heads; of parameters per layer and head, which by_head "
                "names, config.for_layer(i) takes one layer's"
            )
        return gain, bias

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        length = 1 << 12  # functions of the distance fail late: roots and logarithms of what is left, buckets
        tables = self.tables(facts.num_heads, length, torch.device("cpu"))
        ways = {"tables": tables}
        if (part := self.module(facts)) is not None:
            ways["its module"] = part(*tables, own=lambda parameter: parameter)
        for way, found in ways.items():
            for name, table in zip(("gain", "bias"), found, strict=True):
                heads = 1 if len(table) == 1 else facts.num_heads
                yield f"{way}, {name}", table, torch.ones(heads, length, dtype=torch.float64, device="cpu")
            check_head_dependent(self, f"{way} has a row for each head", any(len(table) > 1 for table in found))


@dataclass(frozen=True)
class LogitMapOfHeads(LogitMap):
    """A logit map as some of its heads see it."""

    name: ClassVar[str] = "logit_map_of_heads"
    paper: ClassVar[str] = ""

    whole: LogitMap
    part: Heads

    def __post_init__(self) -> None:
        """These are no parameters to check."""

    @property
    def sink_tokens(self) -> int:  # type: ignore[override]
        return self.whole.sink_tokens

    @property
    def blends(self) -> bool:  # type: ignore[override]
        return self.whole.blends

    def tables(self, heads: int, length: int, device: torch.device, *strength: Tensor | None) -> tuple[Tensor, Tensor]:
        gain, bias = self.whole.tables(self.part.of, length, device, *strength)
        return self.part.own(gain), self.part.own(bias)  # of one row for all heads that row


class Sink(Method, ABC):
    """A term in the denominator of every softmax that belongs to no key: weights add up to 1 less its share."""

    slot: ClassVar[str] = "sink"
    learns: ClassVar[bool] = True

    @property
    def head_dependent(self) -> bool:
        return True

    @abstractmethod
    def logits(self, heads: int, like: Tensor) -> Tensor:
        """The logarithm of the term for each head, (heads,), in the dtype and on the device of `like`."""

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        like = torch.ones(facts.num_heads, device="cpu")
        yield "logits", self.logits(facts.num_heads, like), like
        if (part := self.module(facts)) is not None:
            yield "its module", part(like, own=lambda parameter: parameter), like


class OutputNorm(Method, ABC):
    """A change of the attention output before the output projection: a normalisation over features."""

    slot: ClassVar[str] = "output_norm"
    learns: ClassVar[bool] = True

    @property
    def needs_training(self) -> bool:
        return True

    @property
    def head_dependent(self) -> bool:
        return True

    @abstractmethod
    def normalise(self, output: Tensor, affine: nn.Module | None = None) -> Tensor:
        """Output (batch, heads, q_len, head_dim), normalised; `affine` is the learned part, if any; then come `constants`."""

    def constants(self, like: Tensor) -> tuple[Tensor, ...]:
        """Further arguments of `normalise`, in the dtype and on the device of `like`: sent once, not at every token."""
        return ()

    def trial(self, facts: ModelFacts) -> Iterator[tuple[str, Any, Any]]:
        output = torch.arange(3.0 * facts.num_heads * facts.value_dim, device="cpu").sin()
        output, affine = output.view(1, facts.num_heads, 3, facts.value_dim), self.module(facts)
        found = self.normalise(output, affine, *self.constants(output))
        yield "normalise", found, output
        alone = (self.normalise(x, affine, *self.constants(output)) for x in output.split(1, 2))
        check_by_row("normalise", found, alone, 2)


#: What a method is made on.
BASES = (Positions, Visibility, Score, LengthTemperature, EntropyTemperature, LogitMap, Sink, OutputNorm)
