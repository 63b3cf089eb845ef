"""Few queries against many keys that have to be re-rotated: done as keys are read, so that no second KV cache is kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Rows
from .spec import KernelCall, LogitSpec
from .tiles import Blocks, Tile, dropout_seed, halves_are_fast

#: Elements of keys re-rotated at a time.
KEY_ELEMENTS = 1 << 19


class KeyRotation(NamedTuple):
    """Re-rotated keys in S_ij = scaling (q_i . (cos_j k_j) + half_i . (sin_j k_j)).

    Args:
        half: like the query (see `Rotation.rotate_half`).
        cos, sin: (batch or 1, kv_len, kv_heads or 1, head_dim), see `Rotation.by_feature`.
    """

    half: Tensor
    cos: Tensor
    sin: Tensor


def decoding_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    rows: Rows,
    spec: LogitSpec,
    rotation: KeyRotation,
    *,
    dropout: float = 0.0,
    with_lse: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tiled.tiled_attention` with keys that are re-rotated as they are read; without a gradient."""
    call = KernelCall(query, key, value, rows, spec, dropout, dropout_seed(dropout), with_lse, with_entropy)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return _Rerotating(call, rotation, halves_are_fast(value)).attend()


class _Rerotating(Blocks):
    def __init__(self, call: KernelCall, rotation: KeyRotation, half: bool) -> None:
        super().__init__(call, half)
        query, self.cos, self.sin = (x.to(self.dtype) for x in rotation)
        self.half_query = self.grouped(query)

    def products(self, tile: Tile, out: Tensor) -> None:
        half = tile.rows(self.half_query).mul_(self.spec.scaling).view(*tile.flat, -1)
        cos, sin = (x[tile.b if x.shape[0] > 1 else 0, tile.c].transpose(0, 1) for x in (self.cos, self.sin))
        cos, sin = (x[tile.h] if x.shape[0] > 1 else x for x in (cos, sin))
        step = max(KEY_ELEMENTS // tile.key[:, 0].numel(), 16)
        for c in range(0, tile.shape[3], step):
            columns = slice(c, c + step)
            key = tile.key[:, columns]
            product = self.buffer("products", *key.shape)
            if tile.flat[1] == 1:  # a query of its own for each key takes one pass less
                torch.mul(cos[:, columns], tile.query, out=product).addcmul_(sin[:, columns], half).mul_(key)
                torch.sum(product, -1, out=out[:, 0, columns])
                continue
            out[..., columns] = torch.bmm(tile.query, torch.mul(key, cos[:, columns], out=product).transpose(1, 2))
            out[..., columns].baddbmm_(half, torch.mul(key, sin[:, columns], out=product).transpose(1, 2))
