"""Accuracy and log-likelihood of answers, from one forward pass over prompt and answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .losses import Prefix, last_hidden, logits_of


@dataclass(frozen=True)
class AnswerScore:
    """One answer: its log-likelihood (nats, the sum over its tokens), its tokens, and whether greedy decoding gives it.

    `exact` is decided with the true tokens before each one; for the first answer of a text that is the same as generating it.
    """

    log_likelihood: float
    tokens: int
    exact: bool


@torch.inference_mode()
def answer_scores(
    model: Any, input_ids: Tensor, spans: Sequence[tuple[int, int]], prefix: Prefix | None = None
) -> list[AnswerScore]:
    """Score the answers at positions [first, last) of a text (1, length); logits are made for these positions only.

    `prefix` is the KV cache of the first tokens, before the first answer, if they have been read.

    Raises:
        ValueError: a span is empty, starts at the first token or ends beyond the text.
    """
    for first, last in spans:
        if not 1 <= first < last <= input_ids.shape[1]:
            raise ValueError(f"an answer at [{first}, {last}) does not lie in a text of {input_ids.shape[1]} tokens")
    hidden, out = last_hidden(model, input_ids, prefix=prefix), []
    for first, last in spans:
        logits, target = logits_of(model, hidden[:, first - 1 : last - 1]), input_ids[:, first:last]
        losses = torch.nn.functional.cross_entropy(logits[0], target[0], reduction="none")
        out.append(AnswerScore(-float(losses.sum()), last - first, bool((logits.argmax(-1) == target).all())))
    return out
