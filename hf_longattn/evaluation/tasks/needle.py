"""Needles in a haystack: sentences hidden in a long text, and an answer that lists what they said.

The task of Anson et al., "Scale-invariant attention" (2025), App. G.2. Theirs: three needles at uniformly random places, the
form of needle and answer, no loss outside the answer. Ours, where they say nothing: the answer lists the needles in the order
of the text, a short line asks for it, and the end-of-text token, where the tokenizer has one, is part of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..encoder import Encoder
from .sample import Sample

QUESTION = "\nThe special magic numbers are: "

_CITIES = """
Accra Amsterdam Ankara Athens Auckland Bangkok Barcelona Beirut Belgrade Berlin Bogota Boston Brussels Bucharest
Budapest Cairo Caracas Chicago Copenhagen Dakar Dallas Damascus Delhi Denver Dhaka Dublin Geneva Glasgow Hamburg Hanoi
Harare Havana Helsinki Houston Istanbul Jakarta Jerusalem Kabul Karachi Kigali Kingston Kyoto Lagos Lahore Lima Lisbon
London Lusaka Lyon Madrid Manchester Manila Marseille Melbourne Miami Milan Minsk Montreal Moscow Mumbai Munich Nairobi
Naples Osaka Oslo Ottawa Paris Perth Prague Quito Rabat Riga Rome Santiago Seattle Seoul Shanghai Singapore Sofia
Stockholm Stuttgart Sydney Taipei Tallinn Tehran Tirana Tokyo Toronto Tripoli Tunis Turin Valencia Vancouver Venice
Vienna Vilnius Warsaw Yerevan Zagreb Zurich
"""
CITIES = tuple(_CITIES.split())


@dataclass(frozen=True)
class Needle:
    city: str
    number: int  # seven digits

    @property
    def sentence(self) -> str:
        return f" The special magic {self.city} number is {self.number}."

    @property
    def answer(self) -> str:
        return f"{self.city}={self.number}"


class NeedleTask:
    """Samples of any length from one haystack; sample `index` of a seed is always the same.

    Args:
        tokenizer: a transformers tokenizer.
        haystack: the text to hide needles in, as one string, several that are joined, or token ids, int64 (tokens,).
        needles: how many are hidden in each text.
        seed: samples of different seeds are independent; keep one for training and another for testing.
        bos: see `Encoder`.

    Raises:
        ValueError: more needles than cities.
    """

    def __init__(
        self, tokenizer: Any, haystack: str | Sequence[str] | Tensor, needles: int = 3, seed: int = 0, bos: str = "auto"
    ) -> None:
        if not 1 <= needles <= len(CITIES):
            raise ValueError(f"needles must lie in [1, {len(CITIES)}], got {needles}")
        self.tokenizer, self.encode, self.needles, self.seed = tokenizer, Encoder(tokenizer, bos), needles, seed
        if not isinstance(haystack, Tensor):
            text = haystack if isinstance(haystack, str) else "\n\n".join(haystack)
            haystack = torch.tensor(self.encode(text), device="cpu")
        self.haystack = haystack
        self._question = self.encode(QUESTION)
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    @property
    def minimum_length(self) -> int:
        """The shortest length that holds any choice of needles, question and answer, with a token of haystack each."""
        longest = max(CITIES, key=lambda city: len(self.encode(Needle(city, 8888888).sentence)))
        needles = (Needle(longest, 8888888),) * self.needles
        pieces, _ = self._answer(needles)
        return self._fixed(needles) + len(pieces) + self.needles

    def check(self, length: int) -> None:
        """Raise ValueError, saying what would do, if samples of `length` tokens cannot be made."""
        if length < (least := self.minimum_length):
            raise ValueError(
                f"{length} tokens have no room for {self.needles} needles, the question and the answer: {least} are needed"
            )
        if len(self.haystack) < length:
            raise ValueError(
                f"the haystack has {len(self.haystack)} tokens; texts of {length} need at least as many: add text or shorten"
            )

    def sample(self, index: int, length: int, depths: Sequence[float] | None = None) -> Sample:
        """Sample `index` at exactly `length` tokens, answer included.

        Args:
            depths: where to put the needles, one number in [0, 1] each; None for uniformly random places.

        Raises:
            ValueError: no room (see `check`), or wrong depths.
        """
        self.check(length)
        rng = random.Random(f"{self.seed}:{index}")
        needles = tuple(Needle(city, rng.randrange(1_000_000, 10_000_000)) for city in rng.sample(CITIES, self.needles))
        answer, within = self._answer(needles)
        room = length - self._fixed(needles) - len(answer)
        first = rng.randrange(len(self.haystack) - room + 1)
        hay = self.haystack[first : first + room].tolist()
        if depths is None:
            places = sorted(rng.randint(0, room) for _ in needles)
        elif len(depths) == self.needles and all(0 <= d <= 1 for d in depths):
            places = sorted(round(d * room) for d in depths)
        else:
            raise ValueError(f"depths must be {self.needles} numbers in [0, 1], got {list(depths)}")
        ids, used = list(self.encode.start), 0
        for needle, place in zip(needles, places, strict=True):
            ids += hay[used:place] + self.encode(needle.sentence)
            used = place
        ids += hay[used:] + self._question
        spans = tuple((len(ids) + a, len(ids) + b) for a, b in within)
        return Sample(torch.tensor(ids + answer, device="cpu"), spans, tuple(place / room for place in places), len(ids))

    def _answer(self, needles: Sequence[Needle]) -> tuple[list[int], list[tuple[int, int]]]:
        """The answer's ids, and of each needle its span in them; encoded in pieces, so that spans are exact."""
        ids: list[int] = []
        spans = []
        for needle in needles:
            if ids:
                ids += self.encode(";")
            first = len(ids)
            ids += self.encode(needle.answer)
            spans.append((first, len(ids)))
        return ids + self._end, spans

    def _fixed(self, needles: Sequence[Needle]) -> int:
        return len(self.encode.start) + len(self._question) + sum(len(self.encode(n.sentence)) for n in needles)
