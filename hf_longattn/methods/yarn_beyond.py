"""YaRN only beyond the trained length: rows within it keep the model's own RoPE, and so their logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..slots.base import Band
from ..slots.remap import known
from .yarn import YarnPositions

#: Beyond every position.
NEVER = 1 << 30


@dataclass(frozen=True, kw_only=True)
class YarnBeyond(YarnPositions):
    """Rows at positions i < train_length see RoPE as it is; the others see query and keys as YaRN rotates and scales them.

    Distances stay as they are. All keys of one row are rotated in the same way, so that a row beyond computes what stock YaRN
    does from the same hidden states. Parameters: see `YarnPositions`.

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), Sections 3.2 and 3.4; applied by
    row here, where it is published for whole texts.
    """

    name: ClassVar[str] = "yarn_beyond"
    paper: ClassVar[str] = "Peng et al. 2023, YaRN: Efficient Context Window Extension, arXiv:2309.00071"

    @property
    def identity_below(self) -> float:
        return self.train_length or 0

    def distance(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).double()

    def rescaled(self, i: Tensor, j: Tensor) -> Tensor:
        return (i >= known(self.train_length)) & torch.ones_like(j, dtype=torch.bool)

    def bands(self, i: Tensor) -> list[Band]:
        late = i >= known(self.train_length)
        within, beyond = torch.where(late, -1, NEVER), torch.where(late, 0, NEVER)
        return [Band(last=within), Band(first=beyond, query=Tensor.double, key=Tensor.double, spectrum=self.spectrum)]
