"""Rotation of a model's queries and keys: the buffer that it goes by, and its convention."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.kernels.rotate import rotate
from ..core.rotary import Rotation, RotationDelta
from ..core.tracing import keepable, only_a_shape, version

PROBE = 8
#: Positions at which the slowest pairs have turned, one axis after another (M-RoPE): float32 holds them all.
FAR_APART = tuple(tuple(0 if n == 0 else step * 16 ** (n - 1) for n in range(PROBE)) for step in (1, 3, 7))


class Convention(NamedTuple):
    """The convention by which a model's code reads its frequencies: see `Rotation`."""

    interleaved: bool = False
    backwards: bool = False  # turned by -p inv_freq (NanoChat)
    first: int = 0


@dataclass(eq=False)
class RotarySource:
    """The rotation of some layers: their model's rotary module and the buffer that holds their frequencies.

    Which features form a pair, and which way they turn, are conventions of its code: see `verify_rotations`.
    still: layers that get this encoding and do not use it; their queries and keys are not rotated.
    axis: see `Rotation`; found out when a text with pictures comes.
    """

    module: nn.Module
    buffer: str
    convention: Convention | None = None  # once it is verified
    still: bool = False
    axis: tuple[int, ...] | None = None
    # the last rotation, and the frequencies that it was made of; init=False: `dataclasses.replace` begins without
    _seen: tuple[Tensor, Hashable, Rotation] | None = field(default=None, init=False)

    @property
    def verified(self) -> bool:
        return self.still or self.convention is not None

    def rotation(self, query: Tensor) -> Rotation:
        """The rotation now; models with dynamic frequencies change the buffer as they go.

        Raises:
            RuntimeError: it is not verified, and `query` is more than a shape.
        """
        if not self.verified and not only_a_shape(query):
            raise RuntimeError(
                "how this model rotates queries and keys was not checked yet, and cannot be while a graph is traced: call the "
                "model once before torch.compile or torch.export, or use hf_longattn.apply(model, ...)"
            )
        inv_freq: Tensor = getattr(self.module, self.buffer)
        seen = None if torch.compiler.is_compiling() else self._seen
        if seen is not None and seen[0] is inv_freq and seen[1] == version(inv_freq):
            return seen[2]
        convention = self.convention or Convention()
        if not keepable(inv_freq):
            return self.under(convention)
        with torch.inference_mode(False):  # nobody counts writes to tensors of that mode: each pass would read their values
            if inv_freq.is_inference() and keepable(counted := inv_freq.clone()):
                inv_freq = counted
                setattr(self.module, self.buffer, inv_freq)
            rotation = self.under(convention)
        if keepable(rotation.inv_freq):  # not where all that is made is fake
            self._seen = inv_freq, version(inv_freq), rotation
        return rotation

    def under(self, convention: Convention) -> Rotation:
        """The rotation that a convention makes of the frequencies."""
        inv_freq: Tensor = getattr(self.module, self.buffer).detach()
        inv_freq = inv_freq[:0] if self.still else inv_freq
        inv_freq = -inv_freq if convention.backwards else inv_freq
        return Rotation(inv_freq, convention.interleaved, convention.first, self.axis)

    def turns_by(self, axis: tuple[int, ...]) -> None:
        """Set the axis by which each pair turns, for all rotations from now on."""
        self.axis, self._seen = axis, None


def find_rotary(modules: Iterable[nn.Module], config: Any, layer_type: str | None) -> RotarySource | None:
    """Find the rotary module of `config` among these, with the buffer for a layer type; None: there is none.

    A module that was made from a copy of the config counts if there is one alone.
    """
    like: list[RotarySource] = []
    for module in modules:
        own = getattr(module, "config", None)
        if type(own) is not type(config) or not hasattr(module, "named_buffers"):
            continue
        names = {name for name, _ in module.named_buffers(recurse=False)}
        if name := next((name for name in (f"{layer_type}_inv_freq", "inv_freq") if name in names), None):
            if own is config:
                return RotarySource(module, name)
            like.append(RotarySource(module, name))
    return like[0] if len(like) == 1 else None


def find_convention(
    source: RotarySource, computed: Iterable[tuple[str, Tensor, Tensor]]
) -> tuple[Convention | None, set[str]]:
    """A source's convention by what its layers really computed, and which of them do not rotate; None if none does.

    Args:
        computed: layers by name, each with rotated queries and keys of one and the same token at positions 0, 1, ...:
            (1, heads, PROBE, head_dim).

    Raises:
        ValueError: under no convention does turning the first by each distance give all the others; or under several.
    """
    left: list[Convention] = []
    still = set()
    for name, *vectors in computed:
        fits = [c for c in left or _conventions(source, vectors) if all(_gives(source.under(c), x) for x in vectors)]
        if not fits and all(_gives(Rotation(torch.zeros(0, device=x.device)), x) for x in vectors):
            still.add(name)
        elif not fits:
            raise ValueError(
                f"cannot remap rotary distances here: turning vectors by {source.buffer} does not give what {name} computes, "
                "neither in halves nor interleaved, neither forwards nor backwards, wherever in a head. hf_longattn does not "
                "understand this rotation; leave the positions and visibility slots empty"
            )
        else:
            left = fits
    if any(_differ(source.under(left[0]), source.under(other)) for other in left[1:]):
        raise ValueError(
            "cannot tell how the model rotates its queries and keys, so it cannot be remapped: they are too small to show it "
            "(all zeros?). Apply the method to a model with weights"
        )
    return (left[0] if left else None), still


def find_axes(source: RotarySource, computed: Iterable[tuple[str, Tensor, Tensor]]) -> tuple[int, ...]:
    """The axis of positions that turns each pair, by what layers really computed.

    Args:
        computed: layers by name, each with rotated queries and keys of one and the same token at the positions `FAR_APART` on
            its axes: (1, heads, PROBE, head_dim).

    Raises:
        ValueError: no axis gives what a layer computed of a pair, or several do.
    """
    rotation, names = source.under(source.convention or Convention()), []
    fits = torch.ones(len(FAR_APART), len(rotation.inv_freq), dtype=torch.bool, device="cpu")
    farthest = torch.tensor(FAR_APART, device="cpu").amax(0)[:, None]
    rounded = farthest * rotation.inv_freq.abs().cpu() > 512  # angles that models may have rounded in another way
    for name, *vectors in computed:
        names.append(name)
        for x in vectors:
            first, second, _ = rotation.split(x[:, :, :1])
            near = _tolerance(torch.hypot(first, second), by_pair=True) + 1e-2 * _tolerance(x)
            for a, positions in enumerate(FAR_APART):
                off = torch.stack(rotation.split(_turned(rotation, x, positions) - x)[:2]).abs().amax(0)
                fits[a] &= ((off <= near).cpu() | rounded).all((0, 1, 2))
    turning = rotation.inv_freq.cpu() != 0
    if not fits.any(0)[turning].all():
        raise ValueError(
            f"cannot tell by which of several positions {names[0]} turns its queries and keys (M-RoPE): not each pair of "
            "features by one of three. A remap of rotary distances reads text alone here"
        )
    if (fits.sum(0) > 1)[turning].any():
        raise ValueError(
            f"cannot tell by which of several positions {names[0]} turns its queries and keys (M-RoPE): they are too small to "
            "show it (all zeros?). A remap of rotary distances reads text alone here"
        )
    return tuple(fits.int().argmax(0).tolist())


def _conventions(source: RotarySource, vectors: list[Tensor]) -> list[Convention]:
    """Return the conventions under which all features that change between positions are rotated."""
    rotated, width = 2 * source.under(Convention()).inv_freq.shape[0], vectors[0].shape[-1]
    changed = [((x - x[:, :, :1]).abs().amax((0, 1, 2)) > _tolerance(x)).nonzero().flatten().tolist() for x in vectors]
    lowest, highest = (pick([pick(c) for c in changed if c], default=None) for pick in (min, max))
    last = width - rotated if lowest is None else min(lowest, width - rotated)
    firsts = range(0 if highest is None else max(highest + 1 - rotated, 0), last + 1)
    return [Convention(*c) for c in itertools.product((False, True), (False, True), firsts)]


def _gives(rotation: Rotation, vectors: Tensor) -> bool:
    """Tell whether turning the first vector by each distance gives the others."""
    turned = _turned(rotation, vectors, range(vectors.shape[2]))
    return bool((turned - vectors).abs().max() <= _tolerance(vectors))


def _turned(rotation: Rotation, vectors: Tensor, positions: Sequence[int]) -> Tensor:
    """The first of some vectors, which is at position 0, turned to each of as many positions."""
    to = torch.tensor(positions, device=vectors.device)[None]
    # from there to 0, the other way round: angles are rounded as the model rounds them
    cos, sin = RotationDelta(rotation, torch.zeros_like).angles(to)
    return rotate(rotation, vectors[:, :, :1].expand(-1, -1, len(positions), -1), cos, -sin)


def _tolerance(vectors: Tensor, by_pair: bool = False) -> Tensor:
    return (1e-3 if vectors.dtype in (torch.float32, torch.float64) else 0.05) * (vectors if by_pair else vectors.abs().max())


def _differ(one: Rotation, other: Rotation) -> bool:
    pairing = one.interleaved != other.interleaved and one.inv_freq.shape[0] > 1
    place = one.first != other.first
    return bool(one.inv_freq.any()) and (pairing or place or not torch.equal(one.inv_freq, other.inv_freq))
