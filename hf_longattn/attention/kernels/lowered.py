"""What kernels compute: a lowered call, in segments; and a kernel, by what computes one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..geometry import Rows
from .spec import MASK_VALUE, LogitSpec, Result

if TYPE_CHECKING:  # they know methods and configs
    from ..call import Call
    from ..rotary import Rotation


class KVSegment(NamedTuple):
    """An interval of keys that are rotated alike.

    Args:
        rotation, angles: where keys are to be re-rotated as they are read: cos and sin by feature (see `Rotation.by_feature`).
    """

    query: Tensor
    key: Tensor
    rows: Rows
    rotation: Rotation | None = None
    angles: tuple[Tensor, Tensor] | None = None

    def scores(self, which: Tensor, keys: int) -> Tensor:
        """q . k of some rows with the first `keys` keys, (batch, heads, n, keys)."""
        query, key = self.query[:, :, which], self.key[:, :, :keys]
        if self.rotation is None or self.angles is None:
            return _product(query, key)
        cos, sin = (x[:, :keys].transpose(1, 2).to(key.dtype) for x in self.angles)
        return _product(query, cos * key) + _product(self.rotation.rotate_half(query), sin * key)


@dataclass(frozen=True, eq=False)
class LoweredAttention:
    """One call, lowered: what kernels compute.

    Args:
        sink_logits: (heads,), a term in the denominator of every softmax, which joins when segments are merged.
        factor: the temperature by length, (batch or 1, heads or 1, q_len), which spec and segments contain; None without one.
        of_entropy: every row's entropy over its keys is asked for, and no output.
    """

    call: Call
    segments: tuple[KVSegment, ...]
    spec: LogitSpec
    sink_logits: Tensor | None = None
    factor: Tensor | None = None
    of_entropy: bool = False

    @property
    def value(self) -> Tensor:
        """(batch, kv_heads, kv_len, head_dim); None where the output is to stay empty, which only some kernels take."""
        return None if self.of_entropy else self.call.value  # type: ignore[return-value]

    @property
    def dropout(self) -> float:
        return 0.0 if self.of_entropy else self.call.dropout

    @property
    def with_lse(self) -> bool:
        """Whether segments are merged, by their logsumexps."""
        return len(self.segments) > 1 or (self.sink_logits is not None and not self.of_entropy)

    @property
    def half(self) -> torch.dtype:
        """What kernels that compute half precision take queries and keys in."""
        return (self.segments[0].key if self.of_entropy else self.call.value).dtype

    @property
    def is_plain(self) -> bool:
        """Whether what is left is softmax(scaling q . k) over plain rows."""
        plain = self.spec.gain is None and not self.spec.softcap and len(self.segments) == 1
        return plain and self.call.rows.plain is not None and self.sink_logits is None

    def scaled(self, factor: Tensor) -> LoweredAttention:
        """The same call with its finished logits times a factor for each row, (batch, heads, q_len)."""
        out = self.with_scores(factor)
        if self.spec.gain is None:
            return out
        return dataclasses.replace(out, spec=dataclasses.replace(out.spec, bias_scale=factor))

    def with_scores(self, factor: Tensor) -> LoweredAttention:
        """Its scores times a factor for each row: on the query, or after the softcap where the model has one."""
        if self.spec.softcap:
            row_scale = factor.expand(self.segments[0].query.shape[:3])
            return dataclasses.replace(self, spec=dataclasses.replace(self.spec, row_scale=row_scale))
        segments = (s._replace(query=(s.query * factor[..., None]).to(s.query.dtype)) for s in self.segments)
        return dataclasses.replace(self, segments=tuple(segments))

    def logits(self, which: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """The logits of some rows, (batch, heads, n, keys) with MASK_VALUE at masked pairs, and which pairs are visible.

        Args:
            which: numbers of rows, int64 (n,).
            keys: how many keys from the first on; no row may see more.
        """
        spec, batch, heads = self.spec, *self.segments[0].query.shape[:2]
        logits = self.segments[0].query.new_full((batch, heads, len(which), keys), MASK_VALUE)
        visible = torch.zeros(1, dtype=torch.bool, device=logits.device)
        for segment in self.segments:
            own = segment.rows.take(which).visible(keys)
            logits = torch.where(own, segment.scores(which, keys).mul_(spec.scaling), logits)
            visible = visible | own
        if spec.softcap:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if spec.row_scale is not None:
            logits = spec.row_scale[:, :, which, None] * logits
        if spec.gain is not None and spec.bias is not None:
            t = self.call.rows.distance(keys, which)
            gain, bias = (x[:, t].transpose(0, 1) for x in (spec.gain, spec.bias))
            sinks = self.call.rows.take(which).sinks(keys, spec.sinks)[:, None]
            bias = bias if spec.bias_scale is None else spec.bias_scale[:, :, which, None] * bias
            logits = torch.where(sinks, logits, gain * logits + bias)
        return logits.masked_fill(~visible, MASK_VALUE), visible

    def log_weights(self, logits: Tensor) -> Tensor:
        """The logarithm of the attention weights, (batch, heads, n, keys); with sinks they add up to less than 1."""
        if self.sink_logits is None:
            return torch.log_softmax(logits, -1)
        sink = self.sink_logits.to(logits)[:, None, None]
        return logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), sink)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute a call: a file with a `KERNEL`, and its name in `config.BACKENDS`.

    Args:
        why_not: the reason why it cannot compute a call exactly, or None.
        run: computes one segment of a lowered call, as `tiled.tiled_attention` defines it.
        picked: whether "auto" takes it for a call that it can compute, in the order of `BACKENDS`; None: by name alone.
        wide: it computes in float32 at least, so that scores and temperatures are folded in that.
        entropies: it gives each row's entropy.
    """

    name: str
    why_not: Callable[[Call], str | None]
    run: Callable[[LoweredAttention, KVSegment], Result]
    picked: Callable[[Call], bool] | None = None
    wide: bool = False
    entropies: bool = False


def _product(query: Tensor, key: Tensor) -> Tensor:
    """q . k, (batch, heads, n, keys); query heads that share a key head are multiplied with it together."""
    batch, heads, n, width = query.shape
    together = query.reshape(batch, key.shape[1], -1, width) @ key.transpose(-1, -2)
    return together.reshape(batch, heads, n, -1)
