"""Copying: how well a model predicts a passage that it has read before, by how far back that was.

Loss on prose says little about far context. A passage repeated from far back does: a model that can reach the first
reading finds the second nearly free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Tokens of a repeated passage, and how many of its first ones do not count (a model must notice the repetition).
PASSAGE, SKIP = 128, 16
#: From how far back `far_copies` repeats, as shares of the text before; near and far mixed.
SHARES = (0.5, 0.95, 0.25, 0.75)
#: The last tokens of a text, which `far_copies` takes.
TAIL = PASSAGE * len(SHARES)


@dataclass(frozen=True)
class Copy:
    """A passage that starts at `position` and repeats the one `distance` tokens before."""

    distance: int
    position: int

    def __post_init__(self) -> None:
        if not PASSAGE <= self.distance <= self.position:
            raise ValueError(f"a copy needs {PASSAGE} <= distance <= position, got {self.distance} and {self.position}")


def with_copies(input_ids: Tensor, copies: Sequence[Copy]) -> tuple[Tensor, Tensor]:
    """A text with its passages overwritten by copies, and which positions they take.

    Args:
        input_ids: (1, length).

    Raises:
        ValueError: a copy ends beyond the text, or overwrites a copy or a passage that is copied.
    """
    ids = input_ids.clone()
    taken, read = (torch.zeros(input_ids.shape[1], dtype=torch.bool, device="cpu") for _ in range(2))
    for copy in copies:
        source = slice(copy.position - copy.distance, copy.position - copy.distance + PASSAGE)
        target = slice(copy.position, copy.position + PASSAGE)
        if target.stop > ids.shape[1] or taken[target].any() or read[target].any() or taken[source].any():
            raise ValueError(f"the copy at {copy.position} from {copy.distance} back does not fit the text or meets another")
        ids[:, target] = input_ids[:, source]
        taken[target] = read[source] = True
    return ids, taken.to(ids.device)


def far_copies(length: int) -> list[Copy]:
    """Four copies, the last TAIL tokens of a text, of passages spread over the text before.

    Raises:
        ValueError: the text is too short for them.
    """
    if length < 5 * TAIL:
        raise ValueError(f"copies need texts of {5 * TAIL} tokens or more, not {length}")
    before = length - TAIL
    return [Copy(int(before * share), before + PASSAGE * i) for i, share in enumerate(SHARES)]


def copy_losses(losses: Tensor, copies: Sequence[Copy]) -> list[float]:
    """Mean loss on each copy, its first SKIP tokens left out; `losses` as from `token_losses` on the text with copies."""
    return [float(losses[:, c.position + SKIP : c.position + PASSAGE].mean()) for c in copies]
