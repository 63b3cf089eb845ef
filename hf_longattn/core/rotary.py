"""Undoing and redoing a rotary position encoding on queries and keys that are rotated already."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .tables import TableCache
from .tracing import keepable, sent, version, wide_device

#: cos and sin.
Angles: TypeAlias = tuple[Tensor, Tensor]
#: A table of more positions than this is made only where more than one in SPARSE of them is asked for.
LONG, SPARSE = 1 << 18, 64


@dataclass(frozen=True, eq=False)
class Rotation:
    """A model's rotation: the pair f of a vector at position p is rotated by the angle p inv_freq[f].

    Args:
        inv_freq: float32 (pairs,), radians per position; a zero leaves its pair alone. Without pairs nothing is rotated.
        interleaved: pairs are features (2f, 2f + 1) instead of (f, f + pairs), counted from `first` on.
        first: the first rotated feature; those before it, and from first + 2 * pairs on, are not rotated (partial rotary,
            latent attention).
        axis: of tokens that have several positions each (M-RoPE), the axis whose position turns each pair; None: not known.
    """

    inv_freq: Tensor
    interleaved: bool = False
    first: int = 0
    axis: tuple[int, ...] | None = None

    @property
    def features(self) -> tuple[int, int, bool]:
        """The first feature that is rotated, the number of pairs, and `interleaved`."""
        return self.first, self.inv_freq.shape[0], self.interleaved

    @property
    def last(self) -> int:
        """The number of the first feature behind those that are rotated."""
        return self.first + 2 * self.inv_freq.shape[0]

    def rotate_half(self, x: Tensor) -> Tensor:
        """Every pair (a, b) as (-b, a); what is not rotated as 0."""
        first, second, rest = self.split(x)
        return self.join(-second, first, torch.zeros_like(rest))

    @property
    def known_axis(self) -> tuple[int, ...]:
        """`axis`; ValueError where it is not known."""
        if self.axis is None:
            raise ValueError("tokens with several positions each need Rotation(axis=), the axis that turns each pair")
        return self.axis

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first and second features of all pairs, (..., pairs) each, and the features that are not rotated."""
        pairs = self.inv_freq.shape[0]
        before, rotated, rest = x.tensor_split((self.first, self.last), -1)
        rest = torch.cat([before, rest], -1) if self.first else rest
        if self.interleaved:
            return rotated[..., 0::2], rotated[..., 1::2], rest
        return rotated[..., :pairs], rotated[..., pairs:], rest

    def basis(self, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices (head_dim, 2, head_dim): x @ the first is [x, rotate_half(x)], x @ the second [-rotate_half(x), x]."""
        eye = torch.eye(head_dim, dtype=like.dtype, device=like.device)
        half = self.rotate_half(eye)
        return torch.stack([eye, half], 1), torch.stack([-half, eye], 1)

    def join(self, first: Tensor, second: Tensor, rest: Tensor) -> Tensor:
        """The inverse of `split`."""
        pair = torch.stack([first, second], -1).flatten(-2) if self.interleaved else torch.cat([first, second], -1)
        if not rest.shape[-1]:
            return pair
        return torch.cat([rest[..., : self.first], pair, rest[..., self.first :]], -1)


class RotationDelta(NamedTuple):
    """A turn of vectors, which are rotated for where they stand, to where a remap shows them.

    Args:
        rotation: the model's; needed as soon as anything is turned.
        remap: from positions to those shown (see `slots.base.Remap`).
        spectrum: from the model's frequencies to those that these are shown at, and a factor; None: the model's.
        name: identifies remap and spectrum in tables, where angles are kept.
        interval: its number among the method's intervals. Intervals that turn keys alike take the first one's number, and so
            share kept keys.
    """

    rotation: Rotation | None
    remap: Callable[[Tensor], Tensor]
    spectrum: Callable[[Tensor], tuple[Tensor, float]] | None = None
    name: Hashable = None
    interval: int = 0

    @property
    def known_rotation(self) -> Rotation:
        """`rotation`; ValueError where the caller gave none."""
        if self.rotation is None:
            raise ValueError(
                "a remap of rotary distances needs rotation=hf_longattn.Rotation(inv_freq): the model's frequencies"
            )
        return self.rotation

    def kept_angles(self, position: Tensor, tables: TableCache, device: torch.device) -> Angles:
        """`angles` of position, int64 (batch or 1, n) or (axes, batch or 1, n), >= 0, kept in tables on a device.

        Both (batch or 1, n, key heads or 1, pairs).
        """
        return self._look_up(position, self.name, self.angles, tables, device)

    def by_feature(self, position: Tensor, head_dim: int, tables: TableCache | None = None) -> Angles:
        """c and s by feature with q . turned(k) = q . (c k) + rotate_half(q) . (s k); kept in tables, if given.

        Both (batch or 1, n, key heads or 1, head_dim).
        """

        def widened(cos: Tensor, sin: Tensor) -> Angles:
            rest = cos.new_zeros(*cos.shape[:-1], head_dim - 2 * cos.shape[-1])
            return self.known_rotation.join(cos, cos, rest + 1), self.known_rotation.join(-sin, -sin, rest)

        def by_angles(position: Tensor) -> Angles:
            return widened(*self.angles(position))

        if tables is None:
            return by_angles(position)
        if position.ndim > 2:
            return widened(*self.kept_angles(position, tables, position.device))
        return self._look_up(position, (self.name, head_dim), by_angles, tables, position.device)

    def _look_up(
        self,
        position: Tensor,
        name: Hashable,
        build: Callable[[Tensor], Angles],
        tables: TableCache,
        device: torch.device,
    ) -> Angles:
        """build(position), looked up in a table of all positions to beyond the largest, which is kept under a name.

        Built as it is where nothing may be kept, or the table would be long and few of its positions are asked for.
        """
        if not keepable(position):
            return build(sent(position, device))
        length = 1 << max(10, int(position.max()).bit_length())
        if length > max(LONG, SPARSE * position.shape[-1]):
            return build(sent(position, device))

        def build_all() -> Angles:
            with torch.inference_mode(False), torch.no_grad():
                return build(torch.arange(length, device=device))

        cos, sin = tables.get((self.known_rotation, name, length, device, version(self.known_rotation.inv_freq)), build_all)
        if position.ndim > 2:
            which = sent(torch.tensor(self.known_rotation.known_axis, device="cpu"), device)
            which = which.expand(1, *position.shape[1:], *cos.shape[1:])
            position = sent(position, device)
            return cos[position].gather(0, which)[0], sin[position].gather(0, which)[0]
        first, n = int(position[0, 0]), position.shape[1]
        if bool((position == torch.arange(first, first + n, device=position.device)).all()):
            return cos[None, first : first + n], sin[None, first : first + n]
        position = sent(position, device)
        return cos[position], sin[position]

    def angles(self, position: Tensor) -> Angles:
        """cos and sin of the angle from position to remap(position): (..., key heads or 1, pairs), in inv_freq's dtype.

        Of positions (axes, batch or 1, n) each pair takes its own axis. With a spectrum the angle to remap(position) is at the
        spectrum's frequencies, and cos and sin are multiplied by its factor.
        """
        # The old angle is rounded as the model rounded it, so that undoing it is exact; then nothing more is lost.
        # Models take frequencies that are in half precision (model.half()) to float32 before they multiply
        inv_freq, device = self.known_rotation.inv_freq, position.device
        position = position.to(wide_device(device))
        frequency = inv_freq.to(position.device, torch.promote_types(inv_freq.dtype, torch.float32))
        if several := position.ndim > 2:
            position = position[list(self.known_rotation.known_axis)].movedim(0, -1)
        old = ((position if several else position[..., None]).to(frequency.dtype) * frequency).double()
        new = self.remap(position).double()
        new = new[..., None] if new.ndim == position.ndim else new
        new = new.transpose(-1, -2) if several else new[..., None]
        wide = torch.float64 if frequency.dtype == torch.float64 else torch.float32
        shown, factor = (frequency.double(), None) if self.spectrum is None else self.spectrum(frequency.double())
        angle = new * shown - old[..., None, :]
        if torch.compiler.is_compiling() and wide == torch.float32:
            # a compiled step makes them anew: within half a turn float32 has them to 2e-7, where a GPU is slow in float64
            angle = (angle - 2 * math.pi * torch.round(angle / (2 * math.pi))).float()
        cos, sin = angle.cos(), angle.sin()
        if factor is not None:
            cos, sin = factor * cos, factor * sin
        return sent(cos.to(wide), device), sent(sin.to(wide), device)
