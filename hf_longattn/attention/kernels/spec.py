"""One call and its logits, as every kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..geometry import Rows

#: The logit of a masked pair: its probability is exactly 0, and no arithmetic on it gives NaN.
MASK_VALUE = -1e30


@dataclass(frozen=True, eq=False)
class LogitSpec:
    """The logit of query row i and key j at the distance t = |position_i - position_j|:

        L_ij = x_i gain_t C(S_ij) + y_i bias_t,    S = scaling q . k,    C(s) = c tanh(s / c) or s

    Args:
        softcap: c.
        gain, bias: (heads or 1, length) by distance; both or neither; length must exceed every distance.
        row_scale, bias_scale: x and y, (batch, heads, q_len), differentiable; None is 1.
        sinks: the keys at the first positions of a sequence that have gain 1 and bias 0.
    """

    scaling: float
    softcap: float | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None
    row_scale: Tensor | None = None
    bias_scale: Tensor | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if (self.gain is None) != (self.bias is None):
            raise ValueError("gain and bias come together")


#: Output, logsumexp and entropy of every row; the latter two empty unless asked for.
Result: TypeAlias = tuple[Tensor, Tensor, Tensor]


class KernelCall(NamedTuple):
    """One call of the tiled kernel, see `tiled.tiled_attention`; the seed is dropout's."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    rows: Rows
    spec: LogitSpec
    dropout: float
    seed: Tensor | None
    with_lse: bool
    with_entropy: bool
