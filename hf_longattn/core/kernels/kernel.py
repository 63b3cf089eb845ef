"""A kernel's call, over an interval of keys for each row, with its logits by definition; and a kernel, with what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..geometry import AttentionLayout
from ..plan import AttentionPlan, Computation, LogitSpec

#: The logit of a masked pair: its probability is exactly 0, and no arithmetic on it gives NaN.
MASK_VALUE = -1e30
#: Up to this many queries a call is decoding: what is done to keys is done as they are read, and no second cache is kept.
FEW_QUERIES = 16
#: By how much tables should be longer than the largest distance: the Triton kernel reads so far beyond it.
MARGIN = 256


#: Output like query; logsumexp and entropy (nats) of every row before dropout, (batch, heads, q_len) in logits' dtype: empty
#: unless asked for. Fully masked rows give 0, -inf and 0.
Result: TypeAlias = tuple[Tensor, Tensor, Tensor]


class KernelCall(NamedTuple):
    """One computation of a kernel; all tensors are of one layer.

    Args:
        query: (batch, heads, q_len, head_dim), any float dtype; logits are float32 (float64 for float64 inputs).
        key, value: (batch, kv_heads, kv_len, head_dim); value None leaves the output empty, which saves its product.
        rows: which keys each query sees, and how far away they are.
        spec: how logits are made of scores.
        dropout: the probability with which a weight becomes 0; seed: where its numbers start.
        with_lse, with_entropy: whether these are asked for; differentiable.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    rows: AttentionLayout
    spec: LogitSpec
    dropout: float = 0.0
    seed: Tensor | None = None
    with_lse: bool = False
    with_entropy: bool = False

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    def logits(self, which: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """The logits of some rows by definition, (batch, heads, n, keys), and the visible pairs, bool, broadcastable to them.

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


def by_token(like: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (batch, heads, length, width) with a token's heads beside each other, as a model's own layers want it."""
    batch, heads, length, own = like.shape
    return like.new_empty(batch, length, heads, own if width is None else width, dtype=dtype).transpose(1, 2)


def without_denormals(p: Tensor) -> Tensor:
    """Set to 0, in place, probabilities that are denormal numbers, or whose products with gradients are.

    A steep bias makes many, and some CPUs multiply them several times more slowly.
    """
    return torch.threshold_(p, 2.0**24 * torch.finfo(p.dtype).tiny, 0.0)


class KernelFailure(RuntimeError):
    """A kernel could not be compiled or loaded on this machine; nothing was computed."""


#: Stages that a kernel may lack: the reason in words why a plan needs one, or None where it does not; asked in this order.
STAGES: dict[str, Callable[[AttentionPlan], str | None]] = {
    "softcap": lambda plan: "the model caps its scores" if plan.logits.softcap else None,
    "map": lambda plan: f"{plan.names['logit_map']} changes logits by distance" if plan.logits.gain is not None else None,
    "tables": lambda plan: f"{plan.names['logit_map']} learns its tables" if plan.logits.learns else None,
    "dropout": lambda plan: "it has no dropout" if plan.dropout else None,
    "gradients": lambda plan: "it has no gradients" if plan.trains else None,
}


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to compute a plan, and what it can compute; a file with a `KERNEL`.

    Args:
        prepare: from a plan to the computation of its layers.
        lacks: names of STAGES that it cannot compute.
        queries: how many it takes at most; None: any number.
        why_not: the reason why it cannot compute a plan exactly beyond that, or None.
        preferred: whether "auto" takes it for a plan that it can compute, in `attend.KERNELS`' order; None: by name alone.
    """

    prepare: Callable[[AttentionPlan], Computation]
    lacks: frozenset[str] = frozenset()
    queries: int | None = None
    why_not: Callable[[AttentionPlan], str | None] = lambda _: None
    preferred: Callable[[AttentionPlan], bool] | None = None

    def refuses(self, plan: AttentionPlan) -> str | None:
        """The reason why it cannot compute a plan exactly, or None."""
        for stage, needed in STAGES.items():
            if stage in self.lacks and (reason := needed(plan)) is not None:
                return reason
        if (reason := self.why_not(plan)) is not None:
            return reason
        if self.queries is not None and not 0 < plan.query.shape[2] <= self.queries:  # last: some graphs compare no lengths
            return f"it takes up to {self.queries} queries"
        return None


def entropy(log_p: Tensor) -> Tensor:
    """-Σ p ln p over the last dimension, in nats: terms of one sign, nothing cancels."""
    return -torch.linalg.vecdot(log_p.exp(), log_p)
