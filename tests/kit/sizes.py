"""Kernels that work in small pieces, so that a small test has several of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hf_longattn.core import rotated_keys
from hf_longattn.core.kernels import bands, few_cpu, sdpa, tiles, visible_keys
from hf_longattn.evaluation.measures import blocks

#: Where sizes are written down that decide how much is done at a time, and nothing of what comes out.
MODULES = (tiles, bands, sdpa, few_cpu, visible_keys, rotated_keys, blocks)


@contextlib.contextmanager
def small(**sizes: int) -> Iterator[None]:
    """While open, constants of these names have these values in all of the modules that know them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            knowing = [module for module in MODULES if hasattr(module, name)]
            assert knowing, f"no module has a size {name}"
            for module in knowing:
                patch.setattr(module, name, size)
        yield
