"""What kernels compute: one call over an interval of keys for each row, and its logits; and a kernel, by what computes one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..geometry import Rows

if TYPE_CHECKING:  # they know methods and configs
    from ..call import Call
    from ..segments import Segment
    from ..turned import Keep

#: The logit of a masked pair: its probability is exactly 0, and no arithmetic on it gives NaN.
MASK_VALUE = -1e30
#: Up to this many queries a call is decoding: what is done to keys is done as they are read, and no second cache is kept.
FEW_QUERIES = 16
#: torch's fused kernel for the CPU, which gives the logsumexp too.
FUSED = "_scaled_dot_product_flash_attention_for_cpu"
#: By how much tables should be longer than the largest distance: the Triton kernel reads so far beyond it.
MARGIN = 256


@dataclass(frozen=True, eq=False)
class LogitSpec:
    """The logit of query row i and key j at the distance t = |position_i - position_j|:

        L_ij = x_i gain_t C(S_ij) + y_i bias_t,    S = scaling q . k,    C(s) = c tanh(s / c) or s

    Args:
        softcap: c.
        gain, bias: (heads or 1, length) by distance; both or neither; length must exceed every distance.
        row_scale, bias_scale: x and y, (batch, heads, q_len), differentiable; None is 1.
        sinks: the keys at the first positions of a sequence that have gain 1 and bias 0.
        far: int64 without a dimension, the distance from which on the tables are smooth (see `triton`); None: not known.
    """

    scaling: float
    softcap: float | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None
    row_scale: Tensor | None = None
    bias_scale: Tensor | None = None
    sinks: int = 0
    far: Tensor | None = None
    _sharpened: dict[float, LogitSpec] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if (self.gain is None) != (self.bias is None):
            raise ValueError("gain and bias come together")

    def sharpened(self, factor: float) -> LogitSpec:
        """The same with another scaling, made once: every layer of a decoded token asks for it."""
        if (known := self._sharpened.get(factor)) is None:
            known = self._sharpened[factor] = dataclasses.replace(self, scaling=self.scaling * factor, _sharpened={})
        return known


#: Output like query; logsumexp and entropy (nats) of every row before dropout, (batch, heads, q_len) in logits' dtype: empty
#: unless asked for. Fully masked rows give 0, -inf and 0.
Result: TypeAlias = tuple[Tensor, Tensor, Tensor]


class KernelCall(NamedTuple):
    """What a kernel computes at a time; all tensors of one layer.

    Args:
        query: (batch, heads, q_len, head_dim), any float dtype; logits are float32 (float64 for float64 inputs).
        key, value: (batch, kv_heads, kv_len, head_dim).
        value: None to leave the output empty, which saves its product.
        seed: dropout's.
        with_lse, with_entropy: whether these are asked for; differentiable.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    rows: Rows
    spec: LogitSpec
    dropout: float = 0.0
    seed: Tensor | None = None
    with_lse: bool = False
    with_entropy: bool = False

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    def logits(self, which: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """Of some rows by their definition, (batch, heads, n, keys), and which pairs are visible, bool, broadcastable to that.

        Args:
            which: numbers of rows, int64 (n,).
            keys: how many keys from the first on.
        """
        spec, rows, query = self.spec, self.rows.take(which), self.query[:, :, which]
        batch, heads, n, width = query.shape  # query heads that share a key head are multiplied with it together
        together = query.reshape(batch, self.key.shape[1], -1, width) @ self.key[:, :, :keys].transpose(-1, -2)
        logits = together.reshape(batch, heads, n, -1).mul_(spec.scaling)
        if spec.softcap:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if spec.row_scale is not None:
            logits = spec.row_scale[:, :, which, None] * logits
        if spec.gain is not None and spec.bias is not None:
            t = rows.distance(keys)
            gain, bias = (x[:, t].transpose(0, 1) for x in (spec.gain, spec.bias))
            bias = bias if spec.bias_scale is None else spec.bias_scale[:, :, which, None] * bias
            logits = torch.where(rows.sinks(keys, spec.sinks)[:, None], logits, gain * logits + bias)
        return logits, rows.visible(keys)


class KernelFailure(RuntimeError):
    """A kernel could not be compiled or loaded on this machine; nothing was computed."""


def count_keys(segments: list[Segment], kv_len: int) -> Tensor:
    """How many keys each row sees in segments, int64 (batch or 1, heads or 1, q_len)."""
    return functools.reduce(torch.add, (segment.rows.count(kv_len) for segment in segments))


class Computation(Protocol):
    """How the segments of a call are computed, for every layer that shares them (see `prepared.Prepared`)."""

    @property
    def count(self) -> Tensor:
        """How many keys each row sees, int64 (batch or 1, heads or 1, q_len)."""

    def factor(self, by_row: Tensor) -> Any:
        """A temperature by length, (batch or 1, heads or 1, q_len), as it is computed with."""

    def sinks(self, by_head: Tensor) -> Any:
        """The logarithm of what joins the denominators, (heads,), likewise."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: Any,
        sinks: Any,
        keep: Keep | None = None,
    ) -> Tensor:
        """The weighted sum of values, (batch, heads, q_len, head_dim); all but factor and sinks as of `Call`."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute a call: a file with a `KERNEL`.

    Args:
        why_not: the reason why it cannot compute a call exactly, or None.
        run: computes one segment of a call; None: see `together`.
        picked: whether "auto" takes it for a call that it can compute, in the order of `attend.KERNELS`; None: by name alone.
        wide: it computes in float32 at least, so that scores and temperatures are folded in that.
        entropies: it gives each row's entropy.
        tempered: the output of a call without gradients whose finished logits are multiplied by a factor of each row's
            entropy: from the entropies of some heads and rows, (heads, group, rows), to it; None: that takes two runs.
        joined: where rows may be read, the output over all segments and sinks, (heads,); None: their runs are merged.
        together: computes all segments of a call together, in place of run.
    """

    name: str
    why_not: Callable[[Call], str | None]
    run: Callable[[KernelCall], Result] | None = None
    picked: Callable[[Call], bool] | None = None
    wide: bool = False
    entropies: bool = False
    tempered: Callable[[KernelCall, Callable[[Tensor], Tensor]], Tensor] | None = None
    joined: Callable[[list[KernelCall], Tensor | None], Tensor] | None = None
    together: Callable[[Call, list[Segment], LogitSpec], Computation] | None = None


def entropy(log_p: Tensor) -> Tensor:
    """-Σ p ln p over the last dimension, in nats: terms of one sign, nothing cancels."""
    return -torch.linalg.vecdot(log_p.exp(), log_p)
