"""Finding out how a model rotates its queries and keys, and proving it on the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..rotary import Rotation

#: Tokens in the proof: enough to tell one frequency from another.
PROBE = 8


@dataclass(eq=False)
class RotarySource:
    """The rotation of some layers: their model's rotary module and the buffer that holds their frequencies."""

    module: nn.Module
    buffer: str
    interleaved: bool = False
    proven: bool = False
    _seen: tuple[Tensor, int, Rotation] | None = None

    def rotation(self) -> Rotation:
        """The rotation now; models with dynamic frequencies change the buffer as they go."""
        if not self.proven:
            raise RuntimeError(
                "how this model rotates queries and keys was not checked yet, and cannot be while compiling: call the model "
                "once before torch.compile, or use hf_longattn.apply(model, ...)"
            )
        inv_freq: Tensor = getattr(self.module, self.buffer)
        if torch.compiler.is_compiling():
            return Rotation(inv_freq.detach(), self.interleaved)
        if self._seen is None or self._seen[0] is not inv_freq or self._seen[1] != inv_freq._version:
            self._seen = (inv_freq, inv_freq._version, Rotation(inv_freq.detach(), self.interleaved))
        return self._seen[2]


def find_rotary(model: nn.Module, config: Any, layer_type: str | None) -> RotarySource | None:
    """The rotary module that belongs to `config`, with the buffer for a layer type; None if there is none."""
    for module in model.modules():
        if getattr(module, "config", None) is not config or not hasattr(module, "named_buffers"):
            continue
        names = {name for name, _ in module.named_buffers(recurse=False)}
        for name in (f"{layer_type}_inv_freq", "inv_freq"):
            if name in names:
                return RotarySource(module, name)
    return None


def prove(name: str, source: RotarySource, vectors: Tensor) -> None:
    """Check a source against what a layer really computed.

    Args:
        vectors: (1, heads, PROBE, head_dim), the rotated queries or keys of one and the same token at positions 0, 1, ...

    Raises:
        ValueError: turning the first by each distance gives none of the others, in either convention.
    """
    n = vectors.shape[2]
    zeros = torch.zeros(1, n, dtype=torch.int64, device=vectors.device)
    first = vectors[:, :, :1].expand(-1, -1, n, -1)
    tolerance = 1e-3 if vectors.dtype in (torch.float32, torch.float64) else 0.05
    for interleaved in (False, True):
        rotation = Rotation(getattr(source.module, source.buffer).detach(), interleaved)
        if 2 * rotation.inv_freq.shape[0] > vectors.shape[-1]:
            break
        cos, sin = rotation.angles(zeros, lambda p: torch.arange(n, device=p.device).expand_as(p))
        turned = rotation.turn(first, cos, sin)
        if (turned - vectors).abs().max() <= tolerance * vectors.abs().max():
            source.interleaved, source.proven = interleaved, True
            return
    raise ValueError(
        f"cannot remap rotary distances here: turning vectors by {source.buffer} does not give what {name} computes, neither "
        "in halves nor interleaved. The model rotates in a way that hf_longattn does not understand; leave the positions and "
        "visibility slots empty"
    )
