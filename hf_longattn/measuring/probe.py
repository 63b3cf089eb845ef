"""A probe of far distances: 1,408 tokens whose position_ids jump stand for a text of any length.

A passage is read, then, some positions farther on, other text and a repetition of the passage's first tokens. The loss on the
text tells whether the model still reads at that position, the loss on the copy whether it still finds what lies so far back.
Seconds a distance, where reading takes minutes. It knows nothing of dilution: a long text has many more keys between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..integration.planning import bound_config
from .evaluation.copying import PASSAGE, SKIP
from .evaluation.losses import logits_of
from .evaluation.statistics import mean_interval

#: Tokens before the jump, of other text after it, and in all.
BEFORE, AFTER = 1024, 256
TOKENS = BEFORE + AFTER + PASSAGE


@dataclass(frozen=True)
class Probe:
    """Losses in nats per token of each passage at each distance.

    Args:
        distances: from the passage's first tokens to their copy, in positions.
        text, copies: float32 (passages, distances).
        trained: the length that the model was trained at, if its config tells.
    """

    distances: tuple[int, ...]
    text: Tensor
    copies: Tensor
    trained: int | None

    def rows(self) -> list[dict[str, Any]]:
        """Mean and half-width of the 95 % interval over passages, by distance."""
        out = []
        for n, distance in enumerate(self.distances):
            (text, text_width), (copy, copy_width) = (mean_interval(x[:, n].tolist()) for x in (self.text, self.copies))
            out.append({"distance": distance, "text": [text, text_width], "copy": [copy, copy_width]})
        return out


def distances_to(to: int, points: int = 8) -> tuple[int, ...]:
    """Distances at equal steps up to `to`, from the least that the probe can show."""
    least = BEFORE + AFTER
    if to < least:
        raise ValueError(f"the probe shows distances from {least} on, not {to}")
    return tuple(dict.fromkeys(least + (to - least) * n // max(points - 1, 1) for n in range(points)))


def passages(input_ids: Tensor, count: int = 4) -> Tensor:
    """Passages from all over a text (1, length), for `probe`: (count, BEFORE + AFTER).

    Raises:
        ValueError: the text is too short for so many.
    """
    size, length = BEFORE + AFTER, input_ids.shape[1]
    if length < count * size:
        raise ValueError(f"{count} passages of {size} tokens need a text of {count * size} tokens, not {length}")
    starts = [n * (length - size) // max(count - 1, 1) for n in range(count)]
    return torch.cat([input_ids[:, start : start + size] for start in starts])


@torch.inference_mode()
def probe(model: Any, input_ids: Tensor, distances: Sequence[int]) -> Probe:
    """Loss after a jump in positions, and on a copy of what was read before it.

    Args:
        model: a causal language model that takes position_ids; with or without a method.
        input_ids: (passages, BEFORE + AFTER), see `passages`.
        distances: from the passage's first tokens to their copy, each >= BEFORE + AFTER.

    Raises:
        ValueError: a distance is too short, or a passage not of that length.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] != BEFORE + AFTER:
        raise ValueError(f"passages must be (passages, {BEFORE + AFTER}), got {tuple(input_ids.shape)}")
    if not distances or min(distances) < BEFORE + AFTER:
        raise ValueError(f"the probe shows distances from {BEFORE + AFTER} on, not {list(distances)}")
    ids = torch.cat([input_ids, input_ids[:, :PASSAGE]], 1).to(model.device)
    text, copies = [], []
    for distance in distances:
        position_ids = torch.arange(TOKENS, device=ids.device)
        position_ids[BEFORE:] += distance - BEFORE - AFTER
        hidden = model.base_model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),  # without a mask a jump would start a new text
            position_ids=position_ids.expand_as(ids),
            use_cache=False,
        ).last_hidden_state[:, BEFORE:-1]
        losses = torch.nn.functional.cross_entropy(logits_of(model, hidden).mT, ids[:, BEFORE + 1 :], reduction="none").cpu()
        text.append(losses[:, : AFTER - 1].mean(1))
        copies.append(losses[:, AFTER - 1 + SKIP :].mean(1))
    trained = bound_config(model, LongAttnConfig())[1].train_length
    return Probe(tuple(distances), torch.stack(text, 1), torch.stack(copies, 1), trained)
