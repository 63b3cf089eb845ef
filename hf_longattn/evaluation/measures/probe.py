"""A probe of far distances: 1,408 tokens whose position_ids jump stand for a text of any length.

A passage is read, then, some positions farther on, other text and a repetition of the passage's first tokens. The loss on the
text tells whether the model still reads at that position, the loss on the copy whether it still finds what lies so far back.
Seconds a distance, where reading takes minutes. It knows nothing of dilution: a long text has many more keys between the two.
Recurrent layers know no positions, and remember across the jump.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...integration.skip_masks import masks_of_jumps
from ..rows import Row
from ..statistics import mean_interval
from .copies import PASSAGE, SKIP
from .losses import hidden_of, logits_of

#: Tokens before the jump, of other text after it, and in all.
BEFORE, AFTER = 1024, 256
TOKENS = BEFORE + AFTER + PASSAGE
LEAST = BEFORE + AFTER


@dataclass(frozen=True)
class Probe:
    """Losses in nats per token of each passage at each distance.

    Args:
        distances: from the passage's first tokens to their copy, in positions.
        text, copies: float32 (passages, distances).
    """

    distances: tuple[int, ...]
    text: Tensor
    copies: Tensor

    def rows(self) -> list[Row]:
        """Mean and half-width of the 95 % interval over passages, by distance."""
        return [
            {"distance": d, "text": list(mean_interval(text)), "copy": list(mean_interval(copies))}
            for d, text, copies in zip(self.distances, self.text.T.tolist(), self.copies.T.tolist(), strict=True)
        ]


def distances_to(to: int, points: int = 8) -> tuple[int, ...]:
    """Distances at equal steps up to `to`, from the least that the probe can show."""
    if to < LEAST:
        raise ValueError(f"the probe shows distances from {LEAST} on, not {to}")
    return tuple(dict.fromkeys(LEAST + (to - LEAST) * n // max(points - 1, 1) for n in range(points)))


def passages(input_ids: Tensor, count: int = 4, seed: int | None = None) -> Tensor:
    """Passages from all over a text (1, length), for `probe`: int64 (count, BEFORE + AFTER).

    Args:
        seed: of random places, one in each of `count` equal parts; None for even steps from the first token to the last.

    Raises:
        ValueError: the text is too short for so many.
    """
    length = input_ids.shape[1]
    if count < 1:
        raise ValueError(f"the number of passages must be at least 1, got {count}")
    if length < count * LEAST:
        raise ValueError(f"{count} passages of {LEAST} tokens need a text of {count * LEAST} tokens, not {length}")
    starts = [n * (length - LEAST) // max(count - 1, 1) for n in range(count)]
    if seed is not None:
        rng, part = random.Random(seed), length // count
        starts = [n * part + rng.randint(0, part - LEAST) for n in range(count)]
    return torch.cat([input_ids[:, start : start + LEAST] for start in starts])


@torch.inference_mode()
def probe(model: Any, input_ids: Tensor, distances: Sequence[int]) -> Probe:
    """Loss after a jump in positions, and on a copy of what was read before it.

    Args:
        model: a causal language model that takes position_ids; with or without a method.
        input_ids: (passages, BEFORE + AFTER), see `passages`; read one by one.
        distances: from the passage's first tokens to their copy, each >= BEFORE + AFTER.

    Raises:
        ValueError: a distance is too short, or a passage not of that length.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] != LEAST or not len(input_ids):
        raise ValueError(f"passages must be (passages, {LEAST}), got {tuple(input_ids.shape)}")
    if not distances or min(distances) < LEAST:
        raise ValueError(f"the probe shows distances from {LEAST} on, not {list(distances)}")
    read = torch.cat([input_ids, input_ids[:, :PASSAGE]], 1).to(model.device)
    text, copies = torch.empty(2, len(read), len(distances), device="cpu")
    for n, distance in enumerate(distances):
        position_ids = torch.arange(TOKENS, device=read.device)[None]
        position_ids[:, BEFORE:] += distance - LEAST
        for i, ids in enumerate(read.split(1)):
            given = {"attention_mask": masks_of_jumps(model, ids, position_ids), "position_ids": position_ids}
            hidden = hidden_of(model, input_ids=ids, use_cache=False, **given)[:, BEFORE:-1]
            losses = torch.nn.functional.cross_entropy(logits_of(model, hidden)[0], ids[0, BEFORE + 1 :], reduction="none")
            text[i, n] = losses[: AFTER - 1].mean()
            copies[i, n] = losses[AFTER - 1 + SKIP :].mean()
    return Probe(tuple(distances), text, copies)
