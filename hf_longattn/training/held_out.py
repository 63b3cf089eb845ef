"""Loss and needle accuracy by length: during training, and for the metrics file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..evaluation import answer_scores, loss_by_position, token_losses
from ..evaluation.tasks import NeedleTask
from .data import Data
from .recipe import Recipe

#: Told how many tokens were read.
Tick = Callable[[int], Any]


def held_out_sums(
    model: Any,
    recipe: Recipe,
    data: Data,
    lengths: list[int],
    share: tuple[int, int] = (0, 1),
    tick: Tick = lambda tokens: None,
) -> dict[int, Tensor]:
    """Sums per length, float64, so that processes can add theirs up; `share` is (this process, processes).

    All processes make equally many forward passes, as sharded weights need: one that has less to do repeats a text.

    Text: summed loss and tokens of each doubling range of positions (see `edges`), shape (ranges, 2). Needles: summed loss of
    the answers and their tokens, then needles found and needles, shape (2, 2).
    """
    model.eval()
    out = {}
    for length in lengths:
        if data.test_task is not None:
            count = recipe.evaluation.samples
            found = torch.zeros(2, 2, dtype=torch.float64, device="cpu")
            for i in range(*_mine(count, share)):
                found += (i < count) * _needle(model, data.test_task, i % count, length)
                tick(length)
            out[length] = found
            continue
        windows = windows_of(data.held_out, length, recipe.evaluation.tokens, data.start)
        total = torch.zeros(len(edges(length)) - 1, 2, dtype=torch.float64, device="cpu")
        for i in range(*_mine(len(windows), share)):
            losses = token_losses(model, windows[i % len(windows)][None].to(model.device)).cpu()
            counts = torch.tensor([b - a for a, b in pairwise(edges(length))], device="cpu")
            sums = torch.stack([torch.tensor(loss_by_position(losses, edges(length)), device="cpu") * counts, counts], 1)
            total += (i < len(windows)) * sums.double()
            tick(length)
        out[length] = total
    return out


def metrics(sums: dict[int, Tensor], needles: bool) -> dict[int, dict[str, Any]]:
    """For each length the mean loss (nats per token) with its parts by position, or with needle accuracy."""
    out: dict[int, dict[str, Any]] = {}
    for length, s in sums.items():
        if needles:
            out[length] = {"loss": float(s[0, 0] / s[0, 1]), "accuracy": float(s[1, 0] / s[1, 1]), "needles": int(s[1, 1])}
        else:
            loss, tokens = s.sum(0).tolist()
            parts = {f"{a}-{b}": float(x / n) for (a, b), (x, n) in zip(pairwise(edges(length)), s, strict=True)}
            out[length] = {"loss": loss / tokens, "tokens": int(tokens), "by_position": parts}
    return out


def edges(length: int) -> list[int]:
    """1, then halves of the length down to a sixteenth: positions by their order of magnitude."""
    return [1, *(e for e in (length // 16, length // 8, length // 4, length // 2) if e > 1), length]


def windows_of(held_out: Tensor, length: int, budget: int, start: Sequence[int] = ()) -> Tensor:
    """(windows, length): about `budget` tokens, spread evenly over the text, each behind `start`; at least one window."""
    count = _windows_in(held_out, length, budget)
    starts = [i * (len(held_out) // length) // count * length for i in range(count)]
    return torch.stack([torch.cat([held_out.new_tensor(start), held_out[s : s + length - len(start)]]) for s in starts])


def _windows_in(held_out: Tensor, length: int, budget: int) -> int:
    return min(max(budget // length, 1), len(held_out) // length)


def texts_read(recipe: Recipe, data: Data, lengths: Sequence[int]) -> list[int]:
    """The length of every text that `held_out_sums` reads."""
    if data.test_task is not None:
        return [n for n in lengths for _ in range(recipe.evaluation.samples)]
    return [n for n in lengths for _ in range(_windows_in(data.held_out, n, recipe.evaluation.tokens))]


def _needle(model: Any, task: NeedleTask, index: int, length: int) -> Tensor:
    sample = task.sample(index, length)
    ids = sample.input_ids[None].to(model.device)
    whole, *each = answer_scores(model, ids, [(sample.prompt_length, length), *sample.spans])
    result = sum(score.exact for score in each)
    return torch.tensor([[-whole.log_likelihood, whole.tokens], [result, len(each)]], dtype=torch.float64, device="cpu")


def _mine(count: int, share: tuple[int, int]) -> tuple[int, int, int]:
    rank, processes = share
    return rank, -(-count // processes) * processes, processes
