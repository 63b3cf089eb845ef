"""Positions that skip (PoSE): a short window that shows the distances of a long text.

Zhu et al., "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training" (2024). The text of a window
stays contiguous; its positions jump between chunks.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .recipe import Skip


def skipped(input_ids: Tensor, skip: Skip, rng: random.Random) -> tuple[Tensor, Tensor]:
    """One window, (length,), with its position_ids; both int64.

    Chunks have random borders, each at least length / (2 chunks) tokens. Positions rise by one inside a chunk and jump by a
    random amount between chunks, so that the last is below target_length. A repeating window's last chunk is overwritten by a
    random piece of the first, as far as that goes.
    """
    assert skip.target_length is not None  # `run.prepare` saw to it
    length = len(input_ids)
    positions = torch.arange(length)
    if rng.random() < skip.unskipped:
        return input_ids, positions
    least = length // (2 * skip.chunks)
    free = length - least * skip.chunks
    cuts = sorted(rng.randint(0, free) for _ in range(skip.chunks - 1))
    starts = [0, *(cut + least * (i + 1) for i, cut in enumerate(cuts))]
    jumps = sorted(rng.randint(0, skip.target_length - length) for _ in starts[1:])
    for start, jump in zip(starts[1:], jumps, strict=True):
        positions[start:] = torch.arange(start, length) + jump
    if rng.random() < skip.repeat:
        first, last = starts[1], length - starts[-1]
        size = min(first, last)
        source = rng.randint(0, first - size)
        input_ids = input_ids.clone()
        input_ids[starts[-1] : starts[-1] + size] = input_ids[source : source + size]
    return input_ids, positions
