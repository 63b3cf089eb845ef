"""Stages that every way of computing a call shares; `reference.py` has its own, so that it shows what is wrong here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig


def learned_part(learned: Mapping[str, nn.Module] | None, slot: str, x: Tensor) -> Tensor:
    """Apply the learned part of a slot to its number, if there is one."""
    return learned[slot](x) if learned is not None and slot in learned else x  # type: ignore[no-any-return]


def joint_sinks(
    config: LongAttnConfig, query: Tensor, learned: Mapping[str, nn.Module] | None, sink_logits: Tensor | None
) -> Tensor | None:
    """The logarithm of what joins the denominators, (heads,): the config's sink and the model's own, if there are any."""
    if config.sink is None:
        return sink_logits
    own = config.sink.logits(query.shape[1], query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32)))
    own = learned_part(learned, "sink", own)
    return own if sink_logits is None else torch.logaddexp(own, sink_logits.to(own))


def finish(config: LongAttnConfig, output: Tensor, learned: Mapping[str, nn.Module] | None) -> Tensor:
    """The stages after the weighted sum of values: the output norm."""
    if config.output_norm is None:
        return output
    affine = learned["output_norm"] if learned is not None and "output_norm" in learned else None
    return config.output_norm.normalise(output, affine)
