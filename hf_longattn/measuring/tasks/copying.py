"""A text whose first passage is repeated at its end: what a model finds as far back as it reads."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from .sample import Encoder, TextSample

#: Tokens of a repeated passage, and how many of its first ones do not count (a model must notice the repetition).
PASSAGE, SKIP = 128, 16


class CopyTask:
    """Any part of a text, then its first PASSAGE tokens again; the answer is the repetition but for its first SKIP tokens.

    Args:
        haystack: the text, as one string or token ids, int64 (tokens,).
        seed: samples of different seeds are independent.
    """

    def __init__(self, tokenizer: Any, haystack: str | Tensor, seed: int = 0) -> None:
        self.encode, self.seed = Encoder(tokenizer), seed
        self.haystack = haystack if isinstance(haystack, Tensor) else torch.tensor(self.encode(haystack))

    def check(self, length: int) -> None:
        """Raise ValueError, saying what would do, if samples of `length` tokens cannot be made."""
        if length < (least := 2 * PASSAGE + len(self.encode.start)):
            raise ValueError(
                f"{length} tokens have no room for a passage of {PASSAGE} tokens and its copy: {least} are needed"
            )
        if len(self.haystack) < length - PASSAGE:
            raise ValueError(f"the text has {len(self.haystack)} tokens; copies at {length} need {length - PASSAGE}: add text")

    def sample(self, index: int, length: int) -> TextSample:
        self.check(length)
        start = self.encode.start
        room = length - PASSAGE - len(start)
        first = random.Random(f"{self.seed}:{index}").randrange(len(self.haystack) - room + 1)
        text = self.haystack[first : first + room]
        ids = torch.cat([torch.tensor(start, dtype=text.dtype), text, text[:PASSAGE]])
        return TextSample(ids, ((length - PASSAGE + SKIP, length),), (0.0,))
