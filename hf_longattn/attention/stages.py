"""Stages of a call that every way of computing it shares; `reference.py` has its own, so that it shows what is wrong here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig
from ..slots.base import LengthTemperature
from .call import Call
from .rotary import Rotation


def require_rotation(rotation: Rotation | None) -> Rotation:
    if rotation is None:
        raise ValueError("a remap of rotary distances needs rotation=hf_longattn.Rotation(inv_freq): the model's frequencies")
    return rotation


def length_factor(
    config: LongAttnConfig, visible: Tensor, query: Tensor, learned: Mapping[str, nn.Module] | None
) -> Tensor | None:
    """The temperature for rows that see `visible` keys, (batch or 1, heads or 1, q_len) in the logits' dtype, or None."""
    if not isinstance(config.temperature, LengthTemperature):
        return None
    factor = config.temperature.factor(visible.double(), query.shape[-1])
    if learned is not None and "temperature" in learned:
        factor = learned["temperature"](factor)
    return factor.to(torch.promote_types(query.dtype, torch.float32))


def sink_of(call: Call) -> Tensor | None:
    """The logarithm of what joins the denominators, (heads,): the config's sink and the model's own, if there are any."""
    return joint_sink(call.config, call.query, call.learned, call.sink_logits)


def joint_sink(
    config: LongAttnConfig, query: Tensor, learned: Mapping[str, nn.Module] | None, sink_logits: Tensor | None
) -> Tensor | None:
    """`sink_of`, of a call in parts."""
    if config.sink is None:
        return sink_logits
    own = config.sink.logits(query.shape[1], query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32)))
    if learned is not None and "sink" in learned:
        own = learned["sink"](own)
    return own if sink_logits is None else torch.logaddexp(own, sink_logits.to(own))


def finish(config: LongAttnConfig, output: Tensor, learned: Mapping[str, nn.Module] | None) -> Tensor:
    """The stages after the weighted sum of values: the output norm."""
    if config.output_norm is None:
        return output
    affine = learned["output_norm"] if learned is not None and "output_norm" in learned else None
    return config.output_norm.normalise(output, affine)
