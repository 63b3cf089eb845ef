"""The methods: one file each, a frozen dataclass with its formula in plain PyTorch.

A new method is one file here, a subclass of its slot in `base`, and one name in the call below.
"""

from ..config import register
from .scale_invariant import ScaleInvariant

register(ScaleInvariant)

__all__ = ["ScaleInvariant"]
