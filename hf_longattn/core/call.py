"""One attention call of one layer, as one object."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig
from .geometry import AttentionLayout
from .rotary import Rotation
from .rotated_keys import Keep
from .tables import SHARED, TableCache


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of one layer.

    Args:
        query: (batch, heads, q_len, head_dim), any float dtype; logits are float32 at least.
        key, value: (batch, kv_heads, kv_len, head_dim); kv_heads divides heads.
        config: the layer's own (`config.for_layer(i)`).
        rows: which keys each query sees, and how far away they are.
        scaling: the factor on q . k.
        softcap: the model's own cap on its score; it acts before every method but the score's.
        learned: the learned parts of methods by slot; without it they are what they start as.
        rotation: how query and key are rotated; needed where the config remaps rotary distances.
        sink_logits: (heads,), the model's learned sinks: exp(sink) is one more term in the denominator of every softmax,
            beside that of a method; no method acts on it.
        backend: "auto" takes `config.backend`; any other name stands in its place.
        tables: the cache that keeps tables for the next call, a model's own; None: one that all calls without it share.
        strength: the logit map's, in place of the config's: a number that a compiled graph reads when it runs.
        method_id: stands for config, rotation and backend: one object where all three are equal, which is quicker to compare.
            None: they themselves are compared, and no rotated keys are kept.
        keep: finds the rotated keys that an earlier token left (see `rotated_keys`); None: none are kept.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    config: LongAttnConfig
    rows: AttentionLayout
    scaling: float
    softcap: float | None = None
    dropout: float = 0.0
    learned: Mapping[str, nn.Module] | None = None
    rotation: Rotation | None = None
    sink_logits: Tensor | None = None
    backend: str = "auto"
    tables: TableCache | None = None  # Dynamo wraps no default that is an object
    strength: Tensor | None = None
    method_id: Hashable = None
    keep: Keep | None = None

    def under(self, config: LongAttnConfig) -> Call:
        """The call under another config, without learned parts.

        Use this and not `dataclasses.replace`: plans are found by `method_id`, which would still stand for the old config.
        """
        return dataclasses.replace(self, config=config, learned=None, method_id=None, keep=None)

    @property
    def kv_len(self) -> int:
        """The number of keys of the call."""
        return self.key.shape[2]

    @property
    def asked(self) -> str:
        """The backend that the caller, or else the config, names, or "auto"."""
        return self.config.backend if self.backend == "auto" else self.backend

    @property
    def table_cache(self) -> TableCache:
        """The cache in which its tables are kept."""
        return SHARED if self.tables is None else self.tables

    @property
    def trains(self) -> bool:
        """True if gradients may be asked for, of tensors or of learned parts."""
        if not torch.is_grad_enabled():
            return False
        parts = [getattr(part, "func", part) for part in (self.learned or {}).values()]  # those of some heads hold theirs
        tensors = (self.query, self.key, self.value, *(parameter for part in parts for parameter in part.parameters()))
        return any(x.requires_grad for x in tensors)
