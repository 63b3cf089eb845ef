"""Stages that every way of computing a call shares; `reference.py` has its own, so that it shows what is wrong here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig
from .tables import TableCache


def learned_part(learned: Mapping[str, nn.Module] | None, slot: str, x: Tensor) -> Tensor:
    """Apply the learned part of a slot to its number, if there is one."""
    return learned[slot](x) if learned is not None and slot in learned else x  # type: ignore[no-any-return]


def joint_sinks(
    config: LongAttnConfig,
    tables: TableCache,
    query: Tensor,
    learned: Mapping[str, nn.Module] | None,
    sink_logits: Tensor | None,
) -> Tensor | None:
    """The logarithm of what joins the denominators, (heads,): the config's sink and the model's own, if there are any."""
    if (sink := config.sink) is None:
        return sink_logits
    heads, wide = query.shape[1], torch.promote_types(query.dtype, torch.float32)
    name = sink, heads, query.device, wide
    (own,) = tables.beside(query, name, lambda: (sink.logits(heads, query.new_empty(0, dtype=wide)),))
    own = learned_part(learned, "sink", own)
    return own if sink_logits is None else torch.logaddexp(own, sink_logits.to(own))


def finish(config: LongAttnConfig, tables: TableCache, output: Tensor, learned: Mapping[str, nn.Module] | None) -> Tensor:
    """The stages after the weighted sum of values: the output norm."""
    if (norm := config.output_norm) is None:
        return output
    affine = learned["output_norm"] if learned is not None and "output_norm" in learned else None
    wide = torch.promote_types(output.dtype, torch.float32)
    name = norm, output.device, wide
    constants = tables.beside(output, name, lambda: norm.constants(output.new_empty(0, dtype=wide)))
    return norm.normalise(output, affine, *constants).to(output.dtype)  # a learned part may be wider
